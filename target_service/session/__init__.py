"""One session as the target sees it."""

from target_service.session.asked import Asked
from target_service.session.draft import DraftPeer, RoundKey
from target_service.session.reading import Reading, SessionAudit
from target_service.session.session import TargetSession

__all__ = ["Asked", "DraftPeer", "Reading", "RoundKey", "SessionAudit", "TargetSession"]
