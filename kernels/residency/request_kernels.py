"""The three kernels of a request: claims, the survey of missing pages and lines, and the placing."""

from typing import NamedTuple

from torch import Tensor

from specahead.kernels.backends import follow, jit, overlapping_launch, power_of_two, tl
from specahead.kernels.residency import sizes
from specahead.kernels.residency.tables import ListedBlocks, ResidencyTables, Transfers, empty_transfers, pages_at


class Claims(NamedTuple):
    """What the kernels of a request hand on to one another, all int32. An item is a part of one list.

    entries: [rows, items * stretch], the pages that each item claims, at item * stretch on
    made, firsts: [rows, items], how many claims an item has made, and how many of them are the first of their page
    missing: [rows, items * stretch], all first claims in the order of items
    tallies: [rows, 2, chunks], lines of a chunk that the hand may take at once, and if it comes again
    begun: [rows], where the hand stood
    """

    entries: Tensor
    made: Tensor
    firsts: Tensor
    missing: Tensor
    tallies: Tensor
    begun: Tensor


def launch_request(tables: ResidencyTables, listed_blocks: ListedBlocks, round: Tensor) -> Transfers:
    """Do what `request_blocks` describes; the arguments have been checked."""
    lists, counts, page_tables = (
        x.contiguous() for x in (listed_blocks.lists, listed_blocks.counts, listed_blocks.page_tables)
    )
    rows, sequences, kv_heads, width = lists.shape
    listed = width * listed_blocks.pages_per_block
    parts = max(1, min(sizes.PARTS, -(-listed // sizes.LISTED)))
    stretch = -(-listed // parts)
    items = sequences * kv_heads * parts
    transfers = empty_transfers(rows, items * stretch, lists.device)
    if not items * stretch:
        transfers.counts.zero_()
        transfers.overflow.zero_()
        return transfers
    chunks, joiners = -(-tables.lines // sizes.SWEPT), -(-items // sizes.JOINED)
    sweepers = min(sizes.SWEEPERS, chunks)
    claims = Claims(
        entries=transfers.lines,  # claims stand here until the lines are known
        made=lists.new_empty(rows, items),
        firsts=lists.new_zeros(rows, items),
        missing=transfers.pages,
        tallies=lists.new_empty(rows, 2, chunks),
        begun=lists.new_empty(rows),
    )
    numbers = {"pages": tables.pages, "lines": tables.lines, "stretch": stretch} | overlapping_launch(lists.device)
    cut = {
        "PER_BLOCK": listed_blocks.pages_per_block,
        "CHUNK": sizes.LISTED,
        "num_warps": sizes.warps_for(sizes.LISTED),
    }
    max_pages = page_tables.shape[1]
    _claim_kernel[(items, rows)](
        tables, claims, lists, counts, page_tables, round, kv_heads, width, max_pages, parts, **numbers, **cut
    )
    numbers |= {"items": items, "chunks": chunks}
    swept = {"ITEMS": power_of_two(items), "CHUNK": sizes.SWEPT, "num_warps": sizes.warps_for(sizes.SWEPT)}
    joined = {"JOINED": sizes.JOINED, "CLAIMS": sizes.CLAIMS}
    _survey_kernel[(joiners + sweepers, rows)](tables, claims, round, joiners, **numbers, **joined, **swept)
    _place_kernel[(sweepers, rows)](tables, claims, transfers, round, CHUNKS=power_of_two(chunks), **numbers, **swept)
    return transfers


@jit
def _claim_kernel(
    tables,
    claims,
    lists_ptr,
    counts_ptr,
    page_tables_ptr,
    round_ptr,
    kv_heads,
    width,
    max_pages,
    parts,
    pages,
    lines,
    stretch,
    PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Touch the pages of one item that are cached, and claim the others. Which they are does not change meanwhile.

    The place of a claim in `claims.entries`, as a number below -1 that rises with it, goes to `line_of`, where the
    minimum stays: the first claim, whatever the order of threads. A claim that becomes the first is counted in
    `firsts`, and one that no longer is the first is taken off.
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
    line_of_ptr = tables.line_of + row * pages
    firsts_ptr = claims.firsts + row * items
    entries_ptr = claims.entries + row * items * stretch
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
        tl.store(tables.stamps + row * lines + line, now, mask=cached)
        tl.store(tables.referenced + row * lines + line, 1, mask=cached)
        missing = (listed & (line < 0)).to(tl.int32)
        found = tl.sum(missing, 0)
        if found > 0:
            claim = item * stretch + claimed + tl.cumsum(missing, 0) - missing
            tl.store(entries_ptr + claim, page, mask=missing != 0)
            key = claim - items * stretch - 1
            before = tl.atomic_min(line_of_ptr + page, key, mask=missing != 0, sem="relaxed")
            first = (missing != 0) & (key < before)
            beaten = (before + items * stretch + 1) // stretch
            tl.atomic_add(firsts_ptr + beaten, -1, mask=first & (before < -1), sem="relaxed")
            won += tl.sum(first.to(tl.int32), 0)
            claimed += found
    tl.store(claims.made + row * items + item, claimed)
    if won > 0:
        tl.atomic_add(firsts_ptr + item, won, sem="relaxed")
    if item == 0:
        tl.store(claims.begun + row, tl.load(tables.hand + row))


@jit
def _loose_lines(tables, begun_ptr, round_ptr, row, chunk, lines, CHUNK: tl.constexpr):
    """Return the lines of a chunk in the order of the hand, and which it may take: at once, and if it comes again."""
    now = tl.load(round_ptr)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    there = place < lines
    line = tl.load(begun_ptr + row) + place
    line = tl.where(line >= lines, line - lines, line)
    stamp = tl.load(tables.stamps + row * lines + line, mask=there, other=0)
    unsaved = tl.load(tables.dirty + row * lines + line, mask=there, other=1)
    bit = tl.load(tables.referenced + row * lines + line, mask=there, other=0)
    loose = there & (stamp < now) & (unsaved == 0)
    return line, (loose & (bit == 0)).to(tl.int32), (loose & (bit != 0)).to(tl.int32)


@jit
def _survey_kernel(
    tables,
    claims,
    round_ptr,
    joiners,
    pages,
    lines,
    stretch,
    items,
    chunks,
    JOINED: tl.constexpr,
    CLAIMS: tl.constexpr,
    ITEMS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the first claims of JOINED items after those of the items before, or count the lines to take of chunks.

    The first `joiners` programs do the one, the others the other.
    """
    follow(PDL)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    each = tl.arange(0, ITEMS)
    won = tl.load(claims.firsts + row * items + each, mask=each < items, other=0)
    if tl.sum(won, 0) > 0:
        if part < joiners:
            one = part * JOINED + tl.arange(0, JOINED)
            own = tl.load(claims.firsts + row * items + one, mask=one < items, other=0)
            claimed = tl.load(claims.made + row * items + one, mask=own > 0, other=0)
            at = tl.sum(tl.where(each < part * JOINED, won, 0), 0) + tl.cumsum(own, 0) - own
            for start in tl.range(0, tl.max(claimed, 0), CLAIMS):
                place = start + tl.arange(0, CLAIMS)
                inside = place[None, :] < claimed[:, None]
                claim = one[:, None] * stretch + place[None, :]
                page = tl.load(claims.entries + row * items * stretch + claim, mask=inside, other=0)
                key = tl.load(tables.line_of + row * pages + page, mask=inside, other=0)
                first = (inside & (key == claim - items * stretch - 1)).to(tl.int32)
                order = at[:, None] + tl.cumsum(first, 1) - first
                tl.store(claims.missing + row * items * stretch + order, page, mask=first != 0)
                at += tl.sum(first, 1)
        else:
            for chunk in tl.range(part - joiners, chunks, tl.num_programs(0) - joiners):
                _slot, ready, later = _loose_lines(tables, claims.begun, round_ptr, row, chunk, lines, CHUNK)
                tl.store(claims.tallies + row * 2 * chunks + chunk, tl.sum(ready, 0))
                tl.store(claims.tallies + (row * 2 + 1) * chunks + chunk, tl.sum(later, 0))


@jit
def _place_kernel(
    tables,
    claims,
    transfers,
    round_ptr,
    pages,
    lines,
    stretch,
    items,
    chunks,
    CHUNKS: tl.constexpr,
    ITEMS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find which victims the lines of some chunks are, of the first sweep or the second, and place pages there.

    The hand comes to a line in the first sweep if there are fewer victims before it than pages are missing.
    """
    follow(PDL)
    sweeper = tl.program_id(0)
    sweepers = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    each = tl.arange(0, ITEMS)
    missing = tl.sum(tl.load(claims.firsts + row * items + each, mask=each < items, other=0), 0)
    line_of_ptr = tables.line_of + row * pages
    missing_ptr = claims.missing + row * items * stretch
    placed = missing * 0
    if missing > 0:
        one = tl.arange(0, CHUNKS)
        ready_of = tl.load(claims.tallies + row * 2 * chunks + one, mask=one < chunks, other=0)
        later_of = tl.load(claims.tallies + (row * 2 + 1) * chunks + one, mask=one < chunks, other=0)
        first_sweep = tl.sum(ready_of, 0)
        placed = tl.minimum(missing, first_sweep + tl.sum(later_of, 0))
        chunk = sweeper
        ready_before = tl.sum(tl.where(one < chunk, ready_of, 0), 0)
        while (chunk < chunks) & (ready_before < missing):
            line, ready, later = _loose_lines(tables, claims.begun, round_ptr, row, chunk, lines, CHUNK)
            before = ready_before + tl.cumsum(ready, 0) - ready
            later_before = tl.sum(tl.where(one < chunk, later_of, 0), 0) + tl.cumsum(later, 0) - later
            order = tl.where(ready != 0, before, tl.where(later != 0, first_sweep + later_before, missing))
            taken = order < missing
            page = tl.load(missing_ptr + order, mask=taken, other=0)
            old = tl.load(tables.page_in + row * lines + line, mask=taken, other=-1)
            tl.debug_barrier()  # where a thread of another warp holds the same lines, it has read them now
            tl.store(tables.referenced + row * lines + line, 0, mask=(later != 0) & (before < missing))
            tl.store(line_of_ptr + old, -1, mask=old >= 0)
            tl.store(line_of_ptr + page, line, mask=taken)
            tl.store(tables.page_in + row * lines + line, page, mask=taken)
            tl.store(tables.stamps + row * lines + line, tl.load(round_ptr), mask=taken)
            tl.store(transfers.lines + row * items * stretch + order, line, mask=taken)
            behind = tl.where(line + 1 == lines, 0, line + 1)
            tl.store(tables.hand + row + order * 0, behind, mask=order == missing - 1)
            chunk += sweepers
            ready_before = tl.sum(tl.where(one < chunk, ready_of, 0), 0)
        # Claims that got nothing are taken back.
        for start in tl.range(placed + sweeper * CHUNK, missing, sweepers * CHUNK):
            place = start + tl.arange(0, CHUNK)
            page = tl.load(missing_ptr + place, mask=place < missing, other=0)
            tl.store(line_of_ptr + page, -1, mask=place < missing)
    if sweeper == 0:
        tl.store(transfers.counts + row, placed)
        tl.store(transfers.overflow + row, missing - placed)
