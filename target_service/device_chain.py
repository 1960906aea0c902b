"""A step that judges what a draft in the target has drafted, launched while its rounds still run.

Tokens go from the draft's rounds to the step on the device, so that the device does not wait for the host in between.
The host hears what was drafted while the step runs, and puts it into the step before it commits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from specahead.sparsity.plan import Plan
from specahead.sparsity.selection import BlockSelection
from specahead.wire.messages import At
from target_service.confirming import how_to_confirm, screen_lightly
from target_service.planned_round import plan_round
from target_service.session import TargetSession
from target_service.verify_step import VerifyStep


class DraftedRound(NamedTuple):
    """A session's round that is being drafted. at: what it builds on. gamma: tokens that will be proposed. place: of it
    among the rounds that run. announces: whether it will say what is to be read.
    """

    at: At
    gamma: int
    place: int
    announces: bool


def plan_behind_rounds(
    sessions: Sequence[TargetSession],
    rounds: Mapping[str, DraftedRound],
    plan: Plan,
    waits: Callable[[TargetSession], bool],
    beside: Callable[[int], int],
    light: bool,
    now: float,
) -> VerifyStep | None:
    """Return the step that judges these rounds, by session; None where one of the sessions would take part otherwise.

    waits: says of a session that it would not take part in a step now. beside: how many alternatives run beside so many
    drafted tokens (Runner.alternatives_beside). light: whether the runner has weights for what is screened.
    """
    step = VerifyStep(left_running=True)
    ours = {
        session.id: rounds[session.id]
        for session in sessions
        if session.id in rounds and _is_for(session, rounds[session.id].at)
    }
    confirms = how_to_confirm((session, ours[session.id].gamma) for session in sessions if session.id in ours)
    for session in sessions:
        drafted = ours.get(session.id)
        if drafted is not None:
            if _needs_the_host(session, drafted):
                return None
            item = plan_round(session, None, [0] * drafted.gamma, now, confirms)
            item.input.behind = drafted.place
            if not item.held:
                item.input.alternatives = beside(drafted.gamma)
            if session.reading.reader is not None and session.reading.announced_by and drafted.announces:
                base = len(session.tokens)
                nothing = BlockSelection.of_nothing(session.reading.reader.announced_rows, plan.num_blocks(base))
                item.input.read = session.reading.reader.read(nothing, base, base - 1 + item.input.rows)
            step.rounds.append(item)
        elif not waits(session):
            return None
    if light:
        screen_lightly(step.rounds)
    alike = len({item.input.read is None for item in step.rounds}) == 1  # they run in one pass
    return step if alike else None


def take_proposals(step: VerifyStep) -> None:
    """Put what was proposed into the rounds of a step behind rounds, which runs: what it judges.

    A round of which nothing was proposed, because its draft has failed, counts for nothing.
    """
    for item in step.rounds:
        proposal, judged = item.session.ready_proposal(), item.input.drafted
        assert judged is not None
        count = len(item.proposed)  # those that there was room for, where held tokens are confirmed
        if proposal is None or len(proposal.tokens) < count:
            item.is_void = True
            continue
        item.proposal = proposal
        item.input.tokens[1 + item.held :] = judged.tokens[item.held :] = proposal.tokens[:count]
        judged.supports[:] = proposal.supports[:count]


def _is_for(session: TargetSession, at: At) -> bool:
    """Return whether a round is the session's present one, and is to be drafted."""
    expected = session.draft.awaited and session.next_round.gamma > 0 and at == session.at
    return expected and session.unread <= 0 and not session.awaits_its_end


def _needs_the_host(session: TargetSession, drafted: DraftedRound) -> bool:
    """Return whether the host has a part in what is read or judged."""
    looked_at = session.asked.logprobs is not None or bool(session.asked.rules)
    screened = session.screening is not None and session.screening.is_used
    drawn_from = screened and not session.asked.sampling.greedy  # which the dense pass has to know
    return looked_at or drawn_from or _is_read_by_lists(session, drafted)


def _is_read_by_lists(session: TargetSession, drafted: DraftedRound) -> bool:
    """Return whether the host makes lists of what the round reads, or looks at them."""
    reader = session.reading.reader
    if reader is None:
        return False
    if reader.method.reads_by_memory or (drafted.announces and session.next_round.sparse):
        return not reader.method.shares_budget or reader.report_blocks or session.reading.is_watched
    return drafted.announces or not reader.reads_all_alone
