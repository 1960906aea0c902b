"""Steps that are launched before the host has seen what they build on: the host follows one step later.

Such a step follows another one, or judges what a draft in this process drafts. What it needs lies on the device already
(specahead.engine.steps.device_chain): the last token and how many tokens were accepted, or the tokens that rounds have
drafted. So the host commits and sends the tokens of one step, and plans and launches the next but one, while the device
runs the next. Sessions whose last tokens the host has seen may run beside others that are judged as they are drafted.
Those that wait for their draft meanwhile are in none of these steps. A session that ends at a stop
token has run its part of one step in vain; what it wrote lies after its text, in pages of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.device_chain import MOST_CHAINED
from specahead.engine.steps.inputs import SequenceInput
from specahead.sparsity.plan import Plan
from specahead.sparsity.selection import BlockSelection
from specahead.wire.messages import At
from target_service.confirming import how_to_confirm, screen_lightly
from target_service.planned_round import plan_round
from target_service.screening import Confirms
from target_service.self_drafting import SelfDrafting
from target_service.session import TargetSession
from target_service.verify_step import VerifyRound, VerifyStep

Waits = Callable[[TargetSession], bool]  # whether a session would not take part in a step now


# A step that follows a step.


def may_be_followed(step: VerifyStep) -> bool:
    """Return whether the next step may be launched while this one runs: all of its sessions decode plainly, or all
    draft as many tokens for themselves.
    """
    drafted = {_drafted_by_itself(item) for item in step.rounds}
    alike = len(drafted) == 1 and None not in drafted and all(_needs_no_host(item.session) for item in step.rounds)
    return alike and not step.prefills and len(step.rounds) <= MOST_CHAINED


def _drafted_by_itself(item: VerifyRound) -> int | None:
    """Return how many tokens a round drafts for itself, 0 if it decodes plainly; None if it is made otherwise."""
    if item.input.ends_prompt:
        return None
    read, drafted = item.input.read, len(item.input.tokens) - 1
    if read is not None:
        return drafted if read.drafts and drafted else None
    return None if drafted else 0


def plan_following_step(
    running: VerifyStep,
    sessions: list[TargetSession],
    gamma: int,
    waits: Waits,
    drafting: SelfDrafting | None,
    drafted: int,
    cost: float,
) -> VerifyStep:
    """Return the step to execute while `running` is under way, which it waits for.

    sessions: all that run. gamma: tokens that a text proposes, at most. drafting, drafted, cost: how sessions draft for
    themselves, and what they would now (planning.drafted_for_themselves).

    The step has rounds if each session either continues as in the running one, plainly or drafting as many tokens, or
    is known to end in it, or waits; else it does nothing but wait. It also waits where a text repeats itself: only the
    next token shows whether the repetition continues.
    """
    rows = {id(item.session): row for row, item in enumerate(running.rounds)}
    continuing = [session for session in sessions if id(session) in rows]
    following = VerifyStep(before=running)
    alike = all(_drafted_by_itself(item) == drafted for item in running.rounds)
    if drafted:
        alike &= all(_needs_no_host(session) and not session.is_paused for session in continuing)
    else:
        alike &= all(_needs_no_host(session) and not session.look_up(gamma) for session in continuing)
    if not alike or not all(waits(session) for session in sessions if id(session) not in rows):
        return following
    for session in continuing:
        base = len(session.tokens) + 1
        if base >= session.asked.max_length:
            continue
        read = None
        if drafted:  # what it reads is chosen as if nothing that runs was accepted
            assert drafting is not None and session.reading.memory is not None
            read = drafting.read(session.reading.memory, base, drafted)
        judged = Drafted([0] * drafted, [], session.asked.sampling, base)
        item = SequenceInput(session.kv, [0] * (drafted + 1), "all", read, judged, follows=rows[id(session)])
        following.rounds.append(VerifyRound(session, None, item, 0.0, drafting_cost=cost if drafted else 0.0))
    following.asynchronous = bool(following.rounds)
    return following


def _needs_no_host(session: TargetSession) -> bool:
    """Return whether nothing but its last token decides over a session's next one."""
    looked_at = session.asked.logprobs is not None or bool(session.asked.rules)
    # One that is screened reads everything in a plain round, by which what it holds is confirmed.
    chooses = (
        session.reading.reader is not None and session.screening is None and not session.reading.reader.reads_all_alone
    )
    holds = session.screening is not None and bool(session.screening.rounds)
    drafted = session.draft.peer is not None and session.draft.awaited and session.pace.next_round.gamma > 0
    return not drafted and not looked_at and not chooses and not holds


# A step that judges rounds.


@dataclass(frozen=True)
class DraftedRound:
    """A session's round that is being drafted."""

    at: At
    """What it builds on."""
    gamma: int
    """Tokens that will be proposed."""
    row: int
    """The row of its drafts in the device chain."""
    announces: bool
    """Whether it announces blocks to read."""


