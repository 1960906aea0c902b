"""Decides, step by step, what the target model runs, and what of it is committed. Knows nothing of gRPC.

A step runs at once: every session whose proposal is here (γ + 1 tokens each), every session that no draft
serves for now (one token each), and a share of the prompts still to be read.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.batch import SequenceInput, SparseRead
from engine.judging import Drafted, judge_others
from engine.kv.cache import KVCache
from engine.kv.pages import PAGE_SIZE, pages_for
from engine.runner import Runner, SequenceOutput
from engine.sampling import USE_ACCEPT, uniforms
from engine.step_loop import share_prefill
from sparsity.methods import METHODS, methods_of
from sparsity.plan import Plan
from sparsity.reader import Reader
from sparsity.selection import BlockSelection
from target_service.recording import ReadRecording
from target_service.session import Announced, TargetSession
from wire.errors import InvalidArgument, ResourceExhausted, ServiceError
from wire.messages import (
    Announcement,
    Begin,
    Closed,
    Commit,
    Decline,
    DraftEvent,
    End,
    Exactness,
    FinishReason,
    Open,
    Proposal,
    Ready,
    Refusal,
    Resync,
    ServedEvent,
    TargetEvent,
    Verdict,
)
from wire.selection_codec import UnknownReference, decode_selection

log = logging.getLogger(__name__)

WARM_SESSIONS = 16  # batches up to this size are made ready before the first request


@dataclass(frozen=True)
class VerifierSettings:
    """gamma: most tokens a proposal may have. prefill_chunk: prompt tokens a step, over all sessions.

    draft_timeout: seconds to wait for a proposal before decoding plainly. max_sessions: more are queued;
    max_queued: more than that are refused. synthetic_acceptance: for measurements with random weights: drafted tokens
    are kept with this probability each, whatever the target says; None: the target decides.
    """

    gamma: int = 4
    prefill_chunk: int = 512
    draft_timeout: float = 1.0
    max_sessions: int = 64
    max_queued: int = 1024
    synthetic_acceptance: float | None = None
    max_context: int = 32768


class DraftPeer:
    """A draft at the other end of a stream, and how to send to it."""

    def __init__(self, name: str, send: Callable[[TargetEvent], None]) -> None:
        self.name = name
        self.send = send
        self.sessions: set[str] = set()


@dataclass
class Round:
    """A session's part of a step: a proposal to verify, or none to decode one token plainly."""

    session: TargetSession
    proposal: Proposal | None
    input: SequenceInput
    length: int  # tokens with KV once it has run
    wait_seconds: float


@dataclass
class Step:
    rounds: list[Round] = field(default_factory=list)
    prefills: list[tuple[TargetSession, SequenceInput]] = field(default_factory=list)


@dataclass
class StepResult:
    outcomes: list[tuple[int, int]]  # (accepted, next token) of each round
    outputs: list[SequenceOutput]  # of each round, without its logits
    seconds: float


