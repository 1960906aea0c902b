"""Paged KV: a pool of pages with reference counts, the block tables of sequences, and reuse by prefix.

Who owns which page:

    free list ── allocate ──> sequence(s) ── release ──> free list        (page not in the prefix index)
                                  │  ▲
                               release │ match (reference count + 1)
                                  ▼  │
                              prefix index, unreferenced ── evict ──> free list

A page is writable by the one sequence that allocated it; a page in the prefix index is full and never
written again. Rollback moves a length and frees whole pages; it copies nothing.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.backends import default_backend
from kernels.group_means import make_group_means
from kernels.paged_attention import GroupMeans

PAGE_SIZE = 16  # tokens


# The serial of the page before (0 at the start) and this page's tokens: exact, so that no collision can leak KV.
Prefix = tuple[int, tuple[int, ...]]


class OutOfPages(Exception):
    """The pool cannot supply the pages asked for."""


class PagePool:
    """Page numbers 0 … n-1, each free, referenced by sequences, or unreferenced and kept for its prefix.

    freed: pages that went back to the free list, in order, for who keeps anything else of them and empties the list.
    """

    def __init__(self, num_pages: int, freed: list[int] | None = None) -> None:
        self.num_pages = num_pages
        self.freed = freed
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._page_of_prefix: dict[Prefix, int] = {}
        self._prefix_of_page: dict[int, Prefix] = {}
        self._serial_of_page: dict[int, int] = {}
        self._next_serial = 1
        self._reusable: OrderedDict[int, None] = (
            OrderedDict()
        )  # unreferenced pages with a prefix, oldest first

    @property
    def available(self) -> int:
        """Pages that can be allocated, evicting reusable ones where needed."""
        return self.free + len(self._reusable)

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Pages that sequences refer to."""
        return self.num_pages - self.available

    def allocate(self, count: int) -> list[int]:
        if count > self.available:
            raise OutOfPages(f"{count} pages wanted, {self.available} of {self.num_pages} available")
        while self.free < count:
            self.evict_one()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def release(self, pages: list[int]) -> None:
        for page in pages:
            if self.references[page] < 1:
                raise ValueError(f"page {page} is released more often than it is held")
            self.references[page] -= 1
            if self.references[page] == 0:
                if page in self._prefix_of_page:
                    self._reusable[page] = None
                else:
                    self._give_back(page)

    def share(self, pages: list[int]) -> None:
        """Let one more sequence refer to held pages."""
        for page in pages:
            if self.references[page] < 1:
                raise ValueError(f"page {page} is not held")
            self.references[page] += 1

    def match(self, prefix: Prefix) -> tuple[int, int] | None:
        """The page that holds `prefix`, referenced once more, and its serial, or None."""
        page = self._page_of_prefix.get(prefix)
        if page is None:
            return None
        self._reusable.pop(page, None)
        self.references[page] += 1
        return page, self._serial_of_page[page]

    def index(self, page: int, prefix: Prefix) -> int:
        """Let later sequences reuse a full, held page; the first page indexed for a prefix stays.

        Returns the serial that names this prefix in the prefixes that extend it.
        """
        if self.references[page] < 1:
            raise ValueError(f"page {page} is not held")
        known = self._page_of_prefix.get(prefix)
        if known is not None:
            return self._serial_of_page[known]
        if page in self._prefix_of_page:
            raise ValueError(f"page {page} is indexed already")
        self._page_of_prefix[prefix], self._prefix_of_page[page] = page, prefix
        self._serial_of_page[page], self._next_serial = self._next_serial, self._next_serial + 1
        return self._serial_of_page[page]

    def evict_one(self) -> None:
        """Forget the reusable page that was released longest ago."""
        page, _ = self._reusable.popitem(last=False)
        del self._page_of_prefix[self._prefix_of_page.pop(page)]
        del self._serial_of_page[page]
        self._give_back(page)

    def _give_back(self, page: int) -> None:
        self._free.append(page)
        if self.freed is not None:
            self.freed.append(page)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is in exactly one place."""
        free, reusable = set(self._free), set(self._reusable)
        held = {page for page, count in enumerate(self.references) if count}
        assert len(free) == self.free and not free & reusable and not held & (free | reusable)
        assert len(free) + len(reusable) + len(held) == self.num_pages
        assert {p: h for h, p in self._page_of_prefix.items()} == self._prefix_of_page
        assert reusable <= set(self._prefix_of_page) and not free & set(self._prefix_of_page)


@dataclass
class SequenceKV:
    """A sequence's block table. `length` tokens have KV; `pages` may reach beyond it."""

    length: int = 0
    pages: list[int] = field(default_factory=list)
    indexed: int = 0  # leading pages offered to the prefix index
    serial: int = 0  # of the last of them
    noted: int = 0  # leading pages that are at home or on their way there (engine.tiered_kv)
    dense: bool = False  # always read wholly: where KV lies in tiers, it leaves the GPU last
    groups: list[int] = field(default_factory=list)  # slots of the means of its leading groups of tokens
    _table: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32), repr=False, compare=False)
    _in_table: int = field(default=0, repr=False, compare=False)  # leading pages that `_table` holds already

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
        self.noted = min(self.noted, keep)


