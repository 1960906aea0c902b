"""What a session reads of its KV."""

from dataclasses import dataclass, replace

from specahead.engine.steps.inputs import ReadMemory
from specahead.sparsity.reader import Reader
from target_service.policy.holding import Holding


@dataclass
class SessionAudit:
    """How a session's divergence is held (target_service.auditing)."""

    holding: Holding
    """The session's own factor of what it reads."""
    applied: float = 1.0
    """The factor by which it reads now: its own and that of all sessions."""
    doubted: int = 0
    """The next sparse rounds that are audited in any case."""
    is_exact: bool = False
    """Whether it reads everything to its end, since its divergence could not be held otherwise."""


@dataclass
class Reading:
    """How a session reads its KV, and what it has read."""

    reader: Reader | None = None
    """How its rounds read; None: everything."""
    memory: ReadMemory | None = None
    """What its KV weighed, if it drafts for itself."""
    weighed: int = 0
    """Tokens that were committed before the last round that weighed its KV; 0: none has."""
    audit: SessionAudit | None = None
    """What audits have found of it; None: it is not audited."""

    @property
    def is_dense(self) -> bool:
        """Whether all of its rounds read everything."""
        return self.reader is None

    @property
    def is_announced(self) -> bool:
        """Whether the session takes announcements."""
        return self.reader is not None and self.reader.announced_rows > 0

    def begin_anew(self) -> None:
        """Remember nothing of KV that has been released."""
        if self.reader is not None:
            self.reader = self.reader.anew()
        if self.memory is not None:
            self.memory, self.weighed = replace(self.memory, index=None), 0