class Verifier:
    """Owns all sessions. Commits go to the `emit` that a session was opened with."""

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        settings: VerifierSettings,
        recording: ReadRecording | None = None,
    ) -> None:
        self.runner = runner
        self.plan = plan
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self._sessions: dict[str, TargetSession] = {}
        self._emit: dict[str, Callable[[ServedEvent], None]] = {}
        self._queue: deque[TargetSession] = deque()
        self._reserved = 0
        self._first_epoch = 0  # of sessions to come: above all that were, so that a name can be used again
        self._drafts: list[DraftPeer] = []
        self._closed: list[TargetSession] = []  # whose pages a step that runs may still write
        self._methods = methods_of(plan)
        self._recording = recording
        if runner.shares_budgets:
            runner.keep_memories(settings.max_sessions + 1)  # a session may end in the step that runs
        if any(METHODS[name].uses_means(plan) for name in self._methods):
            runner.kv.keep_group_means(plan.group_size)
        _check_writable(runner.kv, settings)

    def warm_up(self) -> None:
        """Make the runner ready for the steps of plain, exact and, where it shares budgets out, sparse sessions."""
        reads: list[SparseRead | None] = [None]
        if self.runner.shares_budgets and "ahead" in self._methods:
            reader = Reader(METHODS["ahead"], self.plan, True)
            nothing = BlockSelection.from_lists([[]] * reader.announced_rows, self.plan.num_blocks(1))
            read = reader.read([nothing], 1, 1 + self.settings.gamma)
            reads += [] if read is None else [read]
        self.runner.warm_up(reads, min(self.settings.max_sessions, WARM_SESSIONS))

    @property
    def totals(self) -> dict[str, float]:
        """Counters since the start, those of KV tiers included."""
        kv = self.runner.kv
        return {**self.counters, **kv.totals}

    @property
    def gauges(self) -> dict[str, float]:
        kv = self.runner.kv
        return {
            **kv.gauges,
            "sessions": len(self._sessions),
            "queued_sessions": len(self._queue),
            "kv_pages_held": self.runner.kv.pool.held,
            "drafts": len(self._drafts),
            "drafted_sessions": sum(session.drafted for session in self._sessions.values()),
        }

    # Sessions: opened and aborted from the orchestrator's side.

    def open(self, request: Open, emit: Callable[[ServedEvent], None]) -> None:
        """Take a session up or queue it. Raises ServiceError if it can never run, or if the queue is full."""
        self._check_open(request)
        session = TargetSession(
            id=request.session,
            tokens=list(request.tokens),
            max_length=request.prompt_tokens + request.max_tokens,
            stop_token_ids=frozenset(request.stop_token_ids),
            sampling=request.sampling,
            reader=self._reader(request),
        )
        session.kv.dense = session.reads_all
        self._emit[session.id] = emit
        self._queue.append(session)

    def _reader(self, request: Open) -> Reader | None:
        """How a session reads. Raises InvalidArgument for a method that there is not, or that the plan rules out."""
        if request.exactness is Exactness.EXACT:
            return None
        name = request.sparsity or self.plan.method
        if name not in self._methods:
            raise InvalidArgument(
                f"session {request.session}: sparsity must be one of {', '.join(self._methods)}; got {name!r}"
            )
        if METHODS[name].just_in_time is not None and self.runner.kv.offloads:
            raise InvalidArgument(
                f"session {request.session}: {name} chooses while the target runs, which is not built for KV in tiers: "
                "choose another, or leave --host-kv-memory out"
            )
        return Reader(METHODS[name], self.plan, self.runner.shares_budgets)

    def _check_open(self, request: Open) -> None:
        vocab, settings = self.runner.vocab_size, self.settings
        if request.session in self._emit:
            raise InvalidArgument(f"session {request.session} is open already")
        if not 1 <= request.prompt_tokens <= len(request.tokens):
            raise InvalidArgument(f"{request.prompt_tokens} prompt tokens among {len(request.tokens)} tokens")
        if not all(token < vocab for token in request.tokens):
            raise InvalidArgument(f"a prompt token lies outside the vocabulary of {vocab}")
        length = request.prompt_tokens + request.max_tokens
        if request.max_tokens < 1 or len(request.tokens) >= length:
            raise InvalidArgument(f"max_tokens {request.max_tokens} leaves nothing to generate")
        if length > settings.max_context:
            raise InvalidArgument(
                f"{request.prompt_tokens} prompt tokens and max_tokens {request.max_tokens} exceed the context of "
                f"{settings.max_context} tokens"
            )
        if self._need(length) > self.runner.kv.pool.num_pages:
            raise InvalidArgument(
                f"{length} tokens need {self._need(length)} KV pages of {PAGE_SIZE}, "
                f"the target has {self.runner.kv.pool.num_pages}"
            )
        if len(self._queue) >= settings.max_queued:
            raise ResourceExhausted(f"{len(self._queue)} sessions are queued already; try again later")
        if self.runner.kv.offloads:
            leaving = sum(self._need(closed.max_length) for closed in self._closed)
            queued = sum(self._need(session.max_length) for session in self._queue)
            taken = self._reserved + queued - leaving
            if taken + self._need(length) > self.runner.kv.pool.num_pages:
                raise ResourceExhausted(
                    f"{length} tokens need {self._need(length)} KV pages, open sessions have {taken} of the "
                    f"{self.runner.kv.pool.num_pages} in host memory; try again later"
                )

    def _need(self, length: int) -> int:
        return pages_for(length + self.settings.gamma + 1)

    def _admit(self) -> None:
        while self._queue and len(self._sessions) < self.settings.max_sessions:
            session = self._queue[0]
            need = self._need(session.max_length)
            if self._reserved + need > self.runner.kv.pool.num_pages:
                return
            self._queue.popleft()
            self._reserved += need
            self._sessions[session.id] = session
            session.epoch = self._first_epoch
            self.runner.kv.reuse_prefix(session.kv, session.tokens[:-1])
            self.counters["opened_sessions"] += 1
            self._assign_draft(session, wait=True)

    def abort(self, session_id: str) -> None:
        """End a session, also during a step on it; unknown ones are ignored, since an abort may cross the end."""
        session = self._sessions.get(session_id)
        if session is not None:
            self.counters["aborted_sessions"] += 1
            self._close(session)
        elif session_id in self._emit:
            self._queue = deque(queued for queued in self._queue if queued.id != session_id)
            del self._emit[session_id]

    def _close(self, session: TargetSession) -> None:
        """The name is free at once; the pages are when no step runs."""
        if session.draft is not None:
            session.draft.sessions.discard(session.id)
            session.draft.send(End(session.id))
        self._closed.append(session)
        self._first_epoch = max(self._first_epoch, session.epoch + 1)
        del self._sessions[session.id], self._emit[session.id]

    def _is_open(self, session: TargetSession) -> bool:
        """Whether a session is still the one of its name; it may have been aborted during a step."""
        return self._sessions.get(session.id) is session

    def _release_closed(self) -> None:
        for session in self._closed:
            self.runner.kv.release(session.kv)
            self._reserved -= self._need(session.max_length)
        self._closed.clear()

    def close_all(self, error: ServiceError) -> None:
        """Tell every session's owner why it ends."""
        for name, emit in list(self._emit.items()):
            emit(Closed(name, error.status.value[0], str(error)))

    # Drafts.

    def attach_draft(self, peer: DraftPeer) -> None:
        self._drafts.append(peer)
        self.counters["drafts_attached"] += 1
        for session in self._sessions.values():
            if session.draft is None:
                self._assign_draft(session, wait=False)

    def detach_draft(self, peer: DraftPeer) -> None:
        """Its sessions go on plainly, or with another draft where there is one."""
        self._drafts.remove(peer)
        for name in peer.sessions:
            session = self._sessions[name]
            session.forget_draft()
            self._assign_draft(session, wait=False)

    def _assign_draft(self, session: TargetSession, wait: bool) -> None:
        """wait: hold plain decoding back until the draft has had its time, as for a session that starts."""
        if not self._drafts:
            return
        peer = min(self._drafts, key=lambda draft: len(draft.sessions))
        session.draft, session.drafted = peer, wait
        peer.sessions.add(session.id)
        self._begin(session)

    def _begin(self, session: TargetSession) -> None:
        assert session.draft is not None
        begin = Begin(
            session.at, list(session.tokens), session.sampling, session.max_length, session.announced_by
        )
        session.draft.send(begin)

    def receive(self, peer: DraftPeer, event: DraftEvent) -> None:
        """Apply a draft's event. Raises InvalidArgument for one that no honest draft sends."""
        name = event.session if isinstance(event, Decline | Resync) else event.at.session
        session = self._sessions.get(name)
        if session is None or session.draft is not peer:
            self.counters["unknown_session_frames"] += 1
            peer.send(End(name))
            return
        match event:
            case Announcement():
                self._receive_announcement(peer, session, event)
            case Proposal():
                self._receive_proposal(peer, session, event)
            case Ready():
                session.drafted = True
                session.stats.waiting_since = None
            case Decline():
                session.drafted = False
            case Resync():
                session.epoch += 1
                session.held.clear()
                self._begin(session)

    def _is_current(self, peer: DraftPeer, session: TargetSession, event: Announcement | Proposal) -> bool:
        """Sort out repeats, stale rounds (counted) and gaps (refused)."""
        at = event.at
        if session.last_judged is not None and (at.epoch, at.round) == session.last_judged[0]:
            self.counters["repeated_frames"] += 1
            if isinstance(event, Proposal):
                peer.send(session.last_judged[1])
            return False
        if at.epoch < session.epoch or at.round < session.round:
            self.counters["stale_frames"] += 1
            if isinstance(event, Proposal):
                session.stats.stale_rounds += 1
            return False
        if at.epoch > session.epoch or at.round > session.round + 1:
            self.counters["refused_frames"] += 1
            peer.send(Refusal(session.at, f"epoch {at.epoch}, round {at.round} leaves a gap"))
            return False
        if at.round == session.round and at.base != len(session.tokens):
            raise InvalidArgument(
                f"session {session.id}: base {at.base}, {len(session.tokens)} tokens are committed"
            )
        if not len(session.tokens) <= at.base <= len(session.tokens) + self.settings.gamma + 1:
            raise InvalidArgument(
                f"session {session.id}: base {at.base} cannot follow {len(session.tokens)} tokens"
            )
        return True

    def _receive_announcement(self, peer: DraftPeer, session: TargetSession, event: Announcement) -> None:
        reader = session.reader
        if reader is None or not session.announced_by:
            raise InvalidArgument(f"session {session.id} takes no announcements")
        if not self._is_current(peer, session, event):
            return
        key = (event.at.epoch, event.at.round)
        if key in session.announced:
            self.counters["repeated_frames"] += 1
            return
        try:
            blocks = self.plan.num_blocks(event.at.base)
            selection = decode_selection(
                event.selection, session.known_selections, reader.announced_rows, blocks
            )
        except UnknownReference as error:
            self.counters["refused_frames"] += 1
            peer.send(Refusal(session.at, str(error)))
            return
        session.announced[key] = Announced(selection, event.assumed_token)
        session.stats.announced_bytes += len(event.selection)
        self.counters["announced_bytes"] += len(event.selection)

    def _receive_proposal(self, peer: DraftPeer, session: TargetSession, event: Proposal) -> None:
        if not self._is_current(peer, session, event):
            return
        vocab = self.runner.vocab_size
        if len(event.tokens) > self.settings.gamma:
            raise InvalidArgument(f"a proposal of {len(event.tokens)} tokens, γ is {self.settings.gamma}")
        if any(t >= vocab for t in event.tokens) or any((s.ids >= vocab).any() for s in event.supports):
            raise InvalidArgument(f"a proposed token lies outside the vocabulary of {vocab}")
        if session.sampling.greedy and event.supports:
            raise InvalidArgument(f"session {session.id} is greedy; its proposals carry no distributions")
        key = (event.at.epoch, event.at.round)
        if key in session.proposals:
            self.counters["repeated_frames"] += 1
            return
        session.proposals[key] = event

    # Steps.

    def plan_step(self) -> Step | None:
        self._release_closed()
        self._admit()
        step = Step()
        reading: list[TargetSession] = []
        now = time.monotonic()
        for session in self._sessions.values():
            if session.unread > 0:
                reading.append(session)
            elif (proposal := session.ready_proposal()) is not None:
                step.rounds.append(self._plan_round(session, proposal, now))
            elif self._may_decode_plainly(session, now):
                step.rounds.append(self._plan_round(session, None, now))
        shares = share_prefill([session.unread for session in reading], self.settings.prefill_chunk)
        for session, share in zip(reading, shares, strict=True):
            if share:
                start = session.kv.length
                step.prefills.append(
                    (session, SequenceInput(session.kv, session.tokens[start : start + share]))
                )
        return step if step.rounds or step.prefills else None

    def _may_decode_plainly(self, session: TargetSession, now: float) -> bool:
        if session.draft is None or not session.drafted:
            return True
        if session.stats.waiting_since is None:
            session.stats.waiting_since = now
        if now - session.stats.waiting_since < self.settings.draft_timeout:
            return False
        self.counters["draft_timeouts"] += 1
        session.drafted = False
        return True

    def next_deadline(self) -> float | None:
        """Seconds until a session's patience with its draft ends; None if none is waiting."""
        waiting = [
            s.stats.waiting_since for s in self._sessions.values() if s.stats.waiting_since is not None
        ]
        if not waiting:
            return None
        return max(0.001, min(waiting) + self.settings.draft_timeout - time.monotonic())

    def _plan_round(self, session: TargetSession, proposal: Proposal | None, now: float) -> Round:
        tokens = [session.tokens[-1], *(proposal.tokens if proposal else [])]
        length, read = session.kv.length + len(tokens), None
        if session.reader is not None:
            announced = session.announced.get(session.key) if proposal is not None else None
            selections = [] if announced is None else [announced.selection]
            read = session.reader.read(selections, len(session.tokens), length)
        waited = 0.0 if session.stats.waiting_since is None else now - session.stats.waiting_since
        drafted = Drafted(
            tokens[1:], proposal.supports if proposal else [], session.sampling, len(session.tokens)
        )
        run = SequenceInput(session.kv, tokens, "all", read, drafted=drafted)
        return Round(session, proposal, run, length, waited)

    def execute(self, step: Step) -> StepResult:
        """Runs in the model thread; touches no session but through the inputs' KV."""
        started = time.perf_counter()
        outputs = self.runner.forward(
            [item.input for item in step.rounds] + [item for _, item in step.prefills]
        )
        of_rounds = outputs[: len(step.rounds)]
        outcomes = judge_others(
            [output.verdict for output in of_rounds],
            [output.logits for output in of_rounds],
            [item.input.drafted for item in step.rounds],  # type: ignore[misc]
        )
        kept = [replace(output, logits=None) for output in of_rounds]
        return StepResult(outcomes, kept, time.perf_counter() - started)

    def finish_step(self, step: Step, result: StepResult) -> None:
        for session, _ in step.prefills:
            if not self._is_open(session):
                continue
            session.stats.prefill_seconds += result.seconds
            self._index(session)
        for item, (accepted, following), output in zip(
            step.rounds, result.outcomes, result.outputs, strict=True
        ):
            if not self._is_open(item.session):
                continue
            if item.session.reader is not None:
                item.session.reader.finish(output.read_weights, output.blocks_read)
            if self.settings.synthetic_acceptance is not None:
                accepted, following = self._impose(item, following, self.settings.synthetic_acceptance)
            self._commit(item, accepted, following, output, result.seconds)

    def _commit(
        self, item: Round, accepted: int, following: int, output: SequenceOutput, seconds: float
    ) -> None:
        session, proposal = item.session, item.proposal
        before, key = session.at, session.key
        tokens = [*(proposal.tokens[:accepted] if proposal else []), following]
        tokens, finish = cut_at_end(tokens, session.max_length - before.base, session.stop_token_ids)
        # A draft that was lost or has asked for Begin during the step does not know this round.
        judged = proposal if session.proposals.get(key) is proposal else None
        all_kept = judged is not None and accepted == len(judged.tokens)
        agreed = all_kept and session.foreseen(session.round + 1) == following
        stats = session.stats
        tokens_read, tokens_total = self._tokens_read(item)
        commit = Commit(
            at=before,
            tokens=tokens,
            drafted=len(proposal.tokens) if proposal else 0,
            accepted=min(accepted, len(tokens)),
            finish_reason=finish,
            kv_tokens_read=tokens_read,
            kv_tokens_total=tokens_total,
            kv_tokens_fetched=output.tokens_fetched,
            announced_bytes=stats.announced_bytes,
            stale_rounds=stats.stale_rounds,
            prefill_seconds=stats.prefill_seconds,
            wait_seconds=item.wait_seconds,
            draft_seconds=proposal.draft_seconds if proposal else 0.0,
            verify_seconds=seconds,
        )
        session.commit(tokens, agreed, judged)
        self.runner.kv.truncate(session.kv, len(session.tokens) - 1)
        reader = session.reader
        if self._recording is not None and reader is not None and reader.is_sparse:
            assert reader.chosen is not None
            self._recording.add(before, commit.accepted, reader.chosen)
        self._index(session)
        self.counters["committed_tokens"] += len(tokens)
        self.counters["rounds" if proposal else "plain_rounds"] += 1
        self._emit[session.id](commit)
        if finish is not FinishReason.NONE:
            self._close(session)
        elif session.draft is not None:
            at = before._replace(epoch=session.epoch, round=session.round)
            verdict = Verdict(at, commit.accepted, tokens, plain=judged is None)
            session.last_judged = (key, verdict)
            session.draft.send(verdict)

    def _impose(self, item: Round, following: int, rate: float) -> tuple[int, int]:
        """A verdict by chance, of which each position has its own: the token after a full round is drafted too."""
        session, drafted = item.session, item.proposal.tokens if item.proposal else []
        foreseen = session.foreseen(session.round + 1)
        draws = uniforms(session.sampling.seed, len(session.tokens), len(drafted) + 1, USE_ACCEPT)
        kept = int((draws >= rate).argmax()) if (draws >= rate).any() else len(draws)
        if kept > len(drafted) and foreseen is not None:
            following = foreseen
        return min(kept, len(drafted)), following

    def _tokens_read(self, item: Round) -> tuple[int, int]:
        """(layer, KV head, token) triples that a round read, and that there were."""
        if item.session.reader is not None:
            read, total = item.session.reader.tokens_read
            return round(read), total
        kv = self.runner.kv
        blocks = self.plan.num_blocks(item.length)  # whole blocks, as a sparse read counts them
        everything = kv.num_layers * kv.kv_heads * blocks * self.plan.block_size
        return everything, everything

    def _index(self, session: TargetSession) -> None:
        """Offer KV to later sessions: all that was computed densely, which for a sparse session is its prompt."""
        dense = session.reads_all
        # A deterministic runner's KV is the same for all who read a prompt, not for those who drafted it.
        if session.round > 0 and (self.runner.deterministic or (session.unread == 0 and not dense)):
            return
        self.runner.kv.index_prefix(session.kv, session.tokens)


def _check_writable(kv: KVCache, settings: VerifierSettings) -> None:
    """Raise ValueError unless all that a step writes has room on the GPU at once, whatever else has."""
    a_session = pages_for(settings.gamma + 1) + 2
    pages = settings.max_sessions * a_session + pages_for(settings.prefill_chunk)
    kv.check_writable(
        pages, f"{settings.max_sessions} sessions, and {settings.prefill_chunk} prompt tokens a step"
    )


def cut_at_end(
    tokens: list[int], room: int, stop_token_ids: frozenset[int]
) -> tuple[list[int], FinishReason]:
    """The tokens up to a stop token (included) or as many as there is room for, and why they end, if they do."""
    for i, token in enumerate(tokens[:room]):
        if token in stop_token_ids:
            return tokens[: i + 1], FinishReason.STOP
    if len(tokens) >= room:
        return tokens[:room], FinishReason.LENGTH
    return tokens, FinishReason.NONE
