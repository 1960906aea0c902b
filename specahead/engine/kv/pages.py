"""Pages of KV: how many tokens one holds, the block table of a sequence, and how KV tensors are allocated."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

PAGE_SIZE = 16  # tokens
KEPT_SHARE = 0.01  # of a target's pages; they stay free when a session begins to run beside others


class OutOfPages(Exception):
    """The pool cannot supply the pages asked for."""


def pages_for(length: int) -> int:
    """Return how many pages `length` tokens take."""
    return -(-length // PAGE_SIZE)


@dataclass
class SequenceKV:
    """A sequence's block table. `length` tokens have KV; `pages` may reach beyond it."""

    length: int = 0
    pages: list[int] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)  # of leading pages that are offered to the prefix index
    dense_tokens: float = math.inf  # leading tokens at least whose KV does not come of a sparse read
    stored: int = 0  # leading pages that are in the backing store or on their way there (specahead.engine.kv.tiered)
    settled: float = math.inf  # leading tokens whose KV stays as it is; that of others may be written anew
    dense: bool = False  # always read wholly: where KV lies in tiers, its pages leave the GPU last
    drafts: bool = False  # drafted for by passes that read it sparsely
    groups: list[int] = field(default_factory=list)  # slots of the means of its leading groups of tokens
    _table: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32), repr=False, compare=False)
    _in_table: int = field(default=0, repr=False, compare=False)  # leading pages that `_table` holds already

    @property
    def indexed(self) -> int:
        """How many leading pages are offered to the prefix index."""
        return len(self.serials)

    @property
    def serial(self) -> int:
        """The serial of the last of these; 0: there is none."""
        return self.serials[-1] if self.serials else 0

    def table(self) -> np.ndarray:
        """`pages` as int32 [pages]; to be read before they change. A long list is not converted anew each step."""
        count = len(self.pages)
        if count > len(self._table):
            table = np.empty(2 * count, np.int32)
            table[: self._in_table] = self._table[: self._in_table]
            self._table = table
        self._table[self._in_table : count] = self.pages[self._in_table :]
        self._in_table = count
        return self._table[:count]

    def drop_pages(self, keep: int) -> None:
        """Forget all pages but the first `keep`; who gives them back to the pool is the caller."""
        del self.pages[keep:]
        self._in_table = min(self._in_table, keep)
        self.stored = min(self.stored, keep)


def kv_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros, because what is masked still takes part in 0 * value. On a CPU they take memory when written."""
    if torch.device(device).type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
