"""The residency tables, what a request leaves, and checks of arguments."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ResidencyTables:
    """Rows are layers, pages are those of heads. All on one device, contiguous; operations change them in place.

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

    def __post_init__(self) -> None:
        shapes = tuple(self.line_of.shape), tuple(self.page_in.shape)
        if any(len(shape) != 2 or 0 in shape for shape in shapes):
            raise ValueError(
                f"ResidencyTables: line_of {shapes[0]} and page_in {shapes[1]}; they are [rows, pages] and "
                "[rows, lines], with one of each at least"
            )
        by_name = {"line_of": (self.rows, self.pages), "hand": (self.rows,)}
        for name, tensor in vars(self).items():
            shape = by_name.get(name, (self.rows, self.lines))
            dtype = torch.uint8 if name in ("referenced", "dirty") else torch.int32
            check_tensor("ResidencyTables", name, tensor, shape, dtype, self.page_in.device)
            if not tensor.is_contiguous():
                raise ValueError(f"ResidencyTables: {name} must be contiguous")

    @property
    def rows(self) -> int:
        return self.page_in.shape[0]

    @property
    def pages(self) -> int:
        return self.line_of.shape[1]

    @property
    def lines(self) -> int:
        return self.page_in.shape[1]


@dataclass(frozen=True)
class ListedBlocks:
    """The blocks that a step needs.

    lists: [rows, sequences, kv_heads, width] int32, blocks that each head needs, in any order, repeated or not
    counts: [rows, sequences, kv_heads] int32, at most `width`
    page_tables: [sequences, max_pages] int32, the page that holds each of a sequence's; block b is made of the entries
        from b * pages_per_block on. Beyond a sequence's length there may be anything that no listed block reaches.
    """

    lists: Tensor
    counts: Tensor
    page_tables: Tensor
    kv_heads: int
    pages_per_block: int


@dataclass(frozen=True)
class Transfers:
    """What is to be copied from the backing store into lines, and what overflows, which found no line.

    `width` holds all that may be listed.

    pages: [rows, width] int32, the first counts[row] in the order of the lists, each once; behind them the
        overflow[row] pages that found no line; what follows is undefined
    lines: [rows, width] int32, where the first counts[row] pages go; what follows is undefined
    counts, overflow: [rows] int32
    """

    pages: Tensor
    lines: Tensor
    counts: Tensor
    overflow: Tensor


def empty_transfers(rows: int, width: int, device: torch.device) -> Transfers:
    """Transfers of these sizes, in which nothing is said yet."""
    pages, lines = torch.empty(2, rows, width, dtype=torch.int32, device=device)
    counts, overflow = torch.empty(2, rows, dtype=torch.int32, device=device)
    return Transfers(pages, lines, counts, overflow)


def empty_tables(rows: int, pages: int, lines: int, device: torch.device | str = "cpu") -> ResidencyTables:
    """Tables of `rows` rows, in which nothing is cached."""

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
    """As `empty_tables`, in place."""
    for tensor in (tables.line_of, tables.page_in, tables.stamps):
        tensor.fill_(-1)
    for tensor in (tables.referenced, tables.dirty, tables.hand):
        tensor.zero_()


def check_tensor(
    operation: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError unless the tensor is so; -1 in `shape` is any size."""
    sizes = len(shape) == tensor.dim() and all(
        want in (-1, size) for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not sizes or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{operation}: {name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, "
            f"not {shape} {dtype} on {device}"
        )


def check_blocks(operation: str, tables: ResidencyTables, listed: ListedBlocks) -> None:
    if listed.pages_per_block < 1:
        raise ValueError(f"{operation}: a block of {listed.pages_per_block} pages")
    check_heads(operation, tables, listed.kv_heads)
    lists, device = listed.lists, tables.page_in.device
    check_tensor(operation, "lists", lists, (tables.rows, -1, listed.kv_heads, -1), torch.int32, device)
    check_tensor(operation, "counts", listed.counts, tuple(lists.shape[:3]), torch.int32, device)
    check_tensor(operation, "page_tables", listed.page_tables, (lists.shape[1], -1), torch.int32, device)


def check_pages(operation: str, tables: ResidencyTables, pages: Tensor, kv_heads: int) -> None:
    check_heads(operation, tables, kv_heads)
    check_tensor(operation, "pages", pages, (-1,), torch.int32, tables.page_in.device)


def check_heads(operation: str, tables: ResidencyTables, kv_heads: int) -> None:
    if kv_heads < 1 or tables.pages % kv_heads:
        raise ValueError(f"{operation}: {tables.pages} pages are not of {kv_heads} heads")