def plan_judging_step(
    sessions: Sequence[TargetSession],
    rounds: Mapping[str, DraftedRound],
    plan: Plan,
    waits: Waits,
    beside: Callable[[int], int],
    light: bool,
    most: int,
    now: float,
) -> VerifyStep | None:
    """Return the step that judges these rounds, by session; None where the host has to see them first, or prompts are
    to be read.

    Sessions that have no such round and do not wait run in the same pass, by what their own texts propose or plainly.

    beside: returns how many alternatives run beside a number of drafted tokens. light: whether the runner has weights
    for rounds that screen. most: tokens that a text proposes, at most.
    """
    step = VerifyStep(asynchronous=True)
    ours = {
        session.id: rounds[session.id]
        for session in sessions
        if session.id in rounds and _is_for(session, rounds[session.id].at)
    }
    if not ours or any(_needs_the_host(each, ours[each.id]) for each in sessions if each.id in ours):
        return None
    beside_them = [session for session in sessions if session.id not in ours and not waits(session)]
    if not all(map(_may_run_beside, beside_them)):
        return None
    known = {session.id: session.look_up(most) for session in beside_them}
    longest = max(each.gamma for each in ours.values())
    if any(len(tokens) > longest for tokens in known.values()):
        beside = _no_alternatives  # wider steps have no room for them
    counts = dict.fromkeys(known, 0) | {name: each.gamma for name, each in ours.items()}  # guesses count as plain
    taking_part = [session for session in sessions if session.id in counts]
    confirms = how_to_confirm((session, counts[session.id]) for session in taking_part)
    for session in taking_part:
        if session.id in known:
            step.rounds.append(plan_round(session, None, known[session.id], now, confirms))
        else:
            step.rounds.append(_plan_drafted(session, ours[session.id], plan, beside, now, confirms))
    if light:
        screen_lightly(step.rounds)
    alike = len({item.input.read is None for item in step.rounds}) == 1  # they run in one pass
    return step if alike else None


def _plan_drafted(
    session: TargetSession,
    drafted: DraftedRound,
    plan: Plan,
    beside: Callable[[int], int],
    now: float,
    confirms: Confirms,
) -> VerifyRound:
    """Return the part in a step of a session whose round is being drafted."""
    item = plan_round(session, None, [0] * drafted.gamma, now, confirms)
    item.input.draft_row = drafted.row
    if not item.held:
        item.input.alternatives = beside(drafted.gamma)
    reader = session.reading.reader
    if reader is not None and session.reading.is_announced and drafted.announces:
        base = len(session.tokens)
        nothing = BlockSelection.of_nothing(reader.announced_rows, plan.num_blocks(base))
        item.input.read = reader.read(nothing, base, base - 1 + item.input.rows)
    return item


def _no_alternatives(gamma: int) -> int:
    return 0


def _may_run_beside(session: TargetSession) -> bool:
    """Return whether a session without a drafted round may run beside such rounds: its prompt is read, nothing is
    proposed for it that the draft sent earlier, and the host takes no part in its round.
    """
    return session.unread <= 0 and session.ready_proposal() is None and _needs_no_host(session)


def take_proposals(step: VerifyStep) -> None:
    """Put the proposed tokens into the rounds of a running step that judges them as they are drafted.

    A round is void if its draft has failed and proposed nothing.
    """
    for item in step.rounds:
        if item.input.draft_row is None:
            continue
        proposal, judged = item.session.ready_proposal(), item.input.drafted
        assert judged is not None
        count = len(item.proposed)  # fewer than drafted where held tokens take their room
        if proposal is None or len(proposal.tokens) < count:
            item.is_void = True
            continue
        item.proposal = proposal
        item.input.tokens[1 + item.held :] = judged.tokens[item.held :] = proposal.tokens[:count]
        judged.supports[:] = proposal.supports[:count]


def _is_for(session: TargetSession, at: At) -> bool:
    """Return whether a round is the session's present one, and is to be drafted."""
    expected = session.draft.awaited and session.pace.next_round.gamma > 0 and at == session.at
    return expected and session.unread <= 0 and not session.awaits_its_end


def _needs_the_host(session: TargetSession, drafted: DraftedRound) -> bool:
    """Return whether the host takes part in reading or judging."""
    looked_at = session.asked.logprobs is not None or bool(session.asked.rules)
    screened = session.screening is not None and session.screening.is_used
    drawn_from = screened and not session.asked.sampling.greedy  # which the dense pass has to know
    return looked_at or drawn_from or _reads_need_the_host(session, drafted)


def _reads_need_the_host(session: TargetSession, drafted: DraftedRound) -> bool:
    """Return whether the host has to know what the round reads."""
    reader = session.reading.reader
    if reader is None:
        return False
    if session.screening is None and reader.is_to_weigh and not session.reads_wholly:
        return True  # it runs in a pass apart
    if not reader.is_announced or (drafted.announces and session.pace.next_round.sparse):
        return False
    return drafted.announces or not reader.reads_all_alone
