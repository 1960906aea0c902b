"""Which KV pages a coming round will read, made ready as soon as they are announced.

All KV lies in the model's own memory so far, so making ready is marking; the transfer from a slower tier will
start at the same call.
"""

import numpy as np

from engine.paged_kv import PAGE_SIZE
from sparsity.plan import Plan
from sparsity.policy import blocks_to_pages, expand_to_target
from sparsity.selection import BlockSelection

RoundKey = tuple[str, int, int]  # session, epoch, round


class Residency:
    """Marks: (session, epoch, round) -> bool [layers, kv_heads, pages]."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.marked_pages = 0
        self._marks: dict[RoundKey, np.ndarray] = {}

    def prepare(self, key: RoundKey, selection: BlockSelection, base: int, length: int) -> None:
        """Mark what an announcement selects and what is read anyway, up to `length` tokens; parts add up."""
        wanted = expand_to_target(selection, self.plan, base, length)
        pages = blocks_to_pages(wanted, self.plan.block_size, PAGE_SIZE, length)
        known = self._marks.get(key)
        if known is not None and known.shape == pages.shape:
            pages = pages | known
        self._marks[key] = pages
        self.marked_pages += int(pages.sum())

    def take(self, key: RoundKey, length: int) -> np.ndarray:
        """The marked pages of a round whose verification ends at `length` tokens. Raises KeyError if none are."""
        return self._marks.pop(key)[..., : -(-length // PAGE_SIZE)]

    def forget(self, session: str, before: tuple[int, int] | None = None) -> None:
        """Drop a session's marks: all, or those of rounds that sort before (epoch, round)."""
        for key in [k for k in self._marks if k[0] == session and (before is None or k[1:] < before)]:
            del self._marks[key]
