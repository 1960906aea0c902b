"""Finding: in which cache lines the pages of listed blocks are, and how many blocks are missing."""

import torch
from torch import Tensor

from specahead.kernels.backends import check_backend, follow, jit, overlapping_launch, tl
from specahead.kernels.residency import sizes
from specahead.kernels.residency.listed import pages_at, pages_of_blocks
from specahead.kernels.residency.sizes import warps_for
from specahead.kernels.residency.tables import ListedBlocks, ResidencyTables, check_blocks


def find_block_lines(tables: ResidencyTables, listed: ListedBlocks, backend: str = "torch", absent: int = -1) -> Tensor:
    """Return the lines of the pages of listed blocks; changes nothing.

    Returns [rows, sequences, kv_heads, width * pages_per_block] int32, `absent` for what is in no line. Lines beyond a
    count say nothing.
    """
    check_backend("find_block_lines", backend)
    check_blocks("find_block_lines", tables, listed)
    if backend == "torch":
        _, lines = _pages_and_lines(tables, listed)
        return lines.masked_fill(lines < 0, absent)
    *shape, width = listed.lists.shape
    lines = listed.lists.new_empty(*shape, width * listed.pages_per_block)
    _launch(tables, listed, lines, absent, PARTS=1, COUNT=False)
    return lines


def count_missing_blocks(tables: ResidencyTables, listed: ListedBlocks, backend: str = "torch") -> Tensor:
    """Count the listed blocks of each sequence that have a page in no line, over all rows and heads; changes nothing.

    Returns [sequences] int32.
    """
    check_backend("count_missing_blocks", backend)
    check_blocks("count_missing_blocks", tables, listed)
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
    lists, page_tables, per_block = listed.lists, listed.page_tables, listed.pages_per_block
    rows, sequences, kv_heads, width = lists.shape
    places = width * per_block // PARTS
    if rows * sequences * kv_heads * places:
        _find_kernel[(-(-places // sizes.FOUND), sequences * kv_heads, rows)](
            *(lists.contiguous(), listed.counts.contiguous(), page_tables.contiguous(), tables.line_of, out),
            *(tables.pages, kv_heads, width, page_tables.shape[1], absent),
            PARTS=PARTS,
            PER_BLOCK=per_block,
            COUNT=COUNT,
            CHUNK=sizes.FOUND,
            num_warps=warps_for(sizes.FOUND),
            **overlapping_launch(lists.device),
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
    """A chunk of one list, in PARTS pages: their lines go to out, or how many miss a page is added to the sequence's.

    out: lines [rows, sequences * kv_heads, width * PER_BLOCK], PARTS is 1; or to COUNT, [sequences], zeros before.
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
