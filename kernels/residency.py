"""Which KV pages are hot: tables of the GPU's slots, and the clock that decides whose slot a page gets.

Every page (16 tokens of one KV head of one layer) has a home in pinned host memory; a row = (layer, KV head) has a
fixed number of slots on the GPU. The clock is the one of Multics (Corbató, "A Paging Experiment with the Multics
System", MIT Project MAC, 1968), also called second chance. What it does is defined slot by slot, and Triton does
exactly that in chunks: within a sweep a slot's fate depends on its own state and on how many victims lie before it,
which is a running sum. Sizes of chunks change nothing.

- The hand looks at slots in turn. A slot that a round in flight needs, or that is dirty, is passed over untouched. A
  set bit is cleared and the slot passed over. Any other slot, free or not, is the next victim.
- It stops behind the last victim that is needed, else after two sweeps: then all bits it could clear are cleared.
- A page gets its bit when it is wanted while hot, not when it is placed: pages wanted only once go first.

All operations are kernels without a host round trip: they may be captured in a CUDA graph. Calls on one set of tables
must follow each other (one stream). Listed pages outside of the table (say, -1) are as if not listed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, power_of_two, tl

_LISTED = 2048  # listed pages that a program takes at once
_SWEPT = 1024  # slots that the hand passes at once
_WARPS = 8


@dataclass(frozen=True)
class ResidencyTables:
    """Rows are layers * KV heads. All on one device, contiguous; operations change them in place.

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
    """What is to be copied from home into slots, and what found no slot; width = groups * the lists' width.

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


def request_pages(
    tables: ResidencyTables,
    lists: Tensor,
    counts: Tensor,
    round: Tensor,
    oldest: Tensor,
    backend: str = "torch",
) -> Transfers:
    """Make the listed pages hot for `round`, as far as there are slots; returns what must be copied for that.

    lists: [groups, rows, width] int32, pages that each sequence (group) needs, in any order, repeated or not
    counts: [groups, rows] int32, at most `width`
    round: [1] int32, not below that of any call before; oldest: [1] int32, the oldest round still in flight. What
        `oldest` and later rounds need is no victim; `round` counts as in flight even if `oldest` is above it.

    Hot pages get stamp and bit, before any victim is chosen. The others are placed in the order of groups and of
    lists: first wanted, first placed. What finds no slot is counted once for each page, and stays at home. All pages
    that are not hot must be at home: what was never written is "copied" too.
    """
    check_backend("request_pages", backend, ("torch", "triton"))
    _check_lists("request_pages", tables, lists, counts)
    _check_rounds("request_pages", tables, round, oldest)
    return _place(tables, lists, counts, round, oldest, False, backend)


def place_new(
    tables: ResidencyTables,
    pages: Tensor,
    counts: Tensor,
    round: Tensor,
    oldest: Tensor,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Give pages that `round` is about to write a slot by the same clock; they are dirty.

    A page that is hot already keeps its slot, and is dirty again: so pages are filled over several rounds. One that is
    only at home and not to be overwritten altogether must be requested before.

    pages: [rows, width] int32; counts: [rows] int32; round, oldest: as for request_pages
    Returns slots [rows, width] int32, -1 where there is none and beyond `counts`, and unplaced [rows] int32, how many
    pages have none.
    """
    check_backend("place_new", backend, ("torch", "triton"))
    _check_pages("place_new", tables, pages, counts)
    _check_rounds("place_new", tables, round, oldest)
    placed = _place(tables, pages[None], counts[None], round, oldest, True, backend)
    slots, _ = find_slots(tables, pages[None], counts[None], backend)
    return slots[0], placed.unplaced


def mark_home(tables: ResidencyTables, pages: Tensor, counts: Tensor, backend: str = "torch") -> None:
    """These pages have been copied home: they are not dirty any more. Those that are not hot are passed over.

    pages: [rows, width] int32; counts: [rows] int32. What was written or freed after the copy began must not be listed.
    """
    check_backend("mark_home", backend, ("torch", "triton"))
    _check_pages("mark_home", tables, pages, counts)
    if backend == "torch":
        row, page = _listed(tables, pages[None], counts[None])
        slot = tables.slot_of[row, page].long()
        tables.dirty[row[slot >= 0], slot[slot >= 0]] = 0
        return
    _launch_settle(tables, pages, counts, False)


