"""What audits have found of one session (target_service.auditing)."""

from dataclasses import dataclass

from target_service.policy.holding import Holding


@dataclass
class SessionAudit:
    """How a session's divergence is held."""

    holding: Holding
    """The session's own factor of what it reads."""
    applied: float = 1.0
    """The factor by which it reads now: its own and that of all sessions."""
    doubted: int = 0
    """The next sparse rounds that are audited in any case."""
    is_exact: bool = False
    """Whether it reads everything to its end, since its divergence could not be held otherwise."""
