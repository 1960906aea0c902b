"""What a commit tells of the round before it."""

from dataclasses import dataclass


@dataclass
class RoundStats:
    """Statistics of the round in the making; reset with every commit."""

    cached_tokens: int = 0
    """Tokens of the prompt that were found in the KV."""
    queue_seconds: float = 0.0
    """Time spent waiting for room."""
    preemptions: int = 0
    """How often the session gave way."""
    stale_rounds: int = 0
    """Proposals that came for rounds that were over."""
    announced_bytes: int = 0
    """Bytes of announcements."""
    prefill_seconds: float = 0.0
    """Time of the steps that read its prompt."""
    waiting_since: float | None = None
    """When the target began to wait for the round's proposal, by time.monotonic; None if it does not."""
