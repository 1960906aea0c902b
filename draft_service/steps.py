"""Plans one model step of a drafter: a round for each session that has one to draft, and parts of prompts to read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draft_service.outcomes import likely_outcomes
from draft_service.sessions import DraftSession
from specahead.config import DraftSettings
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.distributions import USE_DRAFT, USE_TARGET, uniforms
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.requests import (
    AllowedTokens,
    AnnouncementRequest,
    Branch,
    RoundOutput,
    RoundRequest,
    StepBefore,
    branches_of,
)
from specahead.engine.steps.rules import RoundRules
from specahead.engine.steps.step_loop import share_prefill
from specahead.sparsity.plan import Plan
from specahead.sparsity.rounds import announcement_request
from specahead.wire.messages import Ready
from specahead.wire.selection_codec import NamedSelection

# Chooses which of the sessions that have a prompt to read, in order of their arrival, read in the next step.
Choose = Callable[[list[DraftSession]], list[DraftSession]]
LEAST_PART = 2048  # tokens of prompts that a step with rounds reads, where there is as much to read


@dataclass(frozen=True)
class PlannedRound:
    """A session's round in a step."""

    session: DraftSession
    request: RoundRequest
    overlaps: bool
    """Whether it is the round after the one under judgement."""
    base: int
    """Committed tokens where it begins: of the shortest outcome; after a step that still runs, the fewest possible."""
    number: int
    """The round's number in its session."""
    reference: NamedSelection | None
    """The selection that its announcement is coded against."""


@dataclass(frozen=True)
class DraftStep:
    """Rounds to draft, and parts of prompts to read."""

    rounds: list[PlannedRound]
    reading: list[DraftSession]
    """Sessions whose prompt is read."""
    inputs: list[SequenceInput]
    """A part of the prompt of each of them."""

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
    """The output of each planned round, and the step's duration."""

    rounds: list[RoundOutput]
    seconds: float


@dataclass(frozen=True)
class Work:
    """The sessions for which a step could do something."""

    due: list[DraftSession]
    """Sessions with a round to draft."""
    reading: list[DraftSession]
    """Sessions with a prompt to read."""


def find_work(sessions: list[DraftSession], foresight: float, overlaps: bool, choose: Choose) -> Work | None:
    """Return what there is to do; None if there is nothing.

    foresight: share of verdicts that a session must have foreseen for its next round to be drafted before the verdict.
    overlaps: whether rounds are drafted before the verdict at all.
    """
    reading = choose([each for each in sessions if each.is_reading])
    read = [each for each in sessions if not each.is_reading and each.has_states]
    due = [
        session
        for session in read
        if not session.waits_for_grammar
        and (session.present is None or (overlaps and session.may_overlap and session.foresees(foresight)))
    ]
    return Work(due, reading) if due or reading else None


def tell_ready(sessions: Sequence[DraftSession]) -> None:
    """Tell the targets of sessions that are drafted for from now on, but were not before."""
    for session in sessions:
        if session.ready_due:
            session.ready_due = False
            session.peer.send(Ready(session.at))


def plan_draft_step(work: Work, plan: Plan, settings: DraftSettings, kv: KVCache, number: int) -> DraftStep:
    """Return the next step. number: of the step among those that read prompts."""
    tell_ready(work.due)
    parts = _share_reading(work, settings, number)
    for session in (*work.due, *parts):
        if session.moved is not None and session.present is None:  # a verdict cut it short: not worth moving
            session.cut_kv(kv, session.moved.target)
    gamma = max((session.gamma for session in work.due), default=0)  # rounds of one step have one shape
    branches = branches_of(len(work.due), settings.chosen.branches)
    rounds = [
        _plan_round(session, plan, gamma) if session.present is None else _plan_overlap(session, plan, gamma, branches)
        for session in work.due
    ]
    inputs = [SequenceInput(session.kv, session.pending[:share]) for session, share in parts.items()]
    return DraftStep(rounds, list(parts), inputs)


