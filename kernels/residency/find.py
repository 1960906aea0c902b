"""Finding the cache lines of the pages of listed blocks, and counting the blocks that are missing."""

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, follow, jit, overlapping_launch, tl
from specahead.kernels.residency import sizes
from specahead.kernels.residency.tables import ListedBlocks, ResidencyTables, pages_at, pages_of_blocks


def find_block_lines(tables: ResidencyTables, listed: ListedBlocks, backend: Backend, absent: int) -> Tensor:
    """Return the lines of the pages of listed blocks, `absent` for a page in no line; changes nothing.

    Returns [rows, sequences, kv_heads, width * pages_per_block] int32; lines after a count are undefined.
    """
    if backend == "torch":
        _, lines = _pages_and_lines(tables, listed)
        return lines.masked_fill(lines < 0, absent)
    *shape, width = listed.lists.shape
    lines = listed.lists.new_empty(*shape, width * listed.pages_per_block)
    _launch(tables, listed, lines, absent, PARTS=1, COUNT=False)
    return lines


def count_missing_blocks(tables: ResidencyTables, listed: ListedBlocks, backend: Backend = "torch") -> Tensor:
    """Count the listed blocks of each sequence, over all rows and heads, that have a page in no line; change nothing.

    Returns [sequences] int32.
    """
    lists = listed.lists
    if backend == "torch":
        pages, lines = _pages_and_lines(tables, listed)
        absent = ((pages >= 0) & (lines < 0)).unflatten(3, (lists.shape[3], listed.pages_per_block))
        return absent.any(4).sum((0, 2, 3), dtype=torch.int32)
    missing = lists.new_zeros(lists.shape[1])
    _launch(tables, listed, missing, -1, PARTS=listed.pages_per_block, COUNT=True)
    return missing


def _pages_and_lines(tables: ResidencyTables, listed: ListedBlocks) -> tuple[Tensor, Tensor]:
    """Return `pages_of_blocks`, and their lines, -1 where there is none."""
    pages = pages_of_blocks(tables.pages, listed)
    row = torch.arange(tables.rows, device=pages.device)[:, None, None, None]
    return pages, tables.line_of[row, pages.clamp(min=0).long()].masked_fill(pages < 0, -1)


def _launch(tables: ResidencyTables, listed: ListedBlocks, out: Tensor, absent: int, PARTS: int, COUNT: bool) -> None:
    per_block = listed.pages_per_block
    rows, sequences, kv_heads, width = listed.lists.shape
    places = width * per_block // PARTS
    if rows * sequences * kv_heads * places:
        how = {"PER_BLOCK": per_block, "PARTS": PARTS, "COUNT": COUNT, "CHUNK": sizes.FOUND}
        how |= {"num_warps": sizes.warps_for(sizes.FOUND)} | overlapping_launch(out.device)
        lists, counts, page_tables = (x.contiguous() for x in (listed.lists, listed.counts, listed.page_tables))
        max_pages, grid = page_tables.shape[1], (-(-places // sizes.FOUND), sequences * kv_heads, rows)
        _find_kernel[grid](
            lists, counts, page_tables, tables.line_of, out, tables.pages, kv_heads, width, max_pages, absent, **how
        )


@jit
def _find_kernel(
    lists_ptr,
    counts_ptr,
    page_tables_ptr,
    line_of_ptr,
    out_ptr,
    pages,
    kv_heads,
    width,
    max_pages,
    absent,
    PARTS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the lines of a chunk of one list's pages, or add how many blocks miss a page to the sequence's.

    out: lines [rows, sequences * kv_heads, width * PER_BLOCK], where PARTS is 1; or, where COUNT, [sequences] that were
        zeros, and PARTS is PER_BLOCK.
    """
    follow(PDL)
    listing = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    at = row * tl.num_programs(1) + listing
    head = listing % kv_heads
    count = tl.minimum(tl.load(counts_ptr + at), width) * PER_BLOCK
    if tl.program_id(0) * CHUNK * PARTS < count:
        page_tables_ptr += (listing // kv_heads).to(tl.int64) * max_pages
        first = (tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)) * PARTS
        missing = first < 0
        for part in tl.static_range(PARTS):
            place = first + part
            inside = place < count
            page, listed = pages_at(
                lists_ptr + at * width, page_tables_ptr, place, inside, pages, head, kv_heads, max_pages, PER_BLOCK
            )
            line = tl.load(line_of_ptr + row * pages + page, mask=listed, other=-1)
            if COUNT:
                missing = missing | (listed & (line < 0))
            else:
                line = tl.where(line < 0, absent, line)
                tl.store(out_ptr + at * (width * PER_BLOCK) + place, line, mask=inside)
        if COUNT:
            total = tl.sum(missing.to(tl.int32), 0)
            if total > 0:
                tl.atomic_add(out_ptr + listing // kv_heads, total, sem="relaxed")
