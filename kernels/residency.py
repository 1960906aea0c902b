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

from kernels.backends import check_backend, follow, jit, overlapping_launch, power_of_two, tl

_LISTED = 512  # listed pages that a program takes at once
_PARTS = 2  # programs that share a list, at most
_FOUND = 1024  # listed pages whose slots a program looks up
_JOINED = 16  # programs' claims that one program joins
_CLAIMS = 32  # of each of these, at once
_SWEPT = 1024  # slots whose fate a program decides at once
_SWEEPERS = 32  # programs that share a row's slots: all are there at once, and gone where nothing is missing
_CLEARED = 1024


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


def clear_tables(tables: ResidencyTables) -> None:
    """As `empty_tables`, in place."""
    for tensor in (tables.slot_of, tables.page_in, tables.stamps):
        tensor.fill_(-1)
    for tensor in (tables.referenced, tables.dirty, tables.hand):
        tensor.zero_()


def request_blocks(
    tables: ResidencyTables,
    lists: Tensor,
    counts: Tensor,
    page_tables: Tensor,
    kv_heads: int,
    pages_per_block: int,
    round: Tensor,
    backend: str = "torch",
) -> Transfers:
    """Make the pages of listed blocks hot for `round`, as far as there are slots; returns what must be copied for that.

    lists: [rows, sequences, kv_heads, width] int32, blocks that each head needs, in any order, repeated or not
    counts: [rows, sequences, kv_heads] int32, at most `width`
    page_tables: [sequences, max_pages] int32, the page that holds each of a sequence's; block b is made of the entries
        from b * pages_per_block on. Beyond a sequence's length there may be anything that no listed block reaches.
    round: [1] int32, not below that of any call before. What it needs is no victim.

    Hot pages get stamp and bit, before any victim is chosen. The others are placed in the order of sequences, heads
    and lists: first wanted, first placed. What finds no slot is counted once for each page, and stays at home. All
    pages that are not hot must be at home: what was never written is "copied" too.
    """
    check_backend("request_blocks", backend, ("torch", "triton"))
    _check_blocks("request_blocks", tables, lists, counts, page_tables, kv_heads, pages_per_block)
    _check_round("request_blocks", tables, "round", round)
    if backend == "torch":
        return _torch_request(
            tables, _pages_of_blocks(tables, lists, counts, page_tables, pages_per_block), round
        )
    return _launch_request(tables, lists, counts, page_tables, pages_per_block, round)


def find_block_slots(
    tables: ResidencyTables,
    lists: Tensor,
    counts: Tensor,
    page_tables: Tensor,
    kv_heads: int,
    pages_per_block: int,
    backend: str = "torch",
    absent: int = -1,
) -> tuple[Tensor, Tensor]:
    """The slots of the pages of listed blocks; changes nothing. The arguments are those of request_blocks.

    Returns slots [rows, sequences, kv_heads, width * pages_per_block] int32, `absent` for what is not hot, and late
    [rows] int32, how many listed pages are not hot, each as often as it is listed. Slots beyond a count say nothing.
    """
    check_backend("find_block_slots", backend, ("torch", "triton"))
    _check_blocks("find_block_slots", tables, lists, counts, page_tables, kv_heads, pages_per_block)
    if backend == "torch":
        pages = _pages_of_blocks(tables, lists, counts, page_tables, pages_per_block)
        row = torch.arange(tables.rows, device=lists.device)[:, None, None, None]
        slots = tables.slot_of[row, pages.clamp(min=0).long()].masked_fill(pages < 0, -1)
        late = ((pages >= 0) & (slots < 0)).sum((1, 2, 3), dtype=torch.int32)
        return slots.masked_fill(slots < 0, absent), late
    return _launch_find(tables, lists, counts, page_tables, pages_per_block, absent)


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
    if pages.numel():
        _pin_kernel[(tables.rows,)](
            pages.contiguous(),
            frames.contiguous(),
            round,
            tables.slot_of,
            tables.page_in,
            tables.referenced,
            tables.stamps,
            tables.dirty,
            tables.pages,
            tables.slots,
            kv_heads,
            len(pages),
            CHUNK=_LISTED,
            num_warps=_warps(_LISTED),
            **overlapping_launch(pages.device),
        )


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
    _launch_settle(tables, pages, kv_heads, False)


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
    _launch_settle(tables, pages, kv_heads, True)


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