# (pages int32 [groups, pages of a group], slots [groups] int64, the pool that they are of)
MakeMeans = Callable[[np.ndarray, Tensor, "GroupMeanPool"], None]


class GroupMeanPool:
    """Means of keys and values, and variances of keys, of groups of tokens; slots 0 … n-1, each free or of one
    sequence's group.

    A group's mean is made once, when all its tokens are committed, and freed with its sequence.
    """

    def __init__(self, k_pages: list[Tensor], group_size: int, slots: int) -> None:
        if group_size < 1 or group_size % PAGE_SIZE:
            raise ValueError(f"groups of {group_size} tokens are no whole pages of {PAGE_SIZE}")
        _, kv_heads, _, head_dim = k_pages[0].shape
        shape, device = (len(k_pages), slots, kv_heads, head_dim), k_pages[0].device
        self.group_size = group_size
        self.k, self.v, self.k_variance = (_zeros(shape, torch.float32, device) for _ in range(3))
        self.free = list(range(slots - 1, -1, -1))

    def extend(self, sequence: SequenceKV, make: MakeMeans) -> None:
        """Make the means of groups that are complete; every token of `sequence` must be committed."""
        first, last = len(sequence.groups), sequence.length // self.group_size
        if first >= last:
            return
        if last - first > len(self.free):
            raise OutOfPages(f"{last - first} group means wanted, {len(self.free)} slots are free")
        slots = [self.free.pop() for _ in range(last - first)]
        per_group = self.group_size // PAGE_SIZE
        pages = sequence.table()[first * per_group : last * per_group].reshape(-1, per_group)
        make(pages, torch.tensor(slots, device=self.k.device), self)
        sequence.groups += slots

    def truncate(self, sequence: SequenceKV) -> None:
        """Free the means of groups that the sequence no longer fills."""
        keep = sequence.length // self.group_size
        self.free += sequence.groups[keep:]
        del sequence.groups[keep:]

    def batch(self, sequences: list[SequenceKV], device: torch.device) -> list[GroupMeans]:
        """What attention over these sequences takes, a layer each."""
        counts = [len(sequence.groups) for sequence in sequences]
        tables = torch.zeros(len(sequences), max(counts), dtype=torch.int32)
        for row, sequence in enumerate(sequences):
            tables[row, : counts[row]] = torch.tensor(sequence.groups, dtype=torch.int32)
        return self.over(tables.to(device), torch.tensor(counts, dtype=torch.int32, device=device))

    def over(self, tables: Tensor, counts: Tensor) -> list[GroupMeans]:
        """The means that tables [sequences, max_groups] and counts [sequences] name, a layer each."""
        return [
            GroupMeans(*layer, tables, counts, self.group_size)
            for layer in zip(self.k, self.v, self.k_variance, strict=True)
        ]


