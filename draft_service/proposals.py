"""What comes of a drafted round: it is kept with its session, and proposed to the session's target."""

from collections import Counter

import numpy as np

from draft_service.sessions import DraftedOutcome, DraftedRound, DraftSession
from draft_service.steps import PlannedRound
from specahead.engine.steps.requests import DraftedTokens, RoundOutput
from specahead.sparsity.plan import Plan
from specahead.sparsity.rounds import announced_selection
from specahead.wire.messages import At, Proposals
from specahead.wire.selection_codec import NamedSelection, encode_selection, with_header

_NO_IDS, _NO_PROBS = np.empty(0, np.uint32), np.empty(0, np.float32)


def take_round(planned: PlannedRound, output: RoundOutput, plan: Plan, seconds: float) -> DraftedRound:
    """Keep the round that a step of `seconds` seconds drafted for a session; return it."""
    session = planned.session
    session.moved = None
    outcomes = _outcomes(planned, output)
    base = min(outcome.base for outcome in outcomes)
    selection = None if output.bitmap is None else announced_selection(output.bitmap, plan, base)
    reference = None if planned.reference is None else planned.reference[0]
    round_ = DraftedRound(base, outcomes, seconds, selection, output.coded, reference)
    if planned.overlaps:
        session.overlap = round_
        return round_
    drafted = round_.drafted
    session.present = round_
    session.tokens += drafted.tokens[: drafted.proposed]
    session.kv.length = base + drafted.run
    return round_


def _outcomes(planned: PlannedRound, output: RoundOutput) -> list[DraftedOutcome]:
    """Return the outcomes that a round was drafted for, each with the tokens that follow it."""
    session = planned.session
    outcomes = []
    for (last, token, source), drafted in zip(_ends(planned, output), output.branches, strict=True):
        proposed = drafted.first(session.tokens_to_propose(last + 1))
        outcomes.append(DraftedOutcome(last + 1, token, proposed, source, output.alternative))
    return outcomes


def _ends(planned: PlannedRound, output: RoundOutput) -> list[tuple[int, int, int]]:
    """Return the last token of each outcome that a round was drafted for: its position, itself, and where its KV lies.

    A round that does not overlap has one outcome, the committed tokens, and so has one that follows a running step: the
    tokens that the step has accepted. Otherwise each branch is one, and its KV lies after that of the branches before.
    """
    session, request = planned.session, planned.request
    if not planned.overlaps:
        last = planned.base - 1
        return [(last, session.tokens[last], last)]
    if output.began is not None:
        accepted, token = output.began
        last = session.committed + accepted
        return [(last, token, last)]
    length, passes = request.kv.length, request.gamma + 1
    if not request.branches:
        return [(length, request.tokens[0], length)]
    return [(branch.length, branch.token, length + i * passes) for i, branch in enumerate(request.branches)]


def send_round(session: DraftSession, round_: DraftedRound, counters: Counter[str]) -> None:
    """Propose the session's present round or its overlap: the tokens after each outcome, and the announcement.

    Also a second time, for an overlap that its verdict met although the target began a new epoch.
    """
    overlaps = round_ is session.overlap
    at = At(session.id, session.at.epoch, session.at.round + overlaps, session.skipped + round_.base)
    # The target knows nothing yet of the present round itself.
    announced = _announcement(round_, session.newest_known if overlaps else session.reference, counters)
    drafted = [outcome.drafted for outcome in round_.outcomes]
    support_counts, support_ids, support_probs = _supports(drafted)
    counters["proposals"] += len(drafted)
    session.peer.send(
        Proposals(
            at=at,
            offsets=[outcome.base - round_.base for outcome in round_.outcomes],
            assumed_tokens=[outcome.token for outcome in round_.outcomes],
            counts=[each.proposed for each in drafted],
            tokens=[token for each in drafted for token in each.tokens[: each.proposed]],
            support_counts=support_counts,
            support_ids=support_ids,
            support_probs=support_probs,
            draft_seconds=round_.seconds,
            selection=announced,
        )
    )


def _supports(drafted: list[DraftedTokens]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Return the distributions of the proposed tokens: entries of each, all ids (uint32), all probabilities (float32).

    All are empty where the session is greedy.
    """
    ids = [each.ids[: each.proposed] for each in drafted if each.ids is not None]
    if not ids:
        return [], _NO_IDS, _NO_PROBS
    probs = np.concatenate([each.probs[: each.proposed] for each in drafted if each.probs is not None])
    held = probs > 0
    return held.sum(-1).tolist(), np.concatenate(ids)[held].astype(np.uint32), probs[held]


def _announcement(round_: DraftedRound, reference: NamedSelection | None, counters: Counter[str]) -> bytes:
    """Return a round's selection as bytes, coded against the newest one that the target holds; empty without one."""
    selection, coded = round_.selection, round_.coded
    if selection is None:
        return b""
    name = None if reference is None else reference[0]
    if coded is not None and round_.coded_from == name:
        data = with_header(coded.body, coded.checksum, selection.num_heads, selection.num_blocks, name)
    else:
        data = encode_selection(selection, reference)
    counters["announcements"] += 1
    counters["announced_bytes"] += len(data)
    return data
