"""The three kernels of a request: claims, the survey of missing pages and lines, and the placing."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backends import follow, jit, overlapping_launch, power_of_two, tl
from kernels.residency import sizes
from kernels.residency.clock import loose_lines
from kernels.residency.listed import clear_numbers, pages_at
from kernels.residency.sizes import warps_for
from kernels.residency.tables import ResidencyTables, Transfers


@dataclass(frozen=True)
class _Work:
    """What the kernels of one request leave for each other, and the sizes of their grids. All int32.

    firsts, claimed: [rows, items], of each part of a list its first claims, and all of its claims. tallies: [rows, 2,
    chunks], lines that the hand may take. begun: [rows], where the hand stood. stretch: claims of a part, at most.
    """

    firsts: Tensor
    claimed: Tensor
    tallies: Tensor
    begun: Tensor
    parts: int
    stretch: int
    joiners: int
    sweepers: int

    @property
    def items(self) -> int:
        return self.firsts.shape[1]

    @property
    def chunks(self) -> int:
        return self.tallies.shape[2]


def launch_request(
    tables: ResidencyTables, lists: Tensor, counts: Tensor, page_tables: Tensor, pages_per_block: int, round: Tensor
) -> Transfers:
    """request_blocks, by Triton; the arguments have been checked."""
    rows, sequences, kv_heads, width = lists.shape
    listed = width * pages_per_block
    parts = max(1, min(sizes.PARTS, -(-listed // sizes.LISTED)))
    stretch = -(-listed // parts)
    items = sequences * kv_heads * parts

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=lists.device)

    transfers = Transfers(new(rows, items * stretch), new(rows, items * stretch), new(rows), new(rows))
    if not items * stretch:
        transfers.counts.zero_()
        transfers.overflow.zero_()
        return transfers
    chunks = -(-tables.lines // sizes.SWEPT)
    work = _Work(
        firsts=new(rows, items),
        claimed=new(rows, items),
        tallies=new(rows, 2, chunks),
        begun=new(rows),
        parts=parts,
        stretch=stretch,
        joiners=-(-items // sizes.JOINED),
        sweepers=min(sizes.SWEEPERS, chunks),
    )
    clear_numbers(work.firsts)
    claims = transfers.lines  # until the lines are known
    _claim(tables, work, (lists, counts, page_tables), pages_per_block, round, claims)
    _survey(tables, work, round, claims, transfers.pages)
    _place(tables, work, round, transfers)
    return transfers


def _claim(
    tables: ResidencyTables,
    work: _Work,
    listed: tuple[Tensor, Tensor, Tensor],
    pages_per_block: int,
    round: Tensor,
    claims: Tensor,
) -> None:
    lists, counts, page_tables = listed
    _claim_kernel[(work.items, tables.rows)](
        *(lists.contiguous(), counts.contiguous(), page_tables.contiguous(), round),
        *(tables.line_of, tables.referenced, tables.stamps, tables.hand),
        *(work.begun, claims, work.claimed, work.firsts),
        *(tables.pages, tables.lines, lists.shape[2], lists.shape[3], page_tables.shape[1], work.parts, work.stretch),
        PER_BLOCK=pages_per_block,
        CHUNK=sizes.LISTED,
        num_warps=warps_for(sizes.LISTED),
        **overlapping_launch(lists.device),
    )


def _survey(tables: ResidencyTables, work: _Work, round: Tensor, claims: Tensor, missing: Tensor) -> None:
    _survey_kernel[(work.joiners + work.sweepers, tables.rows)](
        *(claims, work.claimed, work.firsts, round, work.begun),
        *(tables.line_of, tables.referenced, tables.stamps, tables.dirty, missing, work.tallies),
        *(tables.pages, tables.lines, work.joiners, work.chunks, work.items, work.stretch),
        ITEMS=power_of_two(work.items),
        JOINED=sizes.JOINED,
        CLAIMS=sizes.CLAIMS,
        CHUNK=sizes.SWEPT,
        num_warps=warps_for(sizes.SWEPT),
        **overlapping_launch(claims.device),
    )


def _place(tables: ResidencyTables, work: _Work, round: Tensor, transfers: Transfers) -> None:
    _place_kernel[(work.sweepers, tables.rows)](
        *(work.firsts, round, work.begun, work.tallies),
        *(tables.line_of, tables.page_in, tables.referenced, tables.stamps, tables.dirty, tables.hand),
        *(transfers.pages, transfers.lines, transfers.counts, transfers.overflow),
        *(tables.pages, tables.lines, work.chunks, work.items, work.stretch),
        ITEMS=power_of_two(work.items),
        CHUNKS=power_of_two(work.chunks),
        CHUNK=sizes.SWEPT,
        num_warps=warps_for(sizes.SWEPT),
        **overlapping_launch(round.device),
    )


@jit
def _claim_kernel(
    lists_ptr,
    counts_ptr,
    page_tables_ptr,
    round_ptr,
    line_of_ptr,
    referenced_ptr,
    stamps_ptr,
    hand_ptr,
    begun_ptr,
    claims_ptr,
    claimed_ptr,
    firsts_ptr,
    pages,
    lines,
    kv_heads,
    width,
    max_pages,
    parts,
    stretch,
    PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of one list: what is cached is touched, what is not is claimed. Which is which does not change meanwhile.

    A claim lies at item * stretch + its order in claims [rows, items * stretch]. That place, as a number below -1 that
    rises with it, goes to line_of, where the minimum stays: the first claim, whatever the order of threads.
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
    line_of_ptr += row * pages
    firsts_ptr += row * items
    claims_ptr += row * items * stretch
    now = tl.load(round_ptr)
    zero = total * 0
    claimed = zero
    won = zero
    for start in tl.range(begin, end, CHUNK):
        place = start + tl.arange(0, CHUNK)
        page, listed = pages_at(
            lists_ptr, page_tables_ptr, place, place < end, pages, head, kv_heads, max_pages, PER_BLOCK
        )
        line = tl.load(line_of_ptr + page, mask=listed, other=-1)
        cached = line >= 0
        tl.store(stamps_ptr + row * lines + line, now, mask=cached)
        tl.store(referenced_ptr + row * lines + line, 1, mask=cached)
        missing = (listed & (line < 0)).to(tl.int32)
        found = tl.sum(missing, 0)
        if found > 0:
            claim = item * stretch + claimed + tl.cumsum(missing, 0) - missing
            tl.store(claims_ptr + claim, page, mask=missing != 0)
            key = claim - items * stretch - 1
            before = tl.atomic_min(line_of_ptr + page, key, mask=missing != 0, sem="relaxed")
            first = (missing != 0) & (key < before)
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
def _survey_kernel(
    claims_ptr,
    claimed_ptr,
    firsts_ptr,
    round_ptr,
    begun_ptr,
    line_of_ptr,
    referenced_ptr,
    stamps_ptr,
    dirty_ptr,
    missing_ptr,
    tallies_ptr,
    pages,
    lines,
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
                key = tl.load(line_of_ptr + row * pages + page, mask=inside, other=0)
                first = (inside & (key == claim - items * stretch - 1)).to(tl.int32)
                order = at[:, None] + tl.cumsum(first, 1) - first
                tl.store(missing_ptr + row * items * stretch + order, page, mask=first != 0)
                at += tl.sum(first, 1)
        else:
            for chunk in tl.range(part - joiners, chunks, tl.num_programs(0) - joiners):
                _slot, ready, later = loose_lines(
                    round_ptr, begun_ptr, referenced_ptr, stamps_ptr, dirty_ptr, row, chunk, lines, CHUNK
                )
                tl.store(tallies_ptr + row * 2 * chunks + chunk, tl.sum(ready, 0))
                tl.store(tallies_ptr + (row * 2 + 1) * chunks + chunk, tl.sum(later, 0))


@jit
def _place_kernel(
    firsts_ptr,
    round_ptr,
    begun_ptr,
    tallies_ptr,
    line_of_ptr,
    page_in_ptr,
    referenced_ptr,
    stamps_ptr,
    dirty_ptr,
    hand_ptr,
    missing_ptr,
    taken_ptr,
    placed_ptr,
    overflow_ptr,
    pages,
    lines,
    chunks,
    items,
    stretch,
    ITEMS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some chunks of a row's lines: which victim each is, of the first sweep or the second, and whose page it gets.

    The hand comes to a line in the first sweep if there are fewer victims before it than pages are missing.
    """
    follow(PDL)
    sweeper = tl.program_id(0)
    sweepers = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    each = tl.arange(0, ITEMS)
    missing = tl.sum(tl.load(firsts_ptr + row * items + each, mask=each < items, other=0), 0)
    line_of_ptr += row * pages
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
            line, ready, later = loose_lines(
                round_ptr, begun_ptr, referenced_ptr, stamps_ptr, dirty_ptr, row, chunk, lines, CHUNK
            )
            before = ready_before + tl.cumsum(ready, 0) - ready
            later_before = tl.sum(tl.where(one < chunk, later_of, 0), 0) + tl.cumsum(later, 0) - later
            order = tl.where(ready != 0, before, tl.where(later != 0, first_sweep + later_before, missing))
            taken = order < missing
            page = tl.load(missing_ptr + order, mask=taken, other=0)
            old = tl.load(page_in_ptr + row * lines + line, mask=taken, other=-1)
            tl.debug_barrier()  # where a thread of another warp holds the same lines, it has read them now
            tl.store(referenced_ptr + row * lines + line, 0, mask=(later != 0) & (before < missing))
            tl.store(line_of_ptr + old, -1, mask=old >= 0)
            tl.store(line_of_ptr + page, line, mask=taken)
            tl.store(page_in_ptr + row * lines + line, page, mask=taken)
            tl.store(stamps_ptr + row * lines + line, tl.load(round_ptr), mask=taken)
            tl.store(taken_ptr + row * items * stretch + order, line, mask=taken)
            behind = tl.where(line + 1 == lines, 0, line + 1)
            tl.store(hand_ptr + row + order * 0, behind, mask=order == missing - 1)
            chunk += sweepers
            ready_before = tl.sum(tl.where(one < chunk, ready_of, 0), 0)
        # Claims that got nothing are taken back.
        for start in tl.range(placed + sweeper * CHUNK, missing, sweepers * CHUNK):
            place = start + tl.arange(0, CHUNK)
            page = tl.load(missing_ptr + place, mask=place < missing, other=0)
            tl.store(line_of_ptr + page, -1, mask=place < missing)
    if sweeper == 0:
        tl.store(placed_ptr + row, placed)
        tl.store(overflow_ptr + row, missing - placed)
