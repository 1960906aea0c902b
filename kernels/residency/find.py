"""Finding: in which cache lines the pages of listed blocks are, and how many blocks are missing."""

import torch
from torch import Tensor

from kernels.backends import check_backend, follow, jit, overlapping_launch, tl
from kernels.residency import sizes
from kernels.residency.listed import clear_numbers, pages_at, pages_of_blocks
from kernels.residency.sizes import warps_for
from kernels.residency.tables import ResidencyTables, check_blocks


def find_block_lines(
    tables: ResidencyTables,
    lists: Tensor,
    counts: Tensor,
    page_tables: Tensor,
    kv_heads: int,
    pages_per_block: int,
    backend: str = "torch",
    absent: int = -1,
) -> tuple[Tensor, Tensor]:
    """The lines of the pages of listed blocks; changes nothing. The arguments are those of request_blocks.

    Returns lines [rows, sequences, kv_heads, width * pages_per_block] int32, `absent` for what is in no line, and
    missing [rows] int32, how many listed pages are in no line, each as often as it is listed. Lines beyond a count say
    nothing.
    """
    check_backend("find_block_lines", backend)
    check_blocks("find_block_lines", tables, lists, counts, page_tables, kv_heads, pages_per_block)
    if backend == "torch":
        pages = pages_of_blocks(tables.pages, lists, counts, page_tables, pages_per_block)
        row = torch.arange(tables.rows, device=lists.device)[:, None, None, None]
        lines = tables.line_of[row, pages.clamp(min=0).long()].masked_fill(pages < 0, -1)
        missing = ((pages >= 0) & (lines < 0)).sum((1, 2, 3), dtype=torch.int32)
        return lines.masked_fill(lines < 0, absent), missing
    rows, sequences, _, width = lists.shape
    listed = width * pages_per_block
    lines = lists.new_empty(rows, sequences, kv_heads, listed)
    missing = lists.new_empty(rows)
    clear_numbers(missing)
    if lines.numel():
        _find_kernel[(-(-listed // sizes.FOUND), sequences * kv_heads, rows)](
            *(lists.contiguous(), counts.contiguous(), page_tables.contiguous(), tables.line_of, lines, missing),
            *(tables.pages, kv_heads, width, page_tables.shape[1], absent),
            PER_BLOCK=pages_per_block,
            CHUNK=sizes.FOUND,
            num_warps=warps_for(sizes.FOUND),
            **overlapping_launch(lists.device),
        )
    return lines, missing


@jit
def _find_kernel(
    lists_ptr,
    counts_ptr,
    page_tables_ptr,
    line_of_ptr,
    lines_ptr,
    missing_ptr,
    pages,
    kv_heads,
    width,
    max_pages,
    absent,
    PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A chunk of one list; `missing` has been cleared."""
    follow(PDL)
    listing = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    at = row * tl.num_programs(1) + listing
    head = listing % kv_heads
    count = tl.minimum(tl.load(counts_ptr + at), width) * PER_BLOCK
    place = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    if tl.program_id(0) * CHUNK < count:
        page_tables_ptr += (listing // kv_heads).to(tl.int64) * max_pages
        page, listed = pages_at(
            lists_ptr + at * width, page_tables_ptr, place, place < count, pages, head, kv_heads, max_pages, PER_BLOCK
        )
        line = tl.load(line_of_ptr + row * pages + page, mask=listed, other=-1)
        missing = tl.sum((listed & (line < 0)).to(tl.int32), 0)
        if missing > 0:
            tl.atomic_add(missing_ptr + row, missing, sem="relaxed")
        line = tl.where(line < 0, absent, line)
        tl.store(lines_ptr + at * (width * PER_BLOCK) + place, line, mask=place < count)
