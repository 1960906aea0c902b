"""Which GPU page each page has."""

from collections import deque

import numpy as np


class GpuPages:
    """GPU pages 0 … count - 1, each given to one page or free.

    `of` is the GPU page of each page, int32 [pages], -1 where it has none. Once the offload is active, the cache lines
    of free GPU pages belong to the eviction clock.
    """

    def __init__(self, count: int, pages: int) -> None:
        self.count = count
        self.of = np.full(pages, -1, np.int32)
        self._free = deque(range(count))

    @property
    def free(self) -> int:
        """How many GPU pages can be given out."""
        return len(self._free)

    def hold(self, pages: np.ndarray) -> bool:
        """Whether all of these pages have a GPU page; they are those of a sequence, in order."""
        # The first page is the first to leave.
        return not len(pages) or bool(self.of[pages[0]] >= 0 and (self.of[pages] >= 0).all())

    def give(self, pages: list[int]) -> None:
        """Give each of these pages a free GPU page."""
        for page in pages:
            self.of[page] = self._free.popleft()

    def take_back(self, pages: list[int]) -> None:
        """Free the GPU pages of these pages; some may have none."""
        given = self.of[pages]
        self._free.extend(given[given >= 0].tolist())
        self.of[pages] = -1

    def check_integrity(self) -> None:
        """Raise AssertionError unless every GPU page is free or has one owner."""
        given = self.of[self.of >= 0].tolist()
        assert sorted(given + list(self._free)) == list(range(self.count))
