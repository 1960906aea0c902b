"""Steps without a pause between them: the next one is launched before the host has seen the one that runs.

A session that decodes plainly, or drafts for itself, needs nothing but its last token and how many tokens were
accepted, which lie on the device already. So the host commits and sends the tokens of one step, and plans and launches
the next but one, while the device runs the next. Sessions that wait for their draft meanwhile are in none of these
steps. A session that ends at a stop token has run its part of one step in vain; what it wrote lies behind its text, in
pages of its own.
"""

from collections.abc import Callable

from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.passes.behind_steps import MOST_UNDER_WAY
from target_service.self_drafting import SelfDrafting
from target_service.session import TargetSession
from target_service.verify_step import VerifyRound, VerifyStep


def can_be_left(step: VerifyStep) -> bool:
    """Return whether the next step may be launched while this one runs: all of its sessions decode plainly, or all
    draft as many tokens for themselves.
    """
    drafted = {_drafted_by_itself(item) for item in step.rounds}
    alike = len(drafted) == 1 and None not in drafted and all(_needs_no_host(item.session) for item in step.rounds)
    return alike and not step.prefills and len(step.rounds) <= MOST_UNDER_WAY


def _drafted_by_itself(item: VerifyRound) -> int | None:
    """Return how many tokens a round drafts for itself, 0 if it decodes plainly; None if it is made otherwise."""
    read, drafted = item.input.read, len(item.input.tokens) - 1
    if read is not None:
        return drafted if read.drafts and drafted else None
    return None if drafted else 0


def plan_behind(
    running: VerifyStep,
    sessions: list[TargetSession],
    gamma: int,
    waits: Callable[[TargetSession], bool],
    drafting: SelfDrafting | None = None,
    drafted: int = 0,
    cost: float = 0.0,
) -> VerifyStep:
    """Return the step to execute while `running` is under way, which it waits for.

    sessions: all that run. gamma: tokens that a text proposes, at most. waits: says of a session that it would not take
    part in a step now. drafting, drafted, cost: how sessions draft for themselves, and what they would now
    (planning.drafted_for_themselves).

    The step has rounds if each session either goes on as in the one that runs, plainly or drafting as many tokens, or
    is known to end in it, or waits; else it does nothing but wait. Where a text repeats itself the next token is waited
    for, which tells whether it goes on to.
    """
    places = {id(item.session): place for place, item in enumerate(running.rounds)}
    going_on = [session for session in sessions if id(session) in places]
    ahead = VerifyStep(before=running)
    alike = all(_drafted_by_itself(item) == drafted for item in running.rounds)
    if drafted:
        alike &= all(_needs_no_host(session) and not session.is_paused for session in going_on)
    else:
        alike &= all(_needs_no_host(session) and not session.look_up(gamma) for session in going_on)
    if alike and all(waits(session) for session in sessions if id(session) not in places):
        going_on = [session for session in going_on if len(session.tokens) + 1 < session.asked.max_length]
        for session in going_on:
            ahead.rounds.append(_plan_round(session, places[id(session)], drafting, drafted, cost))
        ahead.left_running = bool(ahead.rounds)
    return ahead


def _needs_no_host(session: TargetSession) -> bool:
    """Return whether nothing but its last token decides over a session's next one."""
    looked_at = session.asked.logprobs is not None or bool(session.asked.rules)
    # One that is screened reads everything in a plain round, by which what it holds is confirmed.
    chooses = (
        session.reading.reader is not None and session.screening is None and not session.reading.reader.reads_all_alone
    )
    holds = session.screening is not None and bool(session.screening.rounds)
    drafted = session.draft.peer is not None and session.draft.awaited and session.next_round.gamma > 0
    return not drafted and not looked_at and not chooses and not holds


def _plan_round(
    session: TargetSession, place: int, drafting: SelfDrafting | None, count: int, cost: float
) -> VerifyRound:
    """Return a session's part of a step behind the one in which it had this place, and drafted as many tokens.

    What it reads to draft is chosen as if none of those were accepted.
    """
    base = len(session.tokens) + 1
    drafted, read = Drafted([0] * count, [], session.asked.sampling, base), None
    if count:
        assert drafting is not None and session.reading.memory is not None
        read = drafting.read(session.reading.memory, base, count)
    item = SequenceInput(session.kv, [0] * (count + 1), "all", read, drafted, follows=place)
    return VerifyRound(session, None, item, 0.0, drafting_cost=cost if count else 0.0)
