"""The tables of residency, lists of blocks, and the copies that a request leaves to be made."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specahead.kernels.backends import jit, tl


class ResidencyTables(NamedTuple):
    """Rows are layers, pages are those of heads. All on one device and contiguous; operations change them in place.

    line_of: [rows, pages] int32, the line in which a page is cached, -1 if it is only in the backing store
    page_in: [rows, lines] int32, the page in a line, -1 if the line is free
    referenced: [rows, lines] uint8, the clock's bits
    stamps: [rows, lines] int32, the last round that needs the line, -1 before the first
    dirty: [rows, lines] uint8, 1 if the page is not yet stored
    hand: [rows] int32, the line that the clock looks at next
    """

    line_of: Tensor
    page_in: Tensor
    referenced: Tensor
    stamps: Tensor
    dirty: Tensor
    hand: Tensor

    @property
    def rows(self) -> int:
        return self.page_in.shape[0]

    @property
    def pages(self) -> int:
        return self.line_of.shape[1]

    @property
    def lines(self) -> int:
        return self.page_in.shape[1]

    def of_row(self, row: int) -> "ResidencyTables":
        """Return views of the tables of one row."""
        return ResidencyTables(*(each[row : row + 1] for each in self))


@dataclass(frozen=True)
class ListedBlocks:
    """The blocks that a step needs.

    lists: [rows, sequences, kv_heads, width] int32, the blocks that each head needs, in any order, repeated or not
    counts: [rows, sequences, kv_heads] int32, at most `width`
    page_tables: [sequences, max_pages] int32, the pages of each sequence; block b is made of the entries from
        b * pages_per_block on. Behind a sequence's end there may be anything that no listed block reaches.
    """

    lists: Tensor
    counts: Tensor
    page_tables: Tensor
    kv_heads: int
    pages_per_block: int

    def __post_init__(self) -> None:
        lists, counts, page_tables = self.lists, self.counts, self.page_tables
        assert lists.dtype == counts.dtype == page_tables.dtype == torch.int32
        assert lists.shape[:3] == counts.shape and lists.shape[1:3] == (len(page_tables), self.kv_heads)


class Transfers(NamedTuple):
    """The pages to copy from the backing store into lines, and the pages that overflow because they found no line.

    pages: [rows, width] int32, the first counts[row] in the order of the lists, each once; after them the
        overflow[row] pages without a line; the rest is undefined
    lines: [rows, width] int32, where the first counts[row] pages go; the rest is undefined
    counts, overflow: [rows] int32
    """

    pages: Tensor
    lines: Tensor
    counts: Tensor
    overflow: Tensor


def empty_transfers(rows: int, width: int, device: torch.device) -> Transfers:
    """Return undefined transfers of these sizes."""
    pages, lines = torch.empty(2, rows, width, dtype=torch.int32, device=device)
    counts, overflow = torch.empty(2, rows, dtype=torch.int32, device=device)
    return Transfers(pages, lines, counts, overflow)


def empty_tables(rows: int, pages: int, lines: int, device: torch.device | str = "cpu") -> ResidencyTables:
    """Return tables of `rows` rows in which nothing is cached."""

    def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return ResidencyTables(
        line_of=full(rows, pages, value=-1),
        page_in=full(rows, lines, value=-1),
        referenced=full(rows, lines, dtype=torch.uint8),
        stamps=full(rows, lines, value=-1),
        dirty=full(rows, lines, dtype=torch.uint8),
        hand=full(rows),
    )


def clear_tables(tables: ResidencyTables) -> None:
    """Forget everything, in place: the tables become those of `empty_tables`."""
    for tensor in (tables.line_of, tables.page_in, tables.stamps):
        tensor.fill_(-1)
    for tensor in (tables.referenced, tables.dirty, tables.hand):
        tensor.zero_()


def pages_of_blocks(pages: int, listed_blocks: ListedBlocks) -> Tensor:
    """Return the pages of listed blocks, -1 where there is none: [rows, sequences, kv_heads, width * pages_per_block].

    pages: of all heads, as `ResidencyTables.pages` counts them
    """
    lists, counts, page_tables = listed_blocks.lists, listed_blocks.counts, listed_blocks.page_tables
    _, sequences, kv_heads, width = lists.shape
    pages_per_block = listed_blocks.pages_per_block
    device, end = lists.device, page_tables.shape[1]
    part = torch.arange(pages_per_block, device=device)
    logical = (lists[..., None].long() * pages_per_block + part).flatten(3)
    place = torch.arange(width * pages_per_block, device=device)
    listed = (place < counts[..., None].long() * pages_per_block) & (logical >= 0) & (logical < end)
    sequence = torch.arange(sequences, device=device)[:, None, None]
    padded = torch.nn.functional.pad(page_tables, (0, 1), value=-1)
    page = padded[sequence, logical.where(listed, end)]
    listed = (page >= 0) & (page < pages // kv_heads)
    head = torch.arange(kv_heads, device=device, dtype=torch.int32)[:, None]
    return torch.where(listed, page, 0) * kv_heads + head.where(listed, 0) - (~listed).int()


@jit
def pages_at(list_ptr, page_table_ptr, place, inside, pages, head, kv_heads, max_pages, PER_BLOCK: tl.constexpr):
    """Return a head's pages at `place` among all that a list names, and which of them exist."""
    block = tl.load(list_ptr + place // PER_BLOCK, mask=inside, other=-1)
    known = (block >= 0) & (block < (max_pages + PER_BLOCK - 1) // PER_BLOCK)
    logical = block * PER_BLOCK + place % PER_BLOCK
    page = tl.load(page_table_ptr + logical, mask=known & (logical < max_pages), other=-1)
    return page * kv_heads + head, (page >= 0) & (page < pages // kv_heads)
