"""Plain decoding without a pause between steps: the next one is launched before the host has seen the one that runs.

A session that decodes plainly needs nothing but its last token, which lies on the device already. So the host commits
and sends the tokens of one step, and plans and launches the next but one, while the device runs the next. Sessions
that wait for their draft meanwhile are in none of these steps. A session that ends at a stop token has run one row in
vain; what it wrote lies behind its text, in pages of its own.
"""

from collections.abc import Callable

from engine.inputs import SequenceInput
from engine.judging import Drafted
from engine.passes.outputs import MOST_UNDER_WAY
from target_service.planning import VerifyRound, VerifyStep
from target_service.session import TargetSession


def can_be_left(step: VerifyStep) -> bool:
    """Return whether the next step may be launched while this one runs: all of its sessions decode plainly."""
    plainly = all(
        len(item.input.tokens) == 1 and item.input.read is None and _needs_no_host(item.session) for item in step.rounds
    )
    return bool(step.rounds) and not step.prefills and plainly and len(step.rounds) <= MOST_UNDER_WAY


def plan_behind(
    running: VerifyStep, sessions: list[TargetSession], gamma: int, waits: Callable[[TargetSession], bool]
) -> VerifyStep:
    """Return the step to execute while `running` is under way, which it waits for.

    sessions: all that run, none of which is to draft for itself. gamma: tokens that a text proposes, at most. waits:
    says of a session that it would not take part in a step now. The step has rounds if each session either goes on
    plainly behind the one that runs, or is known to end in it, or waits; else it does nothing but wait. Where a text
    repeats itself the next token is waited for, which tells whether it goes on to.
    """
    places = {id(item.session): place for place, item in enumerate(running.rounds)}
    going_on = [session for session in sessions if id(session) in places]
    ahead = VerifyStep(before=running)
    plainly = all(_needs_no_host(session) and not session.look_up(gamma) for session in going_on)
    plainly &= all(len(item.input.tokens) == 1 for item in running.rounds)  # others leave no tokens for the next step
    if plainly and all(waits(session) for session in sessions if id(session) not in places):
        going_on = [session for session in going_on if len(session.tokens) + 1 < session.max_length]
        ahead.rounds = [_plan_round(session, places[id(session)]) for session in going_on]
        ahead.left_running = bool(ahead.rounds)
    return ahead


def _needs_no_host(session: TargetSession) -> bool:
    """Return whether nothing but its last token decides over a session's next one."""
    looked_at = session.logprobs is not None or bool(session.rules)
    chooses = session.reader is not None and not session.reader.reads_all_alone
    drafted = session.draft is not None and session.drafted and session.next_round.gamma > 0
    return not drafted and not looked_at and not chooses and session.screening is None


def _plan_round(session: TargetSession, place: int) -> VerifyRound:
    """Return a session's part of a step behind the one in which it had this place."""
    drafted = Drafted([], [], session.sampling, len(session.tokens) + 1)
    item = SequenceInput(session.kv, [0], logits="all", drafted=drafted, follows=place)
    return VerifyRound(session, None, item, 0.0)
