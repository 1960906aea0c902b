"""A session's part of a step, as it is planned."""

from specahead.engine.sampling.distributions import one_hot
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import Audit, SequenceInput, SparseRead
from specahead.wire.messages import Proposal
from target_service.confirming import is_confirmed
from target_service.screening import Confirms
from target_service.session import TargetSession
from target_service.verify_step import VerifyRound


def plan_round(
    session: TargetSession, proposal: Proposal | None, proposed: list[int], now: float, confirms: Confirms = Confirms.NO
) -> VerifyRound:
    """Return a session's part of a step: its last committed token, which has no KV yet, and the proposed tokens.

    A screened session that reads everything in this round runs its held tokens once more, from its last confirmed
    token on, and the proposed tokens that there is room for. proposal: as in `VerifyRound`. confirms: whether the
    sessions of the step confirm.
    """
    screening, base = session.screening, len(session.tokens)
    read, screens = _plan_read(session, proposal, len(proposed), confirms)
    supports = proposal.supports if proposal is not None else []
    held: list[int] = []
    if screening is not None and not screens:
        held, base = session.tokens[screening.confirmed :], screening.confirmed
        proposed = proposed[: screening.widest - 1 - len(held)]
        supports = supports[: len(proposed)]
        if screening.supports:
            supports = [*screening.supports, *(supports or map(one_hot, proposed))]
        elif held:  # they were drawn from nothing that is known
            supports = []
    drafted = Drafted(
        tokens=[*held, *proposed],
        supports=supports,
        sampling=session.asked.sampling,
        base=base,
        rules=session.asked.rules,
        committed=session.tokens[:base] if held and session.asked.rules else session.tokens,
        logprobs=None if screens else session.asked.logprobs,
        screens=screens,
        foresees=screens and session.deterministic,
    )
    tokens = [session.tokens[base - 1], *drafted.tokens]
    since = session.stats.waiting_since
    return VerifyRound(
        session=session,
        proposal=proposal,
        input=SequenceInput(session.kv, tokens, logits="all", read=read, drafted=drafted, held=len(held)),
        wait_seconds=0.0 if since is None else now - since,
    )


def audit_round(item: VerifyRound) -> None:
    """Have a round of a session that takes announcements be audited, if it reads sparsely."""
    read, reader = item.input.read, item.session.reading.reader
    if read is not None and reader is not None and not read.reads_all:
        reader.read_all(len(item.session.tokens) + len(item.proposed))
        item.input.audit, item.input.read = Audit(read), None


def plan_end_of_prompt(session: TargetSession, proposal: Proposal | None, proposed: list[int]) -> VerifyRound:
    """Return a session's part of a step that reads all that is left of its prompt: its round follows in the same pass,
    so that its first token comes with it. proposal: the draft's, if it is here already. proposed: the tokens of that,
    or of the session's own text.
    """
    base, reader = len(session.tokens), session.reading.reader
    if reader is not None:
        reader.read_all(base + len(proposed))
    drafted = Drafted(
        tokens=list(proposed),
        supports=proposal.supports if proposal is not None else [],
        sampling=session.asked.sampling,
        base=base,
        rules=session.asked.rules,
        committed=session.tokens,
        logprobs=session.asked.logprobs,
    )
    tokens = [*session.tokens[session.kv.length :], *proposed]
    item = SequenceInput(session.kv, tokens, logits="all", drafted=drafted)
    return VerifyRound(session, proposal, item, wait_seconds=0.0)


def _plan_read(
    session: TargetSession, proposal: Proposal | None, proposed: int, confirms: Confirms
) -> tuple[SparseRead | None, bool]:
    """Return what a round reads, None for everything, and whether it screens.

    The first round of a screened session reads everything, so that its first tokens are sent at once, and so do rounds
    that confirm. Beside sessions that screen such a round lists everything, to run in their pass, and weighs that at no
    further cost.
    """
    reader, screening = session.reading.reader, session.screening
    if reader is None:
        return None, False
    base, announced = len(session.tokens), session.draft.announced.get(session.key)
    selection = announced if proposal is not None and session.pace.next_round.sparse else None
    if screening is None:
        return reader.read(selection, base, base + proposed, weighs=confirms is not Confirms.YES), False
    may_screen = confirms is Confirms.NO and not is_confirmed(session, screening, proposed)
    weighs = confirms is not Confirms.YES
    if session.deterministic and confirms is Confirms.NO:
        weighs = screening.is_to_weigh  # it runs in a pass apart
    read = reader.read(selection, base, base + proposed, everything=not may_screen, weighs=weighs)
    return read, may_screen and read is not None and not read.reads_all
