"""A step that judges what a draft in the target has drafted, launched while its rounds still run.

Tokens go from the draft's rounds to the step on the device, so that the device does not wait for the host in between.
The host hears what was drafted while the step runs, and puts it into the step before it commits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from target_service.planning import VerifyStep, plan_round
from target_service.session import TargetSession
from wire.messages import At


class DraftedRound(NamedTuple):
    """A session's round that is being drafted. at: what it builds on. gamma: tokens that will be proposed. place: of it
    among the rounds that run.
    """

    at: At
    gamma: int
    place: int


def plan_behind_rounds(
    sessions: Sequence[TargetSession],
    rounds: Mapping[str, DraftedRound],
    waits: Callable[[TargetSession], bool],
    now: float,
) -> VerifyStep | None:
    """Return the step that judges these rounds, by session; None where one of the sessions would take part otherwise.

    waits: says of a session that it would not take part in a step now.
    """
    step = VerifyStep(left_running=True)
    for session in sessions:
        drafted = rounds.get(session.id)
        if drafted is not None and _is_for(session, drafted.at):
            if _needs_the_host(session):
                return None
            item = plan_round(session, None, [0] * drafted.gamma, now)
            item.input.behind = drafted.place
            step.rounds.append(item)
        elif not waits(session):
            return None
    return step if step.rounds else None


def take_proposals(step: VerifyStep) -> None:
    """Put what was proposed into the rounds of a step behind rounds, which runs: what it judges.

    A round of which nothing was proposed, because its draft has failed, counts for nothing.
    """
    for item in step.rounds:
        proposal, judged = item.session.ready_proposal(), item.input.drafted
        assert judged is not None
        if proposal is None or len(proposal.tokens) != len(item.proposed):
            item.is_void = True
            continue
        item.proposal = proposal
        item.input.tokens[1:] = judged.tokens[:] = proposal.tokens
        judged.supports[:] = proposal.supports


def _is_for(session: TargetSession, at: At) -> bool:
    """Return whether a round is the session's present one, and is to be drafted."""
    expected = session.drafted and session.next_round.gamma > 0 and at == session.at
    return expected and session.unread <= 0 and not session.awaits_its_end


def _needs_the_host(session: TargetSession) -> bool:
    """Return whether the host has a part in what is read or judged."""
    looked_at = session.logprobs is not None or bool(session.rules) or session.grammar is not None
    return looked_at or session.reader is not None or session.screening is not None