def _torch_request(tables: ResidencyTables, pages: Tensor, round: Tensor) -> Transfers:
    """pages: [rows, sequences, kv_heads, n] int32, -1 where there is none."""
    pages = pages.flatten(1)
    rows = len(pages)
    transfers = Transfers(
        torch.empty_like(pages), torch.empty_like(pages), pages.new_empty(rows), pages.new_empty(rows)
    )
    for row in range(rows):
        _request_row(tables, row, pages[row][pages[row] >= 0], int(round), transfers)
    return transfers


def _request_row(
    tables: ResidencyTables,
    row: int,
    wanted: Tensor,
    now: int,
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
    victims = _advance_hand(tables, row, len(missing), now)
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


def _advance_hand(tables: ResidencyTables, row: int, wanted: int, now: int) -> list[int]:
    """Up to `wanted` victims, in the order in which the hand finds them; moves the hand and clears bits."""
    if not wanted:
        return []
    stamps, dirty, bits = (t[row].tolist() for t in (tables.stamps, tables.dirty, tables.referenced))
    hand = int(tables.hand[row])
    victims: dict[int, None] = {}  # in order; the second sweep finds them again, which changes nothing
    for _ in range(2 * tables.slots):
        if len(victims) == wanted:
            break
        if stamps[hand] < now and not dirty[hand]:
            if bits[hand]:
                bits[hand] = 0
            else:
                victims[hand] = None
        hand = (hand + 1) % tables.slots
    tables.referenced[row] = tables.referenced.new_tensor(bits)
    tables.hand[row] = hand
    return list(victims)


def _warps(chunk: int) -> int:
    """Few enough that no two threads hold the same number of a chunk: so what an atomic gave is theirs alone."""
    return max(1, min(4, chunk // 128))


def _launch_request(
    tables: ResidencyTables,
    lists: Tensor,
    counts: Tensor,
    page_tables: Tensor,
    pages_per_block: int,
    round: Tensor,
) -> Transfers:
    rows, sequences, kv_heads, width = lists.shape
    device, listed = lists.device, width * pages_per_block
    parts = max(1, min(_PARTS, -(-listed // _LISTED)))
    stretch = -(-listed // parts)
    items = sequences * kv_heads * parts
    joiners, chunks = -(-items // _JOINED), -(-tables.slots // _SWEPT)
    sweepers = min(_SWEEPERS, chunks)

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    transfers = Transfers(new(rows, items * stretch), new(rows, items * stretch), new(rows), new(rows))
    if not items * stretch:
        transfers.counts.zero_()
        transfers.unplaced.zero_()
        return transfers
    firsts, claimed, tallies, begun = new(rows, items), new(rows, items), new(rows, 2, chunks), new(rows)
    claims = transfers.slots  # until the slots are known
    overlap = overlapping_launch(device)
    _launch_clear(firsts)
    _claim_kernel[(items, rows)](
        lists.contiguous(),
        counts.contiguous(),
        page_tables.contiguous(),
        round,
        tables.slot_of,
        tables.referenced,
        tables.stamps,
        tables.hand,
        begun,
        claims,
        claimed,
        firsts,
        tables.pages,
        tables.slots,
        kv_heads,
        width,
        page_tables.shape[1],
        parts,
        stretch,
        PER_BLOCK=pages_per_block,
        CHUNK=_LISTED,
        num_warps=_warps(_LISTED),
        **overlap,
    )
    _survey_kernel[(joiners + sweepers, rows)](
        claims,
        claimed,
        firsts,
        round,
        begun,
        tables.slot_of,
        tables.referenced,
        tables.stamps,
        tables.dirty,
        transfers.pages,
        tallies,
        tables.pages,
        tables.slots,
        joiners,
        chunks,
        items,
        stretch,
        ITEMS=power_of_two(items),
        JOINED=_JOINED,
        CLAIMS=_CLAIMS,
        CHUNK=_SWEPT,
        num_warps=_warps(_SWEPT),
        **overlap,
    )
    _place_kernel[(sweepers, rows)](
        firsts,
        round,
        begun,
        tallies,
        tables.slot_of,
        tables.page_in,
        tables.referenced,
        tables.stamps,
        tables.dirty,
        tables.hand,
        transfers.pages,
        transfers.slots,
        transfers.counts,
        transfers.unplaced,
        tables.pages,
        tables.slots,
        chunks,
        items,
        stretch,
        ITEMS=power_of_two(items),
        CHUNKS=power_of_two(chunks),
        CHUNK=_SWEPT,
        num_warps=_warps(_SWEPT),
        **overlap,
    )
    return transfers


def _launch_find(
    tables: ResidencyTables,
    lists: Tensor,
    counts: Tensor,
    page_tables: Tensor,
    pages_per_block: int,
    absent: int,
) -> tuple[Tensor, Tensor]:
    rows, sequences, kv_heads, width = lists.shape
    listed = width * pages_per_block
    slots = lists.new_empty(rows, sequences, kv_heads, listed)
    late = lists.new_empty(rows)
    _launch_clear(late)
    if slots.numel():
        _find_kernel[(-(-listed // _FOUND), sequences * kv_heads, rows)](
            lists.contiguous(),
            counts.contiguous(),
            page_tables.contiguous(),
            tables.slot_of,
            slots,
            late,
            tables.pages,
            kv_heads,
            width,
            page_tables.shape[1],
            absent,
            PER_BLOCK=pages_per_block,
            CHUNK=_FOUND,
            num_warps=_warps(_FOUND),
            **overlapping_launch(lists.device),
        )
    return slots, late


def _launch_settle(tables: ResidencyTables, pages: Tensor, kv_heads: int, drop: bool) -> None:
    if pages.numel():
        _settle_kernel[(-(-len(pages) * kv_heads // _LISTED), tables.rows)](
            pages.contiguous(),
            tables.slot_of,
            tables.page_in,
            tables.referenced,
            tables.dirty,
            tables.pages,
            tables.slots,
            kv_heads,
            len(pages),
            DROP=drop,
            CHUNK=_LISTED,
            num_warps=_warps(_LISTED),
            **overlapping_launch(pages.device),
        )


def _launch_clear(numbers: Tensor) -> None:
    """numbers: int32."""
    count = numbers.numel()
    overlap = overlapping_launch(numbers.device)
    _clear_kernel[(-(-count // _CLEARED),)](numbers, count, CHUNK=_CLEARED, **overlap)


@jit
def _clear_kernel(numbers_ptr, count, CHUNK: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    place = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    tl.store(numbers_ptr + place, tl.zeros([CHUNK], tl.int32), mask=place < count)


@jit
def _pages_at(
    list_ptr, page_table_ptr, place, inside, pages, head, kv_heads, max_pages, PER_BLOCK: tl.constexpr
):
    """The head's pages at `place` among all that a list names, and which of them there are."""
    block = tl.load(list_ptr + place // PER_BLOCK, mask=inside, other=-1)
    known = (block >= 0) & (block < (max_pages + PER_BLOCK - 1) // PER_BLOCK)
    logical = block * PER_BLOCK + place % PER_BLOCK
    page = tl.load(page_table_ptr + logical, mask=known & (logical < max_pages), other=-1)
    return page * kv_heads + head, (page >= 0) & (page < pages // kv_heads)


@jit
def _claim_kernel(
    lists_ptr,
    counts_ptr,
    page_tables_ptr,
    round_ptr,
    slot_of_ptr,
    referenced_ptr,
    stamps_ptr,
    hand_ptr,
    begun_ptr,
    claims_ptr,
    claimed_ptr,
    firsts_ptr,
    pages,
    slots,
    kv_heads,
    width,
    max_pages,
    parts,
    stretch,
    PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of one list: what is hot is touched, what is not is claimed. Which is which does not change meanwhile.

    A claim lies at item * stretch + its order in claims [rows, items * stretch]. That place, as a number below -1 that
    rises with it, goes to slot_of, where the minimum stays: the first claim, whatever the order of threads.
    claimed: [rows, items], a part's claims; firsts: [rows, items], how many of them are first: one that comes to be is
    counted, one that is so no more is taken off.
    """
    follow(PDL)
    item = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    items = tl.num_programs(0)
    listing = item // parts
    head = listing % kv_heads
    at = row * (items // parts) + listing
    total = tl.maximum(tl.minimum(tl.load(counts_ptr + at), width), 0) * PER_BLOCK
    share = (total + parts - 1) // parts
    begin = item % parts * share
    end = tl.minimum(begin + share, total)
    lists_ptr += at * width
    page_tables_ptr += (listing // kv_heads).to(tl.int64) * max_pages
    slot_of_ptr += row * pages
    firsts_ptr += row * items
    claims_ptr += row * items * stretch
    now = tl.load(round_ptr)
    zero = total * 0
    claimed = zero
    won = zero
    for start in tl.range(begin, end, CHUNK):
        place = start + tl.arange(0, CHUNK)
        page, listed = _pages_at(
            lists_ptr, page_tables_ptr, place, place < end, pages, head, kv_heads, max_pages, PER_BLOCK
        )
        slot = tl.load(slot_of_ptr + page, mask=listed, other=-1)
        hot = slot >= 0
        tl.store(stamps_ptr + row * slots + slot, now, mask=hot)
        tl.store(referenced_ptr + row * slots + slot, 1, mask=hot)
        cold = (listed & (slot < 0)).to(tl.int32)
        found = tl.sum(cold, 0)
        if found > 0:
            claim = item * stretch + claimed + tl.cumsum(cold, 0) - cold
            tl.store(claims_ptr + claim, page, mask=cold != 0)
            key = claim - items * stretch - 1
            before = tl.atomic_min(slot_of_ptr + page, key, mask=cold != 0, sem="relaxed")
            first = (cold != 0) & (key < before)
            beaten = (before + items * stretch + 1) // stretch
            tl.atomic_add(firsts_ptr + beaten, -1, mask=first & (before < -1), sem="relaxed")
            won += tl.sum(first.to(tl.int32), 0)
            claimed += found
    tl.store(claimed_ptr + row * items + item, claimed)
    if won > 0:
        tl.atomic_add(firsts_ptr + item, won, sem="relaxed")
    if item == 0:
        tl.store(begun_ptr + row, tl.load(hand_ptr + row))


@jit
def _loose_slots(
    round_ptr,
    begun_ptr,
    referenced_ptr,
    stamps_ptr,
    dirty_ptr,
    row,
    chunk,
    slots,
    CHUNK: tl.constexpr,
):
    """The slots of a chunk in the order of the hand, and what it may take: at once, and if it comes again."""
    now = tl.load(round_ptr)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    there = place < slots
    slot = tl.load(begun_ptr + row) + place
    slot = tl.where(slot >= slots, slot - slots, slot)
    stamp = tl.load(stamps_ptr + row * slots + slot, mask=there, other=0)
    unsaved = tl.load(dirty_ptr + row * slots + slot, mask=there, other=1)
    bit = tl.load(referenced_ptr + row * slots + slot, mask=there, other=0)
    loose = there & (stamp < now) & (unsaved == 0)
    return slot, (loose & (bit == 0)).to(tl.int32), (loose & (bit != 0)).to(tl.int32)


@jit
def _survey_kernel(
    claims_ptr,
    claimed_ptr,
    firsts_ptr,
    round_ptr,
    begun_ptr,
    slot_of_ptr,
    referenced_ptr,
    stamps_ptr,
    dirty_ptr,
    missing_ptr,
    tallies_ptr,
    pages,
    slots,
    joiners,
    chunks,
    items,
    stretch,
    ITEMS: tl.constexpr,
    JOINED: tl.constexpr,
    CLAIMS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some programs write the first claims of JOINED items behind those of the items before: the missing pages.

    The others count what the hand may take of a chunk; tallies: [rows, 2, chunks], at once, and if it comes again.
    """
    follow(PDL)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    each = tl.arange(0, ITEMS)
    won = tl.load(firsts_ptr + row * items + each, mask=each < items, other=0)
    if tl.sum(won, 0) > 0:
        if part < joiners:
            one = part * JOINED + tl.arange(0, JOINED)
            own = tl.load(firsts_ptr + row * items + one, mask=one < items, other=0)
            claimed = tl.load(claimed_ptr + row * items + one, mask=own > 0, other=0)
            at = tl.sum(tl.where(each < part * JOINED, won, 0), 0) + tl.cumsum(own, 0) - own
            for start in tl.range(0, tl.max(claimed, 0), CLAIMS):
                place = start + tl.arange(0, CLAIMS)
                inside = place[None, :] < claimed[:, None]
                claim = one[:, None] * stretch + place[None, :]
                page = tl.load(claims_ptr + row * items * stretch + claim, mask=inside, other=0)
                key = tl.load(slot_of_ptr + row * pages + page, mask=inside, other=0)
                first = (inside & (key == claim - items * stretch - 1)).to(tl.int32)
                order = at[:, None] + tl.cumsum(first, 1) - first
                tl.store(missing_ptr + row * items * stretch + order, page, mask=first != 0)
                at += tl.sum(first, 1)
        else:
            for chunk in tl.range(part - joiners, chunks, tl.num_programs(0) - joiners):
                _slot, ready, later = _loose_slots(
                    round_ptr,
                    begun_ptr,
                    referenced_ptr,
                    stamps_ptr,
                    dirty_ptr,
                    row,
                    chunk,
                    slots,
                    CHUNK,
                )
                tl.store(tallies_ptr + row * 2 * chunks + chunk, tl.sum(ready, 0))
                tl.store(tallies_ptr + (row * 2 + 1) * chunks + chunk, tl.sum(later, 0))


@jit
def _place_kernel(
    firsts_ptr,
    round_ptr,
    begun_ptr,
    tallies_ptr,
    slot_of_ptr,
    page_in_ptr,
    referenced_ptr,
    stamps_ptr,
    dirty_ptr,
    hand_ptr,
    missing_ptr,
    taken_ptr,
    placed_ptr,
    unplaced_ptr,
    pages,
    slots,
    chunks,
    items,
    stretch,
    ITEMS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some chunks of a row's slots: which victim each is, of the first sweep or the second, and whose page it gets.

    The hand comes to a slot in the first sweep if there are fewer victims before it than pages are missing.
    """
    follow(PDL)
    sweeper = tl.program_id(0)
    sweepers = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    each = tl.arange(0, ITEMS)
    missing = tl.sum(tl.load(firsts_ptr + row * items + each, mask=each < items, other=0), 0)
    slot_of_ptr += row * pages
    missing_ptr += row * items * stretch
    placed = missing * 0
    if missing > 0:
        one = tl.arange(0, CHUNKS)
        ready_of = tl.load(tallies_ptr + row * 2 * chunks + one, mask=one < chunks, other=0)
        later_of = tl.load(tallies_ptr + (row * 2 + 1) * chunks + one, mask=one < chunks, other=0)
        first_sweep = tl.sum(ready_of, 0)
        placed = tl.minimum(missing, first_sweep + tl.sum(later_of, 0))
        chunk = sweeper
        ready_before = tl.sum(tl.where(one < chunk, ready_of, 0), 0)
        while (chunk < chunks) & (ready_before < missing):
            slot, ready, later = _loose_slots(
                round_ptr,
                begun_ptr,
                referenced_ptr,
                stamps_ptr,
                dirty_ptr,
                row,
                chunk,
                slots,
                CHUNK,
            )
            before = ready_before + tl.cumsum(ready, 0) - ready
            later_before = tl.sum(tl.where(one < chunk, later_of, 0), 0) + tl.cumsum(later, 0) - later
            order = tl.where(ready != 0, before, tl.where(later != 0, first_sweep + later_before, missing))
            taken = order < missing
            page = tl.load(missing_ptr + order, mask=taken, other=0)
            old = tl.load(page_in_ptr + row * slots + slot, mask=taken, other=-1)
            tl.debug_barrier()  # where a thread of another warp holds the same slots, it has read them now
            tl.store(referenced_ptr + row * slots + slot, 0, mask=(later != 0) & (before < missing))
            tl.store(slot_of_ptr + old, -1, mask=old >= 0)
            tl.store(slot_of_ptr + page, slot, mask=taken)
            tl.store(page_in_ptr + row * slots + slot, page, mask=taken)
            tl.store(stamps_ptr + row * slots + slot, tl.load(round_ptr), mask=taken)
            tl.store(taken_ptr + row * items * stretch + order, slot, mask=taken)
            behind = tl.where(slot + 1 == slots, 0, slot + 1)
            tl.store(hand_ptr + row + order * 0, behind, mask=order == missing - 1)
            chunk += sweepers
            ready_before = tl.sum(tl.where(one < chunk, ready_of, 0), 0)
        # Claims that got nothing are taken back.
        for start in tl.range(placed + sweeper * CHUNK, missing, sweepers * CHUNK):
            place = start + tl.arange(0, CHUNK)
            page = tl.load(missing_ptr + place, mask=place < missing, other=0)
            tl.store(slot_of_ptr + page, -1, mask=place < missing)
    if sweeper == 0:
        tl.store(placed_ptr + row, placed)
        tl.store(unplaced_ptr + row, missing - placed)


@jit
def _find_kernel(
    lists_ptr,
    counts_ptr,
    page_tables_ptr,
    slot_of_ptr,
    slots_ptr,
    late_ptr,
    pages,
    kv_heads,
    width,
    max_pages,
    absent,
    PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A chunk of one list; late has been cleared."""
    follow(PDL)
    listing = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    at = row * tl.num_programs(1) + listing
    head = listing % kv_heads
    count = tl.minimum(tl.load(counts_ptr + at), width) * PER_BLOCK
    place = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    if tl.program_id(0) * CHUNK < count:
        page_tables_ptr += (listing // kv_heads).to(tl.int64) * max_pages
        page, listed = _pages_at(
            lists_ptr + at * width,
            page_tables_ptr,
            place,
            place < count,
            pages,
            head,
            kv_heads,
            max_pages,
            PER_BLOCK,
        )
        slot = tl.load(slot_of_ptr + row * pages + page, mask=listed, other=-1)
        late = tl.sum((listed & (slot < 0)).to(tl.int32), 0)
        if late > 0:
            tl.atomic_add(late_ptr + row, late, sem="relaxed")
        slot = tl.where(slot < 0, absent, slot)
        tl.store(slots_ptr + at * (width * PER_BLOCK) + place, slot, mask=place < count)


@jit
def _heads_at(pages_ptr, place, count, end, kv_heads):
    """Of pages or frames, every head's at `place`, -1 where there is none below `end`."""
    page = tl.load(pages_ptr + place // kv_heads, mask=place < count * kv_heads, other=-1)
    return tl.where((page >= 0) & (page < end // kv_heads), page * kv_heads + place % kv_heads, -1)


@jit
def _pin_kernel(
    pages_ptr,
    frames_ptr,
    round_ptr,
    slot_of_ptr,
    page_in_ptr,
    referenced_ptr,
    stamps_ptr,
    dirty_ptr,
    pages,
    slots,
    kv_heads,
    count,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row. All is forgotten that lies in the frames, and where pages lie; only then anything is placed.

    What is read and forgotten at the same time is placed anew in any case: reads may find it or not.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot_of_ptr += row * pages
    page_in_ptr += row * slots
    referenced_ptr += row * slots
    stamps_ptr += row * slots
    dirty_ptr += row * slots
    now = tl.load(round_ptr)
    for start in tl.range(0, count * kv_heads, CHUNK):
        place = start + tl.arange(0, CHUNK)
        page, slot, listed = _pinned_at(pages_ptr, frames_ptr, place, count, pages, slots, kv_heads)
        former = tl.load(slot_of_ptr + page, mask=listed, other=-1)
        other = tl.load(page_in_ptr + slot, mask=listed, other=-1)
        tl.store(slot_of_ptr + other, -1, mask=other >= 0)
        tl.store(page_in_ptr + former, -1, mask=former >= 0)
        tl.store(referenced_ptr + former, 0, mask=former >= 0)
        tl.store(dirty_ptr + former, 0, mask=former >= 0)
    tl.debug_barrier()
    for start in tl.range(0, count * kv_heads, CHUNK):
        place = start + tl.arange(0, CHUNK)
        page, slot, listed = _pinned_at(pages_ptr, frames_ptr, place, count, pages, slots, kv_heads)
        tl.store(slot_of_ptr + page, slot, mask=listed)
        tl.store(page_in_ptr + slot, page, mask=listed)
        tl.store(referenced_ptr + slot, 0, mask=listed)
        tl.store(stamps_ptr + slot, now, mask=listed)
        tl.store(dirty_ptr + slot, 1, mask=listed)


@jit
def _pinned_at(pages_ptr, frames_ptr, place, count, pages, slots, kv_heads):
    """Every head's page and slot; and whether they are to be pinned."""
    page = _heads_at(pages_ptr, place, count, pages, kv_heads)
    slot = _heads_at(frames_ptr, place, count, slots, kv_heads)
    return page, slot, (page >= 0) & (slot >= 0)


@jit
def _settle_kernel(
    pages_ptr,
    slot_of_ptr,
    page_in_ptr,
    referenced_ptr,
    dirty_ptr,
    pages,
    slots,
    kv_heads,
    count,
    DROP: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Slots are clean, or with DROP free. A page listed twice is found as it was or as it will be."""
    follow(PDL)
    row = tl.program_id(1).to(tl.int64)
    page = _heads_at(pages_ptr, tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), count, pages, kv_heads)
    slot = tl.load(slot_of_ptr + row * pages + page, mask=page >= 0, other=-1)
    hot = slot >= 0
    tl.store(dirty_ptr + row * slots + slot, 0, mask=hot)
    if DROP:
        tl.store(referenced_ptr + row * slots + slot, 0, mask=hot)
        tl.store(page_in_ptr + row * slots + slot, -1, mask=hot)
        tl.store(slot_of_ptr + row * pages + page, -1, mask=hot)
