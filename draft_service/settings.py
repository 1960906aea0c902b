"""How a drafter drafts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DrafterSettings:
    """How a drafter drafts.

    gamma: tokens of a round. support: entries of a sampled token's distribution that travel. ahead: draft the next
    round while one is judged, for sessions whose verdicts are mostly foreseen; others would take the time of those that
    wait. micro_batches: parts that the sessions with rounds to draft are taken in, so that a target verifies one part
    while the next is drafted. read_share: share of the KV blocks that the later passes of a round read; the first pass
    reads everything. prefill_chunk: prompt tokens of a step, over all sessions. warm_sessions: batches up to this size
    are made ready before the first. max_context: tokens that the draft model reads.

    Raises ValueError for less than one micro-batch.
    """

    gamma: int = 4
    support: int = 64
    ahead: bool = True
    micro_batches: int = 2
    read_share: float = 1.0
    prefill_chunk: int = 512
    warm_sessions: int = 16
    max_context: int = 32768

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(
                f"{self.micro_batches} micro-batches (--draft-waves), expected 1 or more: 1 drafts all sessions at once"
            )
