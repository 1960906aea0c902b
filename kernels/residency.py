"""Which KV pages are hot: tables of the GPU's slots, and the clock that decides whose slot a page gets.

A row of the tables is a layer, whose heads share a fixed number of slots on the GPU. Every page of a head (16 tokens of
one KV head) has a home in pinned host memory. Layers agree on pages: head h of page p is p * kv_heads + h in every row.
A layer's memory is [frames, kv_heads, 16, dim], and slot = frame * kv_heads + head. What is new is written into whole
frames; once it is home, the slots are left to the clock, one by one, and may get any head's page.

The clock is the one of Multics (Corbató, "A Paging Experiment with the Multics System", MIT Project MAC, 1968), also
called second chance. What it does is defined slot by slot, and Triton does exactly that in chunks: within a sweep a
slot's fate depends on its own state and on how many victims lie before it, which is a prefix sum. Chunk sizes change
nothing.

- The hand looks at slots in turn. A slot that a round in flight needs, or that is dirty, is passed over untouched. A
  set bit is cleared and the slot passed over. Any other slot, free or not, is the next victim.
- It stops behind the last victim that is needed, else after two sweeps: then all bits it could clear are cleared.
- A page gets its bit when it is wanted while hot, not when it is placed: pages wanted only once go first.

All operations are kernels without a host round trip: they may be captured in a CUDA graph. Calls on one set of tables
must follow each other (one stream). Lists are of blocks, which are runs of a sequence's pages; what is outside of a
table (say, -1) is as if not listed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backends import check_backend


@dataclass(frozen=True)
class ResidencyTables:
    """Rows are layers, pages are those of heads. All on one device, contiguous; operations change them in place.

    slot_of: [rows, pages] int32, the slot in which a page is hot, -1 if it is only at home
    page_in: [rows, slots] int32, the page in a slot, -1 if the slot is free
    referenced: [rows, slots] uint8, the clock's bits
    stamps: [rows, slots] int32, the last round that needs the slot, -1 before the first
    dirty: [rows, slots] uint8, 1 if the page is not yet copied home
    hand: [rows] int32, the slot that the clock looks at next
    """

    slot_of: Tensor
    page_in: Tensor
    referenced: Tensor
    stamps: Tensor
    dirty: Tensor
    hand: Tensor

    def __post_init__(self) -> None:
        shapes = tuple(self.slot_of.shape), tuple(self.page_in.shape)
        if any(len(shape) != 2 or 0 in shape for shape in shapes):
            raise ValueError(
                f"ResidencyTables: slot_of {shapes[0]} and page_in {shapes[1]}; they are [rows, pages] and "
                "[rows, slots], with one of each at least"
            )
        rows, slots = self.page_in.shape
        for name, shape, dtype in (
            ("slot_of", (rows, self.slot_of.shape[1]), torch.int32),
            ("page_in", (rows, slots), torch.int32),
            ("referenced", (rows, slots), torch.uint8),
            ("stamps", (rows, slots), torch.int32),
            ("dirty", (rows, slots), torch.uint8),
            ("hand", (rows,), torch.int32),
        ):
            _check("ResidencyTables", name, getattr(self, name), shape, dtype, self.page_in.device)
            if not getattr(self, name).is_contiguous():
                raise ValueError(f"ResidencyTables: {name} must be contiguous")

    @property
    def rows(self) -> int:
        return self.page_in.shape[0]

    @property
    def pages(self) -> int:
        return self.slot_of.shape[1]

    @property
    def slots(self) -> int:
        return self.page_in.shape[1]


@dataclass(frozen=True)
class Transfers:
    """What is to be copied from home into slots, and what found no slot; `width` holds all that may be listed.

    pages: [rows, width] int32, the first counts[row] in the order of the lists, each once; behind them the
        unplaced[row] pages that found no slot; what follows is undefined
    slots: [rows, width] int32, where the first counts[row] pages go; what follows is undefined
    counts, unplaced: [rows] int32
    """

    pages: Tensor
    slots: Tensor
    counts: Tensor
    unplaced: Tensor


def empty_tables(rows: int, pages: int, slots: int, device: torch.device | str = "cpu") -> ResidencyTables:
    """Tables of `rows` rows, in which nothing is hot."""

    def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return ResidencyTables(
        slot_of=full(rows, pages, value=-1),
        page_in=full(rows, slots, value=-1),
        referenced=full(rows, slots, dtype=torch.uint8),
        stamps=full(rows, slots, value=-1),
        dirty=full(rows, slots, dtype=torch.uint8),
        hand=full(rows),
    )


def request_blocks(
    tables: ResidencyTables,
    lists: Tensor,
    counts: Tensor,
    page_tables: Tensor,
    kv_heads: int,
    pages_per_block: int,
    round: Tensor,
    oldest: Tensor,
    backend: str = "torch",
) -> Transfers:
    """Make the pages of listed blocks hot for `round`, as far as there are slots; returns what must be copied for that.

    lists: [rows, sequences, kv_heads, width] int32, blocks that each head needs, in any order, repeated or not
    counts: [rows, sequences, kv_heads] int32, at most `width`
    page_tables: [sequences, max_pages] int32, the page that holds each of a sequence's; block b is made of the entries
        from b * pages_per_block on. Beyond a sequence's length there may be anything that no listed block reaches.
    round: [1] int32, not below that of any call before; oldest: [1] int32, the oldest round still in flight. What
        `oldest` and later rounds need is no victim; `round` counts as in flight even if `oldest` is above it.

    Hot pages get stamp and bit, before any victim is chosen. The others are placed in the order of sequences, heads
    and lists: first wanted, first placed. What finds no slot is counted once for each page, and stays at home. All
    pages that are not hot must be at home: what was never written is "copied" too.
    """
    check_backend("request_blocks", backend, ("torch", "triton"))
    _check_blocks("request_blocks", tables, lists, counts, page_tables, kv_heads, pages_per_block)
    _check_round("request_blocks", tables, "round", round)
    _check_round("request_blocks", tables, "oldest", oldest)
    if backend == "torch":
        return _torch_request(
            tables, _pages_of_blocks(tables, lists, counts, page_tables, pages_per_block), round, oldest
        )
    raise NotImplementedError("request_blocks: Triton")


def find_block_slots(
    tables: ResidencyTables,
    lists: Tensor,
    counts: Tensor,
    page_tables: Tensor,
    kv_heads: int,
    pages_per_block: int,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """The slots of the pages of listed blocks; changes nothing. The arguments are those of request_blocks.

    Returns slots [rows, sequences, kv_heads, width * pages_per_block] int32, -1 for what is not hot and beyond the
    counts, and late [rows] int32, how many listed pages are not hot, each as often as it is listed.
    """
    check_backend("find_block_slots", backend, ("torch", "triton"))
    _check_blocks("find_block_slots", tables, lists, counts, page_tables, kv_heads, pages_per_block)
    if backend == "torch":
        pages = _pages_of_blocks(tables, lists, counts, page_tables, pages_per_block)
        row = torch.arange(tables.rows, device=lists.device)[:, None, None, None]
        slots = tables.slot_of[row, pages.clamp(min=0).long()].masked_fill(pages < 0, -1)
        return slots, ((pages >= 0) & (slots < 0)).sum((1, 2, 3), dtype=torch.int32)
    raise NotImplementedError("find_block_slots: Triton")


def pin_frames(
    tables: ResidencyTables,
    pages: Tensor,
    frames: Tensor,
    round: Tensor,
    kv_heads: int,
    backend: str = "torch",
) -> None:
    """Let pages that `round` writes lie in given frames, every head in every row; they are dirty, without bit.

    What else is in a frame is forgotten, dirty or not. Where a page lay elsewhere, that slot is free, with its stamp.

    pages, frames: [n] int32, each listed once at most; where one is outside of the tables, both are passed over
    round: [1] int32
    """
    check_backend("pin_frames", backend, ("torch", "triton"))
    _check_pages("pin_frames", tables, pages, kv_heads)
    _check("pin_frames", "frames", frames, tuple(pages.shape), torch.int32, tables.page_in.device)
    _check_round("pin_frames", tables, "round", round)
    if backend == "torch":
        fit = (frames >= 0) & (frames < tables.slots // kv_heads)
        fit &= (pages >= 0) & (pages < tables.pages // kv_heads)
        page, slot = (_of_heads(t[fit], kv_heads) for t in (pages, frames))
        for row in range(tables.rows):
            former, other = tables.slot_of[row, page].long(), tables.page_in[row, slot].long()
            tables.slot_of[row, other[other >= 0]] = -1
            _free(tables, row, former[former >= 0])
            tables.slot_of[row, page] = slot.int()
            tables.page_in[row, slot] = page.int()
            tables.referenced[row, slot] = 0
            tables.dirty[row, slot] = 1
            tables.stamps[row, slot] = round
        return
    raise NotImplementedError("pin_frames: Triton")


def mark_home(tables: ResidencyTables, pages: Tensor, kv_heads: int, backend: str = "torch") -> None:
    """These pages have been copied home, every head in every row: they are not dirty, and left to the clock.

    pages: [n] int32; what is not hot is passed over. What was written or freed after the copy began must not be listed.
    """
    check_backend("mark_home", backend, ("torch", "triton"))
    _check_pages("mark_home", tables, pages, kv_heads)
    if backend == "torch":
        for row in range(tables.rows):
            _, slot = _hot(tables, row, pages, kv_heads)
            tables.dirty[row, slot] = 0
        return
    raise NotImplementedError("mark_home: Triton")


def drop_pages(tables: ResidencyTables, pages: Tensor, kv_heads: int, backend: str = "torch") -> None:
    """Forget pages that were freed, dirty or not, every head in every row: their slots are free, without bit.

    The slots keep their stamps: a round in flight may still read them, or a copy into them be on its way, so they are
    taken only when that round has ended.

    pages: [n] int32; what is not hot is passed over
    """
    check_backend("drop_pages", backend, ("torch", "triton"))
    _check_pages("drop_pages", tables, pages, kv_heads)
    if backend == "torch":
        for row in range(tables.rows):
            page, slot = _hot(tables, row, pages, kv_heads)
            tables.slot_of[row, page] = -1
            _free(tables, row, slot)
        return
    raise NotImplementedError("drop_pages: Triton")


def _check(
    operation: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{operation}: {name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, "
            f"not {shape} {dtype} on {device}"
        )


def _check_blocks(
    operation: str,
    tables: ResidencyTables,
    lists: Tensor,
    counts: Tensor,
    page_tables: Tensor,
    kv_heads: int,
    pages_per_block: int,
) -> None:
    if lists.dim() != 4:
        raise ValueError(f"{operation}: lists are [rows, sequences, heads, width], not {tuple(lists.shape)}")
    if page_tables.dim() != 2:
        raise ValueError(f"{operation}: page_tables are [sequences, pages], not {tuple(page_tables.shape)}")
    if pages_per_block < 1:
        raise ValueError(f"{operation}: a block of {pages_per_block} pages")
    _check_heads(operation, tables, kv_heads)
    sequences, width, device = lists.shape[1], lists.shape[3], tables.page_in.device
    shape = tables.rows, sequences, kv_heads
    _check(operation, "lists", lists, (*shape, width), torch.int32, device)
    _check(operation, "counts", counts, shape, torch.int32, device)
    _check(operation, "page_tables", page_tables, (sequences, page_tables.shape[1]), torch.int32, device)


def _check_pages(operation: str, tables: ResidencyTables, pages: Tensor, kv_heads: int) -> None:
    if pages.dim() != 1:
        raise ValueError(f"{operation}: pages are [n], not {tuple(pages.shape)}")
    _check_heads(operation, tables, kv_heads)
    _check(operation, "pages", pages, tuple(pages.shape), torch.int32, tables.page_in.device)


def _check_heads(operation: str, tables: ResidencyTables, kv_heads: int) -> None:
    if kv_heads < 1 or tables.pages % kv_heads:
        raise ValueError(f"{operation}: {tables.pages} pages are not of {kv_heads} heads")


def _check_round(operation: str, tables: ResidencyTables, name: str, round: Tensor) -> None:
    _check(operation, name, round, (1,), torch.int32, tables.page_in.device)


def _pages_of_blocks(
    tables: ResidencyTables, lists: Tensor, counts: Tensor, page_tables: Tensor, pages_per_block: int
) -> Tensor:
    """[rows, sequences, kv_heads, width * pages_per_block] int32: the listed heads' pages, -1 where there is none."""
    _, sequences, kv_heads, width = lists.shape
    device, end = lists.device, page_tables.shape[1]
    part = torch.arange(pages_per_block, device=device)
    logical = (lists[..., None].long() * pages_per_block + part).flatten(3)
    place = torch.arange(width * pages_per_block, device=device)
    listed = (place < counts[..., None].long() * pages_per_block) & (logical >= 0) & (logical < end)
    sequence = torch.arange(sequences, device=device)[:, None, None]
    padded = torch.nn.functional.pad(page_tables, (0, 1), value=-1)
    page = padded[sequence, logical.where(listed, end)]
    listed = (page >= 0) & (page < tables.pages // kv_heads)
    head = torch.arange(kv_heads, device=device, dtype=torch.int32)[:, None]
    return torch.where(listed, page, 0) * kv_heads + head.where(listed, 0) - (~listed).int()


def _of_heads(pages: Tensor, kv_heads: int) -> Tensor:
    """[n] to [n * kv_heads] int64."""
    return (pages[:, None].long() * kv_heads + torch.arange(kv_heads, device=pages.device)).flatten()


def _hot(tables: ResidencyTables, row: int, pages: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Which heads' pages of a row are hot, and their slots."""
    page = _of_heads(pages[(pages >= 0) & (pages < tables.pages // kv_heads)], kv_heads)
    slot = tables.slot_of[row, page].long()
    return page[slot >= 0], slot[slot >= 0]


def _free(tables: ResidencyTables, row: int, slots: Tensor) -> None:
    tables.page_in[row, slots] = -1
    tables.referenced[row, slots] = 0
    tables.dirty[row, slots] = 0


def _torch_request(tables: ResidencyTables, pages: Tensor, round: Tensor, oldest: Tensor) -> Transfers:
    """pages: [rows, sequences, kv_heads, n] int32, -1 where there is none."""
    pages = pages.flatten(1)
    rows = len(pages)
    transfers = Transfers(
        torch.empty_like(pages), torch.empty_like(pages), pages.new_empty(rows), pages.new_empty(rows)
    )
    pinned_from = min(int(round), int(oldest))
    for row in range(rows):
        _request_row(tables, row, pages[row][pages[row] >= 0], int(round), pinned_from, transfers)
    return transfers


def _request_row(
    tables: ResidencyTables,
    row: int,
    wanted: Tensor,
    now: int,
    pinned_from: int,
    transfers: Transfers,
) -> None:
    """One row of the reference; wanted: [n] int32, pages in order."""
    pages = list(dict.fromkeys(wanted.tolist()))
    slots = [int(tables.slot_of[row, page]) for page in pages]
    for slot in slots:
        if slot >= 0:
            tables.referenced[row, slot] = 1
            tables.stamps[row, slot] = now
    missing = [page for page, slot in zip(pages, slots, strict=True) if slot < 0]
    victims = _advance_hand(tables, row, len(missing), pinned_from)
    for i, (page, slot) in enumerate(zip(missing, victims, strict=False)):
        old = int(tables.page_in[row, slot])
        if old >= 0:
            tables.slot_of[row, old] = -1
        tables.slot_of[row, page] = slot
        tables.page_in[row, slot] = page
        tables.stamps[row, slot] = now
        transfers.slots[row, i] = slot
    transfers.pages[row, : len(missing)] = torch.tensor(missing, dtype=torch.int32)
    transfers.counts[row] = len(victims)
    transfers.unplaced[row] = len(missing) - len(victims)


def _advance_hand(tables: ResidencyTables, row: int, wanted: int, pinned_from: int) -> list[int]:
    """Up to `wanted` victims, in the order in which the hand finds them; moves the hand and clears bits."""
    if not wanted:
        return []
    stamps, dirty, bits = (t[row].tolist() for t in (tables.stamps, tables.dirty, tables.referenced))
    hand = int(tables.hand[row])
    victims: dict[int, None] = {}  # in order; the second sweep finds them again, which changes nothing
    for _ in range(2 * tables.slots):
        if len(victims) == wanted:
            break
        if stamps[hand] < pinned_from and not dirty[hand]:
            if bits[hand]:
                bits[hand] = 0
            else:
                victims[hand] = None
        hand = (hand + 1) % tables.slots
    tables.referenced[row] = tables.referenced.new_tensor(bits)
    tables.hand[row] = hand
    return list(victims)
