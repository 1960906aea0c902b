"""What a draft says of a session's round: its announcement and its proposal."""

from collections import Counter
from dataclasses import replace

from draft_service.sessions import DraftSession
from wire.messages import Announcement
from wire.selection_codec import encode_selection


def send_round(session: DraftSession, counters: Counter[str]) -> None:
    """Send what the session's round announces, if it does, coded against what the target holds, and its proposal.

    Also a second time, for a round drafted ahead which still holds although the epoch has moved. Before it is drafted
    there is nothing to send.
    """
    if session.selection is not None:
        data = encode_selection(session.selection, session.known_selections, compact=not session.peer.near)
        counters["announcements"] += 1
        counters["announced_bytes"] += len(data)
        session.peer.send(Announcement(session.at, session.tokens[session.base - 1], data))
    if session.proposal is not None:
        counters["proposals"] += 1
        session.proposal = replace(session.proposal, at=session.at)
        session.peer.send(session.proposal)
