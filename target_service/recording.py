"""Where a verifier tells what each sparse round read; benchmarks have one that writes it to a file."""

from typing import Protocol

from torch import Tensor

from wire.messages import At


class ReadRecording(Protocol):
    """Takes rounds as they are committed."""

    def add(self, at: At, accepted: int, chosen: Tensor) -> None:
        """A round as it began, the drafted tokens that it kept, and what it read: bool [layers, kv_heads, blocks]."""

    def save(self) -> None:
        """Called once, when the service stops."""
