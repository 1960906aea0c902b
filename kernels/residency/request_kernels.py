"""The three kernels of a request: claims, the survey of missing pages and lines, and the placing."""

from torch import Tensor

from specahead.kernels.backends import follow, jit, overlapping_launch, power_of_two, tl
from specahead.kernels.residency import sizes
from specahead.kernels.residency.listed import pages_at
from specahead.kernels.residency.sizes import warps_for
from specahead.kernels.residency.tables import ListedBlocks, ResidencyTables, Transfers, empty_transfers


def launch_request(tables: ResidencyTables, listed_blocks: ListedBlocks, round: Tensor) -> Transfers:
    """request_blocks, by Triton; the arguments have been checked.

    The kernels leave for each other, all int32: firsts and claimed [rows, items], of each part of a list its first
    claims, and all of its claims, of which it has `stretch` at most; tallies [rows, 2, chunks], lines that the hand may
    take; begun [rows], where the hand stood.
    """
    lists, counts, page_tables = listed_blocks.lists, listed_blocks.counts, listed_blocks.page_tables
    rows, sequences, kv_heads, width = lists.shape
    pages_per_block = listed_blocks.pages_per_block
    listed = width * pages_per_block
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
    firsts, claimed = lists.new_zeros(rows, items), lists.new_empty(rows, items)
    tallies, begun = lists.new_empty(rows, 2, chunks), lists.new_empty(rows)
    claims, missing = transfers.lines, transfers.pages  # claims until the lines are known
    overlap, end = overlapping_launch(lists.device), (tables.pages, tables.lines)
    _claim_kernel[(items, rows)](
        *(lists.contiguous(), counts.contiguous(), page_tables.contiguous(), round),
        *(tables.line_of, tables.referenced, tables.stamps, tables.hand, begun, claims, claimed, firsts),
        *(*end, kv_heads, width, page_tables.shape[1], parts, stretch),
        PER_BLOCK=pages_per_block,
        CHUNK=sizes.LISTED,
        num_warps=warps_for(sizes.LISTED),
        **overlap,
    )
    swept: dict[str, int] = {"ITEMS": power_of_two(items), "CHUNK": sizes.SWEPT, "num_warps": warps_for(sizes.SWEPT)}
    _survey_kernel[(joiners + sweepers, rows)](
        *(claims, claimed, firsts, round, begun),
        *(tables.line_of, tables.referenced, tables.stamps, tables.dirty, missing, tallies),
        *(*end, joiners, chunks, items, stretch),
        JOINED=sizes.JOINED,
        CLAIMS=sizes.CLAIMS,
        **swept,
        **overlap,
    )
    _place_kernel[(sweepers, rows)](
        *(firsts, round, begun, tallies),
        *(tables.line_of, tables.page_in, tables.referenced, tables.stamps, tables.dirty, tables.hand),
        *(missing, transfers.lines, transfers.counts, transfers.overflow, *end, chunks, items, stretch),
        CHUNKS=power_of_two(chunks),
        **swept,
        **overlap,
    )
    return transfers


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
def _loose_lines(round_ptr, begun_ptr, referenced_ptr, stamps_ptr, dirty_ptr, row, chunk, lines, CHUNK: tl.constexpr):
    """The lines of a chunk in the order of the hand, and what it may take: at once, and if it comes again."""
    now = tl.load(round_ptr)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    there = place < lines
    line = tl.load(begun_ptr + row) + place
    line = tl.where(line >= lines, line - lines, line)
    stamp = tl.load(stamps_ptr + row * lines + line, mask=there, other=0)
    unsaved = tl.load(dirty_ptr + row * lines + line, mask=there, other=1)
    bit = tl.load(referenced_ptr + row * lines + line, mask=there, other=0)
    loose = there & (stamp < now) & (unsaved == 0)
    return line, (loose & (bit == 0)).to(tl.int32), (loose & (bit != 0)).to(tl.int32)


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
                _slot, ready, later = _loose_lines(
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
            line, ready, later = _loose_lines(
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
