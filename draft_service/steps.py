"""One model step of a drafter: whole rounds for the sessions of a micro-batch, and a share of the prompts to read."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from draft_service.outcomes import likely_outcomes
from draft_service.sessions import BranchAhead, CodedSelection, DraftSession, RoundAhead
from specahead.config import DraftSettings
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.distributions import USE_DRAFT, USE_TARGET, uniforms
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.rounds.requests import (
    AllowedTokens,
    AnnouncementRequest,
    Branch,
    RoundOutput,
    RoundRequest,
    StepBefore,
    branches_of,
)
from specahead.engine.steps.step_loop import share_prefill
from specahead.sparsity.plan import Plan
from specahead.sparsity.rounds import announced_selection, announcement_request
from specahead.sparsity.selection import BlockSelection
from specahead.wire.messages import At, Proposals, Ready
from specahead.wire.selection_codec import NamedSelection, encode_selection, with_header

_NO_IDS, _NO_PROBS = np.empty(0, np.uint32), np.empty(0, np.float32)


@dataclass(frozen=True)
class PlannedRound:
    """A session's round in a step.

    ahead: whether it is the one behind the round under judgement. base: where it begins, if by branches the first one;
    behind a step of the target that still runs, where it begins if that accepts nothing. reference: what its
    announcement is coded against.
    """

    session: DraftSession
    request: RoundRequest
    ahead: bool
    base: int
    reference: NamedSelection | None


@dataclass(frozen=True)
class DraftStep:
    """`rounds` to draft, and `inputs`: a part of the prompt of each of the sessions `reading`."""

    rounds: list[PlannedRound]
    reading: list[DraftSession]
    inputs: list[SequenceInput]

    @property
    def work(self) -> list[tuple[SequenceKV, int]]:
        """How many tokens the step adds to each sequence."""
        rounds = [(item.request.kv, item.request.tokens_written(item.request.gamma)) for item in self.rounds]
        return rounds + [(item.kv, len(item.tokens)) for item in self.inputs]

    @property
    def sessions(self) -> list[DraftSession]:
        return [item.session for item in self.rounds] + self.reading


@dataclass(frozen=True)
class DraftStepResult:
    """`rounds`: one for each that was planned. `seconds`: what the step took."""

    rounds: list[RoundOutput]
    seconds: float


class Work(NamedTuple):
    """The sessions for which a step could do something.

    near: those whose prompt has been read. due: those of them with a round to draft. reading: those with a prompt to
    read.
    """

    near: list[DraftSession]
    due: list[DraftSession]
    reading: list[DraftSession]


def find_work(sessions: list[DraftSession], foresight: float, settings: DraftSettings) -> Work | None:
    """Return what there is to do for these sessions; None if it is nothing.

    foresight: how often a session's verdicts must have met what was drafted ahead.
    """
    # A few tokens behind is catching up, not reading a prompt.
    behind = 2 * (settings.most_drafted + 1)
    near = [session for session in sessions if len(session.tokens) - session.kv.length <= behind]
    reading = [session for session in sessions if len(session.tokens) - session.kv.length > behind]
    near = [session for session in near if not session.waits_for_grammar]
    due = [session for session in near if session.drafted is None or _goes_ahead(session, foresight, settings)]
    return Work(near, due, reading) if due or reading else None


def put_off_until(work: Work, seconds: float) -> float:
    """Return the time until which a step of so many seconds should not begin unless more comes up; 0: it may begin.

    A step that no target waits for, since all its rounds are drafted ahead, is put off where verdicts are expected
    before it would end: the rounds that these make urgent would have to wait, and the sessions of a target would fall
    into two groups that go by turns, each with a step of its own on both sides.
    """
    peers = {session.peer for session in work.near}
    urgent = any(session.drafted is None for session in work.due)
    if work.reading or urgent or len(work.due) == len(work.near) or len(peers) > 1:
        return 0.0
    (peer,) = peers
    return peer.verdicts.put_off_until(time.perf_counter(), seconds)


def plan_draft_step(work: Work, plan: Plan, settings: DraftSettings, kv: KVCache) -> DraftStep:
    """Return the next step, with a round of every session that has one to draft. Sessions that are drafted are told to
    be ready.
    """
    due, reading = work.due, work.reading
    for session in due:
        if session.ready_due:
            session.ready_due = False
            session.peer.send(Ready(session.at))
    gamma = max((session.gamma for session in due), default=0)  # rounds of one step have one shape
    unread = [len(session.pending) - 1 for session in reading]
    shares = share_prefill([session.kv.length for session in reading], unread, settings.prefill_chunk)
    parts = [(session, share) for session, share in zip(reading, shares, strict=True) if share]
    for session in (*due, *(session for session, _ in parts)):
        if session.moved is not None and session.drafted is None:  # what a verdict cut short is not worth moving
            session.cut_kv(kv, session.moved.target)
    branches = branches_of(len(due), settings.chosen.branches)
    return DraftStep(
        [_plan_round(session, plan, gamma, branches) for session in due],
        [session for session, _ in parts],
        [SequenceInput(session.kv, session.pending[:share]) for session, share in parts],
    )


def plan_behind_step(
    sessions: Sequence[DraftSession], places: Mapping[str, int], plan: Plan, settings: DraftSettings
) -> DraftStep | None:
    """Return the rounds to launch behind a step of the target, in this process, that judges the present ones; None if
    one of the sessions needs the host before.

    places: of the sessions in that step, by name. A session that ends with the step in any case has no round.
    """
    if settings.speculation.overlap or not all(
        session.id in places and _needs_no_host(session) for session in sessions
    ):
        return None
    going_on = [session for session in sessions if session.committed + 1 < session.max_length]
    gamma = max((session.gamma for session in going_on), default=0)
    rounds = [_plan_behind(session, places[session.id], plan, gamma) for session in going_on]
    return DraftStep(rounds, [], []) if rounds else None


def _needs_no_host(session: DraftSession) -> bool:
    """Return whether the next round follows from the verdict on the present one alone, on the device."""
    stands = session.drafted is not None and session.ahead is None and session.moved is None
    return stands and session.rules is None and session.grammar is None


def _plan_behind(session: DraftSession, place: int, plan: Plan, gamma: int) -> PlannedRound:
    """Return the round that begins behind what a step accepts, in which the session has this place.

    gamma: tokens that are drafted, of which the session may propose fewer.
    """
    assert session.drafted is not None
    most = session.committed + session.drafted.proposed + 1  # tokens, if all are accepted
    bases = range(most, session.committed, -1)
    before = StepBefore(
        place,
        [session.tokens[base - 2] for base in bases],
        [_draws(session, base, gamma + 1) for base in bases],
        [_announcement_request(session, plan, base) for base in bases],
    )
    sampling = session.sampling
    request = RoundRequest(
        kv=session.kv,
        tokens=[before.before[0], 0],
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        uniforms=before.uniforms[0],
        announce=before.announce[0],
        gamma=gamma,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        behind=before,
    )
    return PlannedRound(session, request, True, session.committed + 1, session.newest_known)


def _goes_ahead(session: DraftSession, foresight: float, settings: DraftSettings) -> bool:
    return settings.speculation.overlap and session.may_go_ahead and session.foresees(foresight)


def _draws(session: DraftSession, position: int, count: int) -> np.ndarray:
    """Return what the tokens from a position on are drawn with, [count] float64."""
    use = USE_TARGET if session.target_draws_own else USE_DRAFT
    return _no_draws(count) if session.sampling.greedy else uniforms(session.sampling.seed, position, count, use)


@lru_cache
def _no_draws(count: int) -> np.ndarray:
    """Return what greedy sessions draw with, which never looks at it."""
    return np.zeros(count)


def _announcement_request(session: DraftSession, plan: Plan, base: int) -> AnnouncementRequest | None:
    """Return what a round that builds on `base` tokens announces; None: nothing."""
    if session.method is None or session.dense:
        return None
    last = session.newest_known
    return announcement_request(session.method, plan, base, None if last is None else last[1])


def _plan_round(session: DraftSession, plan: Plan, gamma: int, most_branches: int) -> PlannedRound:
    """Return the request of a session's round, or of the one behind it if that is drafted already.

    gamma: tokens that are drafted, of which the session may propose fewer. most_branches: outcomes of the verdict that
    are drafted for.
    """
    sampling, drafted = session.sampling, session.drafted
    tokens, base, branches = session.pending, session.committed, list[Branch]()
    rules = session.rules_behind(branches)
    if drafted is not None:
        for accepted, token in likely_outcomes(drafted, session.acceptance, most_branches):
            length = session.committed + accepted
            branches.append(Branch(length, token, _draws(session, length + 1, gamma + 1)))
        tokens, base = [], 1 + min(branch.length for branch in branches)
        rules = session.rules_behind(branches)
        if len(branches) == 1:  # it goes on behind all tokens
            tokens, branches = [branches[0].token], []
    starts = [[*session.tokens[session.committed : branch.length], branch.token] for branch in branches]
    if not branches:
        starts = [[*session.tokens[session.committed :], *(tokens if drafted is not None else [])]]
    request = RoundRequest(
        kv=session.kv,
        tokens=tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        uniforms=_draws(session, base, gamma + 1),
        announce=_announcement_request(session, plan, base),
        branches=tuple(branches),
        moved=session.moved,
        gamma=gamma,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        rules=rules,
        allowed=_allowed_tokens(session, starts),
    )
    return PlannedRound(session, request, drafted is not None, base, session.newest_known)


def _allowed_tokens(session: DraftSession, starts: list[list[int]]) -> AllowedTokens | None:
    """Return what says which tokens the session's grammar allows in a round; None if it has no grammar.

    starts: of each branch, the tokens behind the committed ones that it goes on behind.
    """
    grammar = session.grammar
    if grammar is None:
        return None
    grammar.follow(session.tokens, session.committed)

    return lambda branch, drafted: grammar.mask_behind([*starts[branch], *drafted])


def take_round(planned: PlannedRound, output: RoundOutput, plan: Plan, seconds: float) -> None:
    """Take the round that was drafted for a session in so many seconds, which is sent later."""
    session = planned.session
    session.moved = None
    starts = _starts(planned, output) if planned.ahead else []
    base = 1 + min(length for length, _, _ in starts) if starts else planned.base
    selection = None if output.bitmap is None else announced_selection(output.bitmap, plan, base)
    coded = None
    if output.coded is not None:
        coded = CodedSelection(output.coded, None if planned.reference is None else planned.reference[0])
    if planned.ahead:
        branches = [
            BranchAhead(
                length + 1, token, drafted.first(session.tokens_to_propose(length + 1)), source, output.alternative
            )
            for (length, token, source), drafted in zip(starts, output.branches, strict=True)
        ]
        session.ahead = RoundAhead(base, selection, coded, branches, seconds)
        return
    (drafted,) = output.branches
    count = session.tokens_to_propose(base)
    session.drafted = drafted.first(count)
    session.tokens += drafted.tokens[:count]
    session.kv.length = base + session.drafted.run
    session.seconds = seconds
    session.selection, session.selection_base, session.coded = selection, base, coded


def _starts(planned: PlannedRound, output: RoundOutput) -> list[tuple[int, int, int]]:
    """Return of each outcome that a round ahead is drafted for the tokens before its last one, that one, and where its
    KV lies."""
    request = planned.request
    if output.began_behind is not None:
        accepted, token = output.began_behind
        length = planned.session.committed + accepted
        return [(length, token, length)]
    starts = [(branch.length, branch.token) for branch in request.branches] or [(request.kv.length, request.tokens[0])]
    passes = request.gamma + 1
    return [(*start, request.kv.length + index * passes) for index, start in enumerate(starts)]


def send_ahead(session: DraftSession, ahead: RoundAhead, counters: Counter[str]) -> None:
    """Send a proposal for each branch of the round ahead, and what the round announces, if it does."""
    announced = _announcement(ahead.selection, ahead.coded, session.newest_known, counters)
    _propose(session, session.round + 1, ahead.base, ahead.branches, ahead.seconds, announced, counters)


def send_round(session: DraftSession, counters: Counter[str]) -> None:
    """Send the proposal of the session's round, and what it announces, if it does.

    Also a second time, for a round drafted ahead which still holds although the epoch has moved.
    """
    assert session.drafted is not None
    # Of this round the target knows nothing yet.
    announced = _announcement(session.selection, session.coded, session.reference, counters)
    last, start = session.tokens[session.committed - 1], session.committed - 1
    branch = BranchAhead(session.committed, last, session.drafted, start)
    _propose(session, session.round, session.selection_base, [branch], session.seconds, announced, counters)


def _announcement(
    selection: BlockSelection | None,
    coded: CodedSelection | None,
    reference: NamedSelection | None,
    counters: Counter[str],
) -> bytes:
    """Return a selection as bytes, coded against the newest one that the target holds; nothing for None."""
    if selection is None:
        return b""
    name = None if reference is None else reference[0]
    if coded is not None and coded.reference == name:
        difference, shape = coded.difference, (selection.num_heads, selection.num_blocks)
        data = with_header(difference.body, difference.checksum, *shape, name)
    else:
        data = encode_selection(selection, reference)
    counters["announcements"] += 1
    counters["announced_bytes"] += len(data)
    return data


def _propose(
    session: DraftSession,
    round_: int,
    base: int,
    branches: Sequence[BranchAhead],
    seconds: float,
    announced: bytes,
    counters: Counter[str],
) -> None:
    """Propose what was drafted behind each of the branches. base: where the shortest begins that was drafted."""
    drafted = [(branch.drafted, branch.drafted.proposed) for branch in branches]
    counts = [count for _, count in drafted]
    supports: tuple[list[int], np.ndarray, np.ndarray] = [], _NO_IDS, _NO_PROBS
    if not session.sampling.greedy:
        ids = np.concatenate([each.ids[:count] for each, count in drafted if each.ids is not None])
        probs = np.concatenate([each.probs[:count] for each, count in drafted if each.probs is not None])
        held = probs > 0
        supports = held.sum(-1).tolist(), ids[held].astype(np.uint32), probs[held]
    counters["proposals"] += len(branches)
    at = At(session.id, session.epoch, round_, base)
    offsets, assumed = [branch.base - base for branch in branches], [branch.token for branch in branches]
    tokens = [token for each, count in drafted for token in each.tokens[:count]]
    session.peer.send(Proposals(at, offsets, assumed, counts, tokens, *supports, seconds, announced))
