"""Which KV pages a coming round will read, made ready as soon as they are announced.

All KV lies in the model's own memory so far, so making ready is marking; the transfer from a slower tier will
start at the same call. What a round reads is decided when it runs; pages that were not marked by then are late.
"""

import numpy as np
from torch import Tensor

from engine.paged_kv import PAGE_SIZE
from sparsity.reader import pages_of

RoundKey = tuple[str, int, int]  # session, epoch, round


class Residency:
    """Marks: (session, epoch, round) -> bool [layers, kv_heads, pages]."""

    def __init__(self, block_size: int) -> None:
        self.marked_pages = 0
        self._block_size = block_size
        self._marks: dict[RoundKey, np.ndarray] = {}

    def prepare(self, key: RoundKey, blocks: Tensor, length: int) -> None:
        """Mark blocks, bool [layers, kv_heads, blocks] over `length` tokens; later announcements add to earlier."""
        pages = pages_of(blocks, self._block_size, PAGE_SIZE, length)
        known = self._marks.get(key)
        if known is not None:
            pages[..., : known.shape[-1]] |= known[..., : pages.shape[-1]]
        self._marks[key] = pages
        self.marked_pages += int(pages.sum())

    def settle(self, key: RoundKey, chosen: Tensor, length: int) -> int:
        """How many pages of a round's choice were not marked for it; 0 if nothing was announced. Forgets the marks."""
        marks = self._marks.pop(key, None)
        if marks is None:
            return 0
        pages = pages_of(chosen, self._block_size, PAGE_SIZE, length)
        width = min(pages.shape[-1], marks.shape[-1])
        return int(pages.sum() - (pages[..., :width] & marks[..., :width]).sum())

    def forget(self, session: str, before: tuple[int, int] | None = None) -> None:
        """Drop a session's marks: all, or those of rounds that sort before (epoch, round)."""
        for key in [k for k in self._marks if k[0] == session and (before is None or k[1:] < before)]:
            del self._marks[key]