class PagedKV:
    """The KV tensors of one model and the block tables over them.

    k_pages, v_pages: one tensor a layer, [pages, kv_heads, PAGE_SIZE, head_dim]: a (page, head) is contiguous. Each
    page lies in the place of its number (engine.tiered_kv: not there).
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        num_pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_pages, kv_heads, PAGE_SIZE, head_dim)
        self.kv_heads = kv_heads
        self.device = torch.device(device)
        self.k_pages: list[Tensor] = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.v_pages: list[Tensor] = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.pool = PagePool(num_pages)
        self.means: GroupMeanPool | None = None

    def keep_group_means(self, group_size: int, slots: int | None = None) -> None:
        """Have room for means of groups of `group_size` tokens, for sequences that are read sparsely.

        slots: groups over all sequences; as many as fit the pages if None, which is too few for sequences that
        share pages. No sequence may hold means when this is called.
        """
        if slots is None:
            slots = self.pool.num_pages * PAGE_SIZE // group_size
        self.means = GroupMeanPool(self.k_pages, group_size, slots)

    def group_means(self, sequences: list[SequenceKV], device: torch.device) -> list[GroupMeans]:
        """Means over all complete groups of each sequence, a layer each. Missing ones are made from the pages."""
        return self.extend_group_means(sequences).batch(sequences, device)

    def extend_group_means(self, sequences: list[SequenceKV]) -> GroupMeanPool:
        """Make the missing means of complete groups from the pages."""
        if self.means is None:
            raise ValueError("no room for group means was made: call keep_group_means first")
        for sequence in sequences:
            self.means.extend(sequence, self.make_means)
        return self.means

    def make_means(self, pages: np.ndarray, slots: Tensor, pool: GroupMeanPool) -> None:
        make_group_means(
            self.k_pages,
            self.v_pages,
            torch.from_numpy(pages.astype(np.int64)).to(slots.device),
            slots,
            pool.k,
            pool.v,
            pool.k_variance,
            default_backend(slots.device),
        )

    @property
    def num_layers(self) -> int:
        return len(self.k_pages)

    def frames(self, sequence: SequenceKV) -> np.ndarray:
        """int32 [pages], where in `k_pages` and `v_pages` the sequence's pages lie."""
        return sequence.table()

    # What a pass asks of KV, whether all of it lies on the device or not (engine.tiered_kv).
    is_tiered = False
    kept_layers: tuple[int, ...] = ()  # whose pages lie at their numbers, where others' do not

    def layer_pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, [pages, kv_heads, PAGE_SIZE, head_dim] each."""
        return self.k_pages[layer], self.v_pages[layer]

    def can_fetch(self, width: int, dense_layers: tuple[int, ...], block_size: int) -> bool:
        """Whether a pass with lists of `width` blocks can run by fetching what it lists."""
        return False

    def check_dense_layers(self, dense_layers: tuple[int, ...]) -> None:
        """Raise ValueError if reads cannot have these layers dense."""

    def is_resident(self, sequence: SequenceKV) -> bool:
        """Whether all of the sequence's pages lie in `k_pages` and `v_pages`, as whole pages."""
        return True

    def begin(self, work: list[tuple[SequenceKV, int]]) -> None:
        """Before a pass that adds so many tokens to each sequence: have pages for them. Raises OutOfPages."""
        for sequence, tokens in work:
            self.grow(sequence, sequence.length + tokens)

    def grow(self, sequence: SequenceKV, length: int) -> None:
        """Allocate pages so that `length` tokens fit; sequence.length is left to the writer."""
        missing = pages_for(length) - len(sequence.pages)
        if missing > 0:
            sequence.pages += self.pool.allocate(missing)

    def truncate(self, sequence: SequenceKV, length: int) -> None:
        """Roll back to `length` tokens: free the pages behind it."""
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot truncate {sequence.length} tokens to {length}")
        if length < sequence.indexed * PAGE_SIZE:
            raise ValueError(f"cannot truncate to {length}: {sequence.indexed} pages are indexed by prefix")
        last = sequence.pages[length // PAGE_SIZE] if length % PAGE_SIZE else None
        if last is not None and self.pool.references[last] > 1:
            raise ValueError(f"cannot truncate to {length}: the page there is shared with another sequence")
        sequence.length = length
        sequence.noted = min(sequence.noted, length // PAGE_SIZE)
        keep = pages_for(length)
        self.pool.release(sequence.pages[keep:])
        sequence.drop_pages(keep)
        if self.means is not None:
            self.means.truncate(sequence)

    def release(self, sequence: SequenceKV) -> None:
        """Give all pages back; the sequence is empty afterwards."""
        self.pool.release(sequence.pages)
        sequence.drop_pages(0)
        sequence.length, sequence.indexed, sequence.serial = 0, 0, 0
        if self.means is not None:
            self.means.truncate(sequence)

    def fork(self, sequence: SequenceKV) -> SequenceKV:
        """Another sequence with the same KV: full pages are shared, a partial last page is copied."""
        shared = sequence.pages[: sequence.length // PAGE_SIZE]
        twin = SequenceKV(sequence.length, list(shared), min(sequence.indexed, len(shared)), sequence.serial)
        if sequence.length % PAGE_SIZE:
            self.grow(twin, sequence.length)
            for pages in (*self.k_pages, *self.v_pages):
                pages[twin.pages[-1]] = pages[sequence.pages[len(shared)]]
        self.pool.share(shared)
        return twin

    def reuse_prefix(self, sequence: SequenceKV, tokens: list[int]) -> int:
        """Let an empty sequence take over indexed pages that hold a prefix of `tokens`; returns the tokens covered."""
        while (sequence.indexed + 1) * PAGE_SIZE <= len(tokens):
            found = self.pool.match(_next_prefix(sequence, tokens))
            if found is None:
                break
            page, sequence.serial = found
            sequence.pages.append(page)
            sequence.indexed += 1
        sequence.length = sequence.indexed * PAGE_SIZE
        return sequence.length

    def index_prefix(self, sequence: SequenceKV, tokens: list[int], committed: int | None = None) -> None:
        """Offer full pages, whose KV must be dense, to later sequences: of the `committed` first tokens, or of all."""
        count = len(tokens) if committed is None else committed
        while (sequence.indexed + 1) * PAGE_SIZE <= min(count, sequence.length):
            page = sequence.pages[sequence.indexed]
            sequence.serial = self.pool.index(page, _next_prefix(sequence, tokens))
            sequence.indexed += 1


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros, because what is masked still takes part in 0 * value. On a CPU numpy's take memory only when written."""
    if torch.device(device).type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def pages_for(length: int) -> int:
    return -(-length // PAGE_SIZE)


def _next_prefix(sequence: SequenceKV, tokens: list[int]) -> Prefix:
    start = sequence.indexed * PAGE_SIZE
    return sequence.serial, tuple(tokens[start : start + PAGE_SIZE])