def drop_pages(tables: ResidencyTables, pages: Tensor, counts: Tensor, backend: str = "torch") -> None:
    """Forget pages that were freed, dirty or not: their slots are free, without bit. Those not hot are passed over.

    The slots keep their stamps: a round in flight may still read them, or a copy into them be on its way, so they are
    taken only when that round has ended.

    pages: [rows, width] int32; counts: [rows] int32
    """
    check_backend("drop_pages", backend, ("torch", "triton"))
    _check_pages("drop_pages", tables, pages, counts)
    if backend == "torch":
        row, page = _listed(tables, pages[None], counts[None])
        slot = tables.slot_of[row, page].long()
        row, page, slot = row[slot >= 0], page[slot >= 0], slot[slot >= 0]
        tables.slot_of[row, page] = -1
        tables.page_in[row, slot] = -1
        tables.referenced[row, slot] = 0
        tables.dirty[row, slot] = 0
        return
    _launch_settle(tables, pages, counts, True)


def find_slots(
    tables: ResidencyTables, lists: Tensor, counts: Tensor, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """The slots of listed pages; changes nothing.

    lists: [groups, rows, width] int32; counts: [groups, rows] int32
    Returns slots [groups, rows, width] int32, -1 for what is not hot and beyond `counts`, and late [groups, rows]
    int32, how many listed pages are not hot.
    """
    check_backend("find_slots", backend, ("torch", "triton"))
    _check_lists("find_slots", tables, lists, counts)
    if backend == "torch":
        listed = _is_listed(tables, lists, counts)
        row = torch.arange(tables.rows, device=lists.device)[:, None]
        slots = tables.slot_of[row, lists.where(listed, 0).long()].masked_fill(~listed, -1)
        return slots, (listed & (slots < 0)).sum(2, dtype=torch.int32)
    lists, counts = lists.contiguous(), counts.contiguous()
    groups, rows, width = lists.shape
    slots, late = torch.empty_like(lists), torch.empty_like(counts)
    if groups:
        chunk = min(_LISTED, power_of_two(width))
        _find_kernel[(groups * rows,)](
            lists, counts, tables.slot_of, slots, late, rows, tables.pages, width, CHUNK=chunk
        )
    return slots, late


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


def _check_lists(operation: str, tables: ResidencyTables, lists: Tensor, counts: Tensor) -> None:
    if lists.dim() != 3:
        raise ValueError(f"{operation}: lists are [groups, rows, width], not {tuple(lists.shape)}")
    groups, _, width = lists.shape
    device = tables.page_in.device
    _check(operation, "lists", lists, (groups, tables.rows, width), torch.int32, device)
    _check(operation, "counts", counts, (groups, tables.rows), torch.int32, device)


def _check_pages(operation: str, tables: ResidencyTables, pages: Tensor, counts: Tensor) -> None:
    if pages.dim() != 2:
        raise ValueError(f"{operation}: pages are [rows, width], not {tuple(pages.shape)}")
    device = tables.page_in.device
    _check(operation, "pages", pages, (tables.rows, pages.shape[1]), torch.int32, device)
    _check(operation, "counts", counts, (tables.rows,), torch.int32, device)


def _check_rounds(operation: str, tables: ResidencyTables, round: Tensor, oldest: Tensor) -> None:
    _check(operation, "round", round, (1,), torch.int32, tables.page_in.device)
    _check(operation, "oldest", oldest, (1,), torch.int32, tables.page_in.device)


def _is_listed(tables: ResidencyTables, lists: Tensor, counts: Tensor) -> Tensor:
    """[groups, rows, width] bool: which entries name a page."""
    within = torch.arange(lists.shape[2], device=lists.device) < counts[..., None]
    return within & (lists >= 0) & (lists < tables.pages)


def _listed(tables: ResidencyTables, lists: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and pages of all entries, [n] int64 each, by group, row and place."""
    listed = _is_listed(tables, lists, counts)
    return listed.nonzero()[:, 1], lists[listed].long()


def _place(
    tables: ResidencyTables,
    lists: Tensor,
    counts: Tensor,
    round: Tensor,
    oldest: Tensor,
    new: bool,
    backend: str,
) -> Transfers:
    """request_pages; with `new`, all listed pages that have a slot are dirty afterwards."""
    groups, rows, width = lists.shape
    empty = [lists.new_empty(*shape) for shape in ((rows, groups * width),) * 2 + ((rows,),) * 2]
    transfers = Transfers(*empty)
    if backend == "torch":
        pinned_from = min(int(round), int(oldest))
        listed = _is_listed(tables, lists, counts)
        for row in range(rows):
            _place_row(tables, row, lists[:, row][listed[:, row]], int(round), pinned_from, new, transfers)
        return transfers
    _place_kernel[(rows,)](
        lists.contiguous(),
        counts.contiguous(),
        round,
        oldest,
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
        width,
        groups,
        GROUPS=power_of_two(groups),
        NEW=new,
        LISTED=min(_LISTED, power_of_two(groups * width)),
        SWEPT=min(_SWEPT, power_of_two(tables.slots)),
        num_warps=_WARPS,
    )
    return transfers


def _place_row(
    tables: ResidencyTables,
    row: int,
    wanted: Tensor,
    now: int,
    pinned_from: int,
    new: bool,
    transfers: Transfers,
) -> None:
    """One row of the reference; wanted: [n] int32, pages in order."""
    pages = list(dict.fromkeys(wanted.tolist()))
    slots = [int(tables.slot_of[row, page]) for page in pages]
    for slot in slots:
        if slot >= 0:
            tables.referenced[row, slot] = 1
            tables.stamps[row, slot] = now
            tables.dirty[row, slot] |= int(new)
    missing = [page for page, slot in zip(pages, slots, strict=True) if slot < 0]
    victims = _advance_hand(tables, row, len(missing), pinned_from)
    for i, (page, slot) in enumerate(zip(missing, victims, strict=False)):
        old = int(tables.page_in[row, slot])
        if old >= 0:
            tables.slot_of[row, old] = -1
        tables.slot_of[row, page] = slot
        tables.page_in[row, slot] = page
        tables.stamps[row, slot] = now
        tables.dirty[row, slot] = int(new)
        transfers.slots[row, i] = slot
    transfers.pages[row, : len(missing)] = wanted.new_tensor(missing)
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


def _launch_settle(tables: ResidencyTables, pages: Tensor, counts: Tensor, drop: bool) -> None:
    width = pages.shape[1]
    _settle_kernel[(tables.rows,)](
        pages.contiguous(),
        counts.contiguous(),
        tables.slot_of,
        tables.page_in,
        tables.referenced,
        tables.dirty,
        tables.pages,
        tables.slots,
        width,
        DROP=drop,
        CHUNK=min(_LISTED, power_of_two(width)),
    )


@jit
def _entries(lists_ptr, row, rows, width, pages, wanted, ends, place):
    """The pages at `place` in the lists of one row's groups, strung together, and which of them there are."""
    behind = place[:, None] >= ends[None, :]
    group = tl.sum(behind.to(tl.int32), 1)
    first = tl.sum(tl.where(behind, wanted[None, :], 0), 1)  # the place of the group's first entry
    there = place < tl.max(ends, 0)
    at = (group.to(tl.int64) * rows + row) * width + place - first
    page = tl.load(lists_ptr + at, mask=there, other=-1)
    return page, there & (page >= 0) & (page < pages)


@jit
def _place_kernel(
    lists_ptr,
    counts_ptr,
    round_ptr,
    oldest_ptr,
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
    width,
    groups,
    GROUPS: tl.constexpr,
    NEW: tl.constexpr,
    LISTED: tl.constexpr,
    SWEPT: tl.constexpr,
):
    """One program a row. Barriers stand between stores and the loads, by other threads, of what was stored.

    A page that is not hot is claimed in slot_of by a number below -1 that rises with the place in the lists: the
    minimum is the first that wants it, whatever the order of threads.
    """
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    slot_of_ptr += row * pages
    page_in_ptr += row * slots
    referenced_ptr += row * slots
    stamps_ptr += row * slots
    dirty_ptr += row * slots
    missing_ptr += row * groups * width
    taken_ptr += row * groups * width
    group = tl.arange(0, GROUPS)
    wanted = tl.load(counts_ptr + group * rows + row, mask=group < groups, other=0)
    wanted = tl.maximum(tl.minimum(wanted, width), 0)
    ends = tl.cumsum(wanted, 0)
    total = tl.sum(wanted, 0)
    zero = total * 0
    now = tl.load(round_ptr)
    pinned_from = tl.minimum(tl.load(oldest_ptr), now)
    hand = tl.load(hand_ptr + row)
    # What is hot is touched, what is not is claimed.
    claims = zero
    for start in tl.range(0, total, LISTED):
        place = start + tl.arange(0, LISTED)
        page, listed = _entries(lists_ptr, row, rows, width, pages, wanted, ends, place)
        slot = tl.load(slot_of_ptr + page, mask=listed, other=0)
        hot = listed & (slot >= 0)
        tl.store(stamps_ptr + slot, now, mask=hot)
        tl.store(referenced_ptr + slot, 1, mask=hot)
        if NEW:
            tl.store(dirty_ptr + slot, 1, mask=hot)
        cold = listed & (slot < 0)
        tl.atomic_min(slot_of_ptr + page, place - total - 1, mask=cold, sem="relaxed")
        claims += tl.sum(cold.to(tl.int32), 0)
    tl.debug_barrier()
    # Who claimed first stays, in order.
    missing = zero
    for start in tl.range(0, tl.where(claims > 0, total, 0), LISTED):
        place = start + tl.arange(0, LISTED)
        page, listed = _entries(lists_ptr, row, rows, width, pages, wanted, ends, place)
        slot = tl.load(slot_of_ptr + page, mask=listed, other=0)
        first = (listed & (slot == place - total - 1)).to(tl.int32)
        tl.store(missing_ptr + missing + tl.cumsum(first, 0) - first, page, mask=first != 0)
        missing += tl.sum(first, 0)
    # The hand goes round, at most twice; no chunk reaches into the next sweep.
    placed = zero
    passed = zero
    lane = tl.arange(0, SWEPT)
    while (placed < missing) & (passed < 2 * slots):
        tl.debug_barrier()
        there = lane < slots - passed % slots
        slot = (hand + passed + lane) % slots
        stamp = tl.load(stamps_ptr + slot, mask=there, other=0)
        unsaved = tl.load(dirty_ptr + slot, mask=there, other=1)
        bit = tl.load(referenced_ptr + slot, mask=there, other=0)
        old = tl.load(page_in_ptr + slot, mask=there, other=-1)
        loose = there & (stamp < pinned_from) & (unsaved == 0)
        victim = (loose & (bit == 0)).to(tl.int32)
        order = placed + tl.cumsum(victim, 0) - victim
        reached = there & (order < missing)
        taken = reached & (victim != 0)
        page = tl.load(missing_ptr + order, mask=taken, other=0)
        tl.debug_barrier()  # where a thread of another warp holds the same slots, it has read them now
        tl.store(referenced_ptr + slot, 0, mask=reached & loose)
        tl.store(slot_of_ptr + old, -1, mask=taken & (old >= 0))
        tl.store(slot_of_ptr + page, slot, mask=taken)
        tl.store(page_in_ptr + slot, page, mask=taken)
        tl.store(stamps_ptr + slot, now, mask=taken)
        if NEW:
            tl.store(dirty_ptr + slot, 1, mask=taken)
        tl.store(taken_ptr + order, slot, mask=taken)
        placed += tl.sum(taken.to(tl.int32), 0)
        passed += tl.sum(reached.to(tl.int32), 0)
    # Claims that got nothing are taken back.
    for start in tl.range(placed, missing, LISTED):
        place = start + tl.arange(0, LISTED)
        page = tl.load(missing_ptr + place, mask=place < missing, other=0)
        tl.store(slot_of_ptr + page, -1, mask=place < missing)
    tl.store(hand_ptr + row, (hand + passed) % slots)
    tl.store(placed_ptr + row, placed)
    tl.store(unplaced_ptr + row, missing - placed)


@jit
def _settle_kernel(
    pages_ptr,
    counts_ptr,
    slot_of_ptr,
    page_in_ptr,
    referenced_ptr,
    dirty_ptr,
    pages,
    slots,
    width,
    DROP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row: slots are clean, or with DROP free. A page listed twice is found as it was or as it will be."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.minimum(tl.load(counts_ptr + row), width)
    slot_of_ptr += row * pages
    for start in tl.range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        page = tl.load(pages_ptr + row * width + place, mask=place < count, other=-1)
        listed = (page >= 0) & (page < pages)
        slot = tl.load(slot_of_ptr + page, mask=listed, other=-1)
        hot = listed & (slot >= 0)
        tl.store(dirty_ptr + row * slots + slot, 0, mask=hot)
        if DROP:
            tl.store(referenced_ptr + row * slots + slot, 0, mask=hot)
            tl.store(page_in_ptr + row * slots + slot, -1, mask=hot)
            tl.store(slot_of_ptr + page, -1, mask=hot)


@jit
def _find_kernel(
    lists_ptr,
    counts_ptr,
    slot_of_ptr,
    slots_ptr,
    late_ptr,
    rows,
    pages,
    width,
    CHUNK: tl.constexpr,
):
    """One list: of one group and row."""
    item = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + item)
    slot_of_ptr += item % rows * pages
    late = count * 0
    for start in tl.range(0, width, CHUNK):
        place = start + tl.arange(0, CHUNK)
        at = item * width + place
        page = tl.load(lists_ptr + at, mask=(place < count) & (place < width), other=-1)
        listed = (page >= 0) & (page < pages)
        slot = tl.load(slot_of_ptr + page, mask=listed, other=-1)
        tl.store(slots_ptr + at, slot, mask=place < width)
        late += tl.sum((listed & (slot < 0)).to(tl.int32), 0)
    tl.store(late_ptr + item, late)
