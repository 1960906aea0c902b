"""Drafts for all sessions of all targets, step by step. Knows nothing of gRPC: events in, events out.

A step runs every session that has something to draft, each at its own place in its round, and a share of the
prompts still to be read. State changes only between steps.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from engine.draft_rounds import RoundOutput, RoundRequest
from sparsity.whole_rounds import announced_selection, announcement_request, round_settings
from torch import Tensor

from draft_service.session import DraftSession, common_prefix
from engine.inputs import SequenceInput
from engine.kv.pages import pages_for
from engine.runner import Runner
from engine.sampling import USE_DRAFT, Sampling, Support, limit_support, uniforms
from engine.step_loop import share_prefill
from kernels.rejection import draw, truncated_probs
from sparsity.announce import BY_TARGET_HEAD, announce
from sparsity.methods import Method
from sparsity.plan import Plan
from sparsity.selection import BlockSelection
from wire.messages import (
    Announcement,
    Begin,
    Decline,
    DraftEvent,
    End,
    Proposal,
    Ready,
    Refusal,
    Resync,
    TargetEvent,
    Verdict,
)
from wire.selection_codec import encode_selection

_FORESIGHT = 0.5  # share of verdicts foreseen from which drafting ahead pays
Send = Callable[[DraftEvent], None]


@dataclass(frozen=True)
class DrafterSettings:
    """gamma: tokens a round. support: entries of a sampled token's distribution that travel.

    ahead: draft the next round while one is judged, for sessions whose verdicts are mostly foreseen; others would
    take the time of those that wait. waves: parts that sessions with rounds to draft are taken in, so that a target
    verifies one part while the next is drafted; 0: 2 where the runner drafts whole rounds, else 1. read_share: of the
    KV blocks that the later steps of a round read, where the runner drafts whole rounds; the first step reads
    everything. prefill_chunk: prompt tokens a step, over all sessions. warm_sessions: batches up to this size are made
    ready before the first.
    """

    gamma: int = 4
    support: int = 64
    ahead: bool = True
    waves: int = 0
    read_share: float = 1.0
    prefill_chunk: int = 512
    warm_sessions: int = 16
    max_context: int = 32768

    def __post_init__(self) -> None:
        if self.waves < 0:
            raise ValueError(f"waves is {self.waves}, expected a number of parts, or 0 for the runner's own")


@dataclass
class Drafted:
    """What one step gave one session."""

    token: int | None = None
    support: Support | None = None
    weights: Tensor | None = None  # [layers, heads, blocks], of the query that was run
    selection: BlockSelection | None = None  # what is to be announced with them, if anything


@dataclass
class Query:
    """One of the queries of a round that announces; `evidence` is of those before it, `last` of the last round.

    selects: whether it is the round's last.
    """

    method: Method
    base: int
    evidence: list[Tensor]
    last: BlockSelection | None
    selects: bool


@dataclass
class Step:
    """`rounds`: sessions whose whole round the runner drafts; `sessions`: one query, or a part of a prompt."""

    sessions: list[tuple["Peer", DraftSession]] = field(default_factory=list)
    inputs: list[SequenceInput] = field(default_factory=list)
    queries: list[Query | None] = field(default_factory=list)
    rounds: list[tuple["Peer", DraftSession]] = field(default_factory=list)
    requests: list[RoundRequest] = field(default_factory=list)


@dataclass
class StepResult:
    drafted: list[Drafted]
    rounds: list[RoundOutput]
    seconds: float


class Peer:
    """A target at the other end of a stream: its sessions, and how to send to it.

    near: on the same machine, where announcements need not be small.
    """

    def __init__(self, name: str, send: Send, near: bool = False) -> None:
        self.name = name
        self.send = send
        self.near = near
        self.sessions: dict[str, DraftSession] = {}
        self.ended: deque[str] = deque(maxlen=1024)  # their late verdicts are of no interest


class Drafter:
    def __init__(self, runner: Runner, plan: Plan, settings: DrafterSettings) -> None:
        self.runner = runner
        self.plan = plan
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self._peers: list[Peer] = []
        self._inbox: list[tuple[Peer, TargetEvent | None]] = []
        self._waiting: deque[tuple[Peer, Begin]] = deque()  # sessions without room
        self._reserved = 0
        self._steps = 1
        self._waves = settings.waves or (2 if runner.drafts_rounds else 1)
        if runner.drafts_rounds:
            rounds = round_settings(plan, settings.gamma, settings.support, settings.read_share)
            runner.prepare_rounds(rounds)

    # Events from targets. They are applied between steps.

    def attach(self, peer: Peer) -> None:
        self._peers.append(peer)

    def detach(self, peer: Peer) -> None:
        """Forget a target whose stream broke, with all its sessions."""
        self._inbox.append((peer, None))

    def receive(self, peer: Peer, event: TargetEvent) -> None:
        self._inbox.append((peer, event))

    @property
    def session_count(self) -> int:
        return sum(len(peer.sessions) for peer in self._peers)

    def _apply_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for peer, event in inbox:
            match event:
                case None:
                    self._waiting = deque(item for item in self._waiting if item[0] is not peer)
                    for session in list(peer.sessions.values()):
                        self._drop(peer, session)
                    self._peers.remove(peer)
                case Begin():
                    self._begin(peer, event)
                case Verdict():
                    self._judge(peer, event)
                case End(session_id):
                    peer.ended.append(session_id)
                    self._waiting = deque(
                        w for w in self._waiting if w[0] is not peer or w[1].at.session != session_id
                    )
                    if session_id in peer.sessions:
                        self._drop(peer, peer.sessions[session_id])
                case Refusal(expected, _):
                    self.counters["refused_frames"] += 1
                    peer.send(Resync(expected.session))

    def _begin(self, peer: Peer, begin: Begin) -> None:
        name = begin.at.session
        if name in peer.ended:  # a name used again; or a late repeat, which the target ends at our first word
            peer.ended.remove(name)
        known = peer.sessions.get(name)
        if known is not None:
            if begin.at.epoch <= known.epoch:  # the target begins a session anew in a later epoch only
                self.counters["stale_frames"] += 1
                return
            self._drop(peer, known)
        self._waiting = deque(w for w in self._waiting if w[0] is not peer or w[1].at.session != name)
        if begin.max_length > self.settings.max_context:
            peer.send(
                Decline(name, f"{begin.max_length} tokens, the draft model reads {self.settings.max_context}")
            )
            peer.ended.append(name)  # there will never be room: its verdicts are of no interest
            return
        need = self._need(begin.max_length)
        if self._reserved + need > self.runner.kv.pool.num_pages:
            self.counters["declined_sessions"] += 1
            peer.send(Decline(name, "no room"))
            self._waiting.append((peer, begin))
            return
        self._reserved += need
        session = DraftSession.from_begin(begin, self.settings.gamma)
        self.runner.kv.reuse_prefix(session.kv, session.tokens[:-1])
        peer.sessions[name] = session

    def _need(self, max_length: int) -> int:
        """Pages that a session may come to hold: its tokens and two rounds drafted beyond them."""
        return pages_for(max_length + 2 * (self.settings.gamma + 1))

    def _drop(self, peer: Peer, session: DraftSession) -> None:
        self.runner.kv.release(session.kv)
        self._reserved -= self._need(session.max_length)
        del peer.sessions[session.id]
        if self._waiting:
            waiting_peer, begin = self._waiting.popleft()
            # It went on without us: ask for where it stands now.
            waiting_peer.send(Resync(begin.at.session))

    def _judge(self, peer: Peer, verdict: Verdict) -> None:
        name = verdict.at.session
        session = peer.sessions.get(name)
        if session is None:
            waiting = any(p is peer and b.at.session == name for p, b in self._waiting)
            if name not in peer.ended and not waiting:
                peer.send(Resync(name))
            return
        if verdict.at.round <= session.judged:
            self.counters["repeated_verdicts"] += 1
            return
        session.early_verdicts[verdict.at.round - 1] = verdict
        if len(session.early_verdicts) > 64:
            peer.send(Resync(name))
            session.early_verdicts.clear()
        while (ready := session.early_verdicts.pop(session.judged, None)) is not None:
            try:
                self._take_verdict(peer, session, ready)
            except ValueError:
                self.counters["resyncs"] += 1
                peer.send(Resync(name))
                return

    def _take_verdict(self, peer: Peer, session: DraftSession, verdict: Verdict) -> None:
        before, epoch = session.tokens[verdict.at.base :], session.epoch
        if session.apply(verdict):
            if session.epoch != epoch:
                self._send_again(peer, session)
            self._go_ahead(session)
        else:
            common = verdict.at.base + common_prefix(before, verdict.tokens)
            # The last token is always run again: its logits start the next round.
            self.runner.kv.truncate(session.kv, min(session.kv.length, common, len(session.tokens) - 1))
        kv = self.runner.kv
        kv.index_prefix(session.kv, session.tokens, session.committed)

    def _send_again(self, peer: Peer, session: DraftSession) -> None:
        """The epoch has moved but the work drafted ahead still holds: say again what was said of it."""
        if session.selection is not None:
            self._announce(peer, session, session.selection)
        if session.proposal is not None:
            self._propose(peer, session)

    # Steps.

    def plan_step(self) -> Step | None:
        self._apply_inbox()
        ready: list[tuple[Peer, DraftSession]] = []
        reading: list[tuple[Peer, DraftSession]] = []
        drafting = 0
        for peer in self._peers:
            for session in peer.sessions.values():
                # A few tokens behind is catching up, not reading a prompt.
                short = len(session.tokens) - session.kv.length <= 2 * (self.settings.gamma + 1)
                drafting += short
                if not session.wants_step(self._goes_ahead(session)):
                    continue
                session.waiting = session.waiting or self._steps
                (ready if short else reading).append((peer, session))
        if not ready and not reading:
            return None
        self._steps += 1
        ready.sort(key=lambda item: item[1].waiting)
        del ready[max(1, -(-drafting // self._waves)) :]
        step = Step()
        for peer, session in ready:
            if session.ready_due:
                session.ready_due = False
                peer.send(Ready(session.at))
            if self._drafts_whole(session):
                step.rounds.append((peer, session))
                step.requests.append(self._request(session))
                continue
            step.sessions.append((peer, session))
            step.queries.append(self._query(session))
            emitting = int(step.queries[-1] is not None)
            step.inputs.append(
                SequenceInput(
                    session.kv, session.pending, "last", block_size=self.plan.block_size, emitting=emitting
                )
            )
        shares = share_prefill(
            [len(session.pending) - 1 for _, session in reading], self.settings.prefill_chunk
        )
        for (peer, session), share in zip(reading, shares, strict=True):
            if share:
                step.sessions.append((peer, session))
                step.queries.append(None)
                step.inputs.append(SequenceInput(session.kv, session.pending[:share]))
        return step

    def _goes_ahead(self, session: DraftSession) -> bool:
        """A draft with one session has nothing else to do."""
        return self.settings.ahead and session.foresees(0.0 if self.session_count == 1 else _FORESIGHT)

    def _go_ahead(self, session: DraftSession) -> None:
        if self._goes_ahead(session):
            session.go_ahead()

    def _drafts_whole(self, session: DraftSession) -> bool:
        """Whether the runner drafts a session's whole round: none of it is drafted yet, and it can choose for it."""
        method = session.method
        if not self.runner.drafts_rounds or len(session.tokens) > session.base or session.evidence:
            return False
        if method is None:
            return True
        return method.announcing is BY_TARGET_HEAD and self.plan.sharing == "pooled"

    def _request(self, session: DraftSession) -> RoundRequest:
        sampling, announce = session.sampling, None
        if session.method is not None:
            last = session.last_announced[1] if session.last_announced else None
            announce = announcement_request(self.plan, session.base, last)
        drawn = uniforms(sampling.seed, session.base, self.settings.gamma + 1, USE_DRAFT)
        return RoundRequest(
            session.kv,
            session.pending,
            sampling.temperature,
            sampling.top_p,
            drawn,
            announce,
        )

    def _query(self, session: DraftSession) -> Query | None:
        """The query that the next step of a session is, if its round announces."""
        if session.method is None or session.selection is not None:
            return None
        last = session.last_announced[1] if session.last_announced else None
        return Query(session.method, session.base, list(session.evidence), last, session.selection_due)

    def execute(self, step: Step) -> StepResult:
        """Runs in the model thread; touches no session but through the inputs' KV."""
        started = time.perf_counter()
        rounds = self.runner.draft_rounds(step.requests) if step.requests else []
        outputs = self.runner.forward(step.inputs) if step.inputs else []
        drafted = [Drafted() for _ in outputs]
        for item, query, output in zip(drafted, step.queries, outputs, strict=True):
            if query is not None:
                assert output.block_weights is not None
                item.weights = output.block_weights[:, 0, :, : self.plan.num_blocks(query.base)].cpu()
                if query.selects:
                    item.selection = self._choose(query, item.weights)
        rows = [i for i, output in enumerate(outputs) if output.logits is not None]
        if rows:
            sessions = [step.sessions[i][1] for i in rows]
            logits = torch.cat([outputs[i].logits for i in rows])  # type: ignore[misc]
            places = [len(session.tokens) for session in sessions]
            choices = draft_tokens(logits, [s.sampling for s in sessions], places, self.settings.support)
            for i, (token, support) in zip(rows, choices, strict=True):
                drafted[i].token, drafted[i].support = token, support
        return StepResult(drafted, rounds, time.perf_counter() - started)

    def _choose(self, query: Query, weights: Tensor) -> BlockSelection:
        """What a round announces, given the weights of its last query."""
        method = query.method
        assert method.announcing is not None
        evidence = torch.stack([*query.evidence, weights])
        rule = method.rule_of(self.plan)
        (selection,) = announce(method.announcing, evidence, self.plan, rule, query.base, query.last)
        return selection

    def finish_step(self, step: Step, result: StepResult) -> None:
        for (peer, session), output in zip(step.rounds, result.rounds, strict=True):
            self._take_round(peer, session, output, result.seconds)
        for (peer, session), drafted in zip(step.sessions, result.drafted, strict=True):
            if drafted.token is None:
                self.runner.kv.index_prefix(session.kv, session.tokens, session.committed)
                continue
            session.draft_seconds += result.seconds
            if drafted.weights is not None:
                self._take_evidence(peer, session, drafted)
            if session.proposal is not None:
                session.guess = drafted.token
                self._go_ahead(session)
                continue
            session.tokens.append(drafted.token)
            if drafted.support is not None:
                session.supports.append(drafted.support)
            if len(session.tokens) - session.base == session.gamma_here:
                self._propose(peer, session)

    def _take_round(self, peer: Peer, session: DraftSession, output: RoundOutput, seconds: float) -> None:
        """What the steps of a round give one by one, at once."""
        count = session.gamma_here
        session.draft_seconds += seconds
        session.tokens += output.tokens[:count]
        session.kv.length = session.base + count
        if output.ids is not None and output.probs is not None:
            for ids, probs in zip(output.ids[:count], output.probs[:count], strict=True):
                held = probs > 0
                session.supports.append(Support(ids[held], probs[held]))
        if output.words is not None:
            session.selection = announced_selection(output.words, self.plan, session.base)
            self._announce(peer, session, session.selection)
        self._propose(peer, session)
        session.guess = output.tokens[count]
        self._go_ahead(session)

    def _take_evidence(self, peer: Peer, session: DraftSession, drafted: Drafted) -> None:
        """A query's weights; with the last query of a round its selection is announced."""
        assert drafted.weights is not None
        session.evidence.append(drafted.weights)
        if drafted.selection is not None:
            session.selection = drafted.selection
            self._announce(peer, session, drafted.selection)

    # What is announced.

    def _announce(self, peer: Peer, session: DraftSession, selection: BlockSelection) -> None:
        known = session.known_selections
        if peer.near:
            data = encode_selection(selection, compact=False)
        elif known:
            (name, newest), *earlier = known
            data = encode_selection(selection, newest, name, earlier)
        else:
            data = encode_selection(selection)
        self.counters["announcements"] += 1
        self.counters["announced_bytes"] += len(data)
        peer.send(Announcement(session.at, session.tokens[session.base - 1], data))

    def _propose(self, peer: Peer, session: DraftSession) -> None:
        self.counters["proposals"] += 1
        session.proposal = Proposal(
            at=session.at,
            announces=session.method is not None,
            assumed_token=session.tokens[session.base - 1],
            tokens=session.tokens[session.base : session.base + session.gamma_here],
            supports=session.supports,
            draft_seconds=session.draft_seconds,
        )
        peer.send(session.proposal)


def draft_tokens(
    logits: Tensor, samplings: list[Sampling], places: list[int], support: int
) -> list[tuple[int, Support | None]]:
    """Choose a token for each row of logits [rows, vocab]; with its truncated distribution unless greedy.

    places: the position that each row's token will take.
    """
    chosen: list[tuple[int, Support | None]] = [(token, None) for token in logits.argmax(-1).tolist()]
    sampled = [i for i, sampling in enumerate(samplings) if not sampling.greedy]
    if sampled:
        temperature = torch.tensor([samplings[i].temperature for i in sampled], device=logits.device)
        top_p = torch.tensor([samplings[i].top_p for i in sampled], device=logits.device)
        probs = truncated_probs(logits[sampled], temperature, top_p)
        ids, top = (t.cpu() for t in limit_support(probs, support))
        numbers = [uniforms(samplings[i].seed, places[i], 1, USE_DRAFT)[0] for i in sampled]
        picks = draw(top, torch.from_numpy(np.array(numbers)))
        for row, i in enumerate(sampled):
            held = top[row] > 0
            token = int(ids[row, picks[row]])
            chosen[i] = (token, Support(ids[row][held].numpy(), top[row][held].numpy()))
    return chosen
