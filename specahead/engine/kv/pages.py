"""Pages of KV, the block table of a sequence, and the allocation of KV tensors."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

PAGE_SIZE = 16  # tokens
KEPT_SHARE = 0.01  # of a target's pages, which stay free when a session begins to run beside others


class OutOfPages(Exception):
    """The pool cannot supply the pages asked for."""


def pages_for(length: int) -> int:
    """Return how many pages `length` tokens take."""
    return -(-length // PAGE_SIZE)


def slots_of(pages: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return where positions lie in pages, int64: page * PAGE_SIZE + offset."""
    slots: np.ndarray = pages[positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
    return slots


@dataclass
class LastChoice:
    """Names the blocks that a model which chooses blocks by itself chose in a sequence's last round (ReadMemories)."""

    index: int | None = None


@dataclass
class SequenceKV:
    """A sequence's block table. `length` tokens have KV; `pages` may reach beyond it."""

    length: int = 0
    pages: list[int] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)
    """The serials of its first pages in the prefix index, as far as that has them."""
    stored: int = 0
    """How many of its first pages are in the backing store or on their way there (engine.kv.tiered)."""
    settled: float = math.inf
    """How many of its first tokens keep their KV; that of later tokens may be written again."""
    dense: bool = False
    """Whether it is always read densely, so that its pages are the last to leave the GPU."""
    drafts: bool = False
    """Whether passes that read it sparsely draft for it."""
    target: "SequenceKV | None" = None
    """For a head's sequence, the one of the target, at whose places the head reads states."""
    last_choice: LastChoice = field(default_factory=LastChoice, repr=False, compare=False)
    groups: list[int] = field(default_factory=list)
    """The slots of the means of its first groups of tokens."""
    _table: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32), repr=False, compare=False)
    _in_table: int = field(default=0, repr=False, compare=False)
    """How many of its first pages `_table` has."""

    @property
    def indexed(self) -> int:
        """How many leading pages the prefix index has."""
        return len(self.serials)

    @property
    def serial(self) -> int:
        """The serial of the last page that the prefix index has; 0: there is none."""
        return self.serials[-1] if self.serials else 0

    def table(self) -> np.ndarray:
        """Return `pages` as int32 [pages], valid until they change. Only new pages are converted."""
        count = len(self.pages)
        if count > len(self._table):
            table = np.empty(2 * count, np.int32)
            table[: self._in_table] = self._table[: self._in_table]
            self._table = table
        self._table[self._in_table : count] = self.pages[self._in_table :]
        self._in_table = count
        return self._table[:count]

    def drop_pages(self, keep: int) -> None:
        """Forget all pages but the first `keep`; the caller gives them back to the pool."""
        del self.pages[keep:]
        self._in_table = min(self._in_table, keep)
        self.stored = min(self.stored, keep)


def kv_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros: masked values still take part, as 0 * value. On a CPU they take memory when written."""
    if torch.device(device).type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
