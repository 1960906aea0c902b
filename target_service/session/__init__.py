"""One session as the target sees it."""

from target_service.session.asked import Asked
from target_service.session.audit import SessionAudit
from target_service.session.draft import DraftPeer, DraftState, RoundKey
from target_service.session.reading import Reading
from target_service.session.session import TargetSession
from target_service.session.stats import RoundStats

__all__ = ["Asked", "DraftPeer", "DraftState", "Reading", "RoundKey", "RoundStats", "SessionAudit", "TargetSession"]
