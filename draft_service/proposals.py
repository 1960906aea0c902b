"""What a draft says of a session's round: its announcement and its proposal."""

from collections import Counter

from draft_service.sessions import DraftSession
from wire.messages import Announcement, Proposal
from wire.selection_codec import encode_selection


def send_announcement(session: DraftSession, counters: Counter[str]) -> None:
    """Send what the session's round announces, coded against what the target holds."""
    assert session.selection is not None
    data = encode_selection(session.selection, session.known_selections, compact=not session.peer.near)
    counters["announcements"] += 1
    counters["announced_bytes"] += len(data)
    session.peer.send(Announcement(session.at, session.tokens[session.base - 1], data))


def send_proposal(session: DraftSession, counters: Counter[str]) -> None:
    """Send the tokens that the session's round proposes."""
    counters["proposals"] += 1
    session.proposal = Proposal(
        at=session.at,
        announces=session.method is not None,
        assumed_token=session.tokens[session.base - 1],
        tokens=session.tokens[session.base : session.base + session.tokens_to_propose],
        supports=session.supports,
        draft_seconds=session.draft_seconds,
    )
    session.peer.send(session.proposal)


def send_again(session: DraftSession, counters: Counter[str]) -> None:
    """Repeat what was said of a round drafted ahead, which still holds although the epoch has moved."""
    if session.selection is not None:
        send_announcement(session, counters)
    if session.proposal is not None:
        send_proposal(session, counters)