def _share_reading(work: Work, settings: DraftSettings, number: int) -> dict[DraftSession, int]:
    """Return how many tokens of its prompt each session reads in a step; sessions that read none are left out."""
    chunk = settings.prefill_chunk
    if work.due and chunk > LEAST_PART:  # rounds wait for what is read in the same step
        chunk = max(LEAST_PART, chunk // 2)
    starts = [session.kv.length for session in work.reading]
    unread = [len(session.pending) - 1 for session in work.reading]
    shares = share_prefill(starts, unread, chunk, number)
    return {session: share for session, share in zip(work.reading, shares, strict=True) if share}


def _plan_round(session: DraftSession, plan: Plan, gamma: int) -> PlannedRound:
    """Return the round after a session's committed tokens. gamma: tokens to draft; the session may propose fewer."""
    base, uncommitted = session.committed, session.tokens[session.committed :]
    rules = session.rules_after([])
    return _planned(session, plan, gamma, base, session.pending, False, rules=rules, starts=[uncommitted])


def _plan_overlap(session: DraftSession, plan: Plan, gamma: int, most: int) -> PlannedRound:
    """Return the round after the one under judgement, for up to `most` likely outcomes of the verdict."""
    assert session.present is not None
    branches = []
    for accepted, token in likely_outcomes(session.present.drafted, session.statistics.acceptance, most):
        length = session.committed + accepted
        branches.append(Branch(length, token, _draws(session, length + 1, gamma + 1)))
    base = 1 + min(branch.length for branch in branches)
    starts = [[*session.tokens[session.committed : branch.length], branch.token] for branch in branches]
    alone = len(branches) == 1  # it follows all tokens
    tokens, apart = ([branches[0].token], ()) if alone else ([], tuple(branches))
    rules = session.rules_after(branches)
    return _planned(session, plan, gamma, base, tokens, True, rules=rules, starts=starts, branches=apart)


def _planned(
    session: DraftSession,
    plan: Plan,
    gamma: int,
    base: int,
    tokens: list[int],
    overlaps: bool,
    *,
    starts: Sequence[list[int]] = (),
    rules: RoundRules | None = None,
    branches: tuple[Branch, ...] = (),
    follows: StepBefore | None = None,
) -> PlannedRound:
    """Return a round that builds on `base` tokens; after a running step, on as many at most.

    starts: for each branch, the tokens between the committed ones and the drafted ones.
    """
    sampling = session.terms.sampling
    request = RoundRequest(
        kv=session.kv,
        tokens=tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        uniforms=_draws(session, base, gamma + 1),
        announce=_announcement_request(session, plan, base),
        branches=branches,
        moved=session.moved,
        gamma=gamma,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        rules=rules,
        allowed=_allowed_tokens(session, starts),
        follows=follows,
    )
    begins = base if follows is None else session.committed + 1
    return PlannedRound(session, request, overlaps, begins, session.at.round + overlaps, session.newest_known)


def plan_chained_rounds(
    sessions: Sequence[DraftSession], due: Sequence[DraftSession], places: Mapping[str, int], plan: Plan
) -> DraftStep | None:
    """Return the rounds to launch after a step of the target in this process that judges the present ones.

    places: where in that step each session's present round is judged, by name. due: other sessions, whose next rounds
    follow no step that runs. Returns None if the host has to see one of the verdicts first. A session that ends with
    the step in any case has no round.
    """
    judged = [session for session in sessions if session.id in places]
    if not all(map(_needs_no_host, judged)) or any(map(_has_rules, due)):
        return None
    continuing = [session for session in judged if session.committed + 1 < session.terms.max_length]
    gamma = max((session.gamma for session in (*continuing, *due)), default=0)
    rounds = [_plan_chained_round(session, places[session.id], plan, gamma) for session in continuing]
    if not rounds:
        return None
    return DraftStep([*rounds, *(_plan_round(session, plan, gamma) for session in due)], [], [])


def _needs_no_host(session: DraftSession) -> bool:
    """Return whether the next round follows from the verdict on the present one alone, on the device."""
    if session.present is None or session.overlap is not None or session.moved is not None:
        return False
    begins = session.kv.length >= session.present.drafted.proposed  # a head runs all tokens again that may be accepted
    return begins and not _has_rules(session)


def _has_rules(session: DraftSession) -> bool:
    """Return whether the host changes the logits that a session's tokens are drawn from."""
    return session.terms.rules is not None or session.terms.grammar is not None


def _plan_chained_round(session: DraftSession, place: int, plan: Plan, gamma: int) -> PlannedRound:
    """Return the round after the tokens that a running step accepts. place: the session's row in that step."""
    assert session.present is not None
    first, proposed = session.committed + 1, session.present.drafted.proposed
    bases = range(first, first + proposed + 1)  # where the round begins, by the number of accepted tokens
    before = StepBefore(
        row=place,
        previous=[session.tokens[base - 2] for base in bases],
        uniforms=_draws(session, first, proposed + gamma + 1),
        announce=[_announcement_request(session, plan, base) for base in bases],
    )
    tokens = [before.previous[-1], 0]
    if session.present.drafted.reads_states:
        tokens = [*session.tokens[session.committed - proposed : session.committed], 0]
    return _planned(session, plan, gamma, bases[-1], tokens, True, follows=before)


def _draws(session: DraftSession, position: int, count: int) -> np.ndarray:
    """Return the numbers in [0, 1) that draw the tokens from a position on, float64 [count]; 0 for greedy sessions."""
    use = USE_TARGET if session.terms.draws_own else USE_DRAFT
    sampling = session.terms.sampling
    if sampling.greedy:
        return np.zeros(count)
    return uniforms(sampling.seed, session.skipped + position, count, use)


def _announcement_request(session: DraftSession, plan: Plan, base: int) -> AnnouncementRequest | None:
    """Return what a round that builds on `base` tokens announces; None: nothing."""
    if not session.terms.announces or session.dense:
        return None
    last = session.newest_known
    return announcement_request(plan, base, None if last is None else last[1])


def _allowed_tokens(session: DraftSession, starts: Sequence[list[int]]) -> AllowedTokens | None:
    """Return a function for the tokens that the session's grammar allows in a round; None if it has no grammar."""
    grammar = session.terms.grammar
    if grammar is None:
        return None
    grammar.follow(session.tokens, session.committed)
    return lambda branch, drafted: grammar.mask_behind([*starts[branch], *drafted])
