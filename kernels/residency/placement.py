"""Pages that a step writes are pinned to GPU pages, left to the clock once they are stored, dropped when freed."""

import torch
from torch import Tensor

from specahead.kernels.backends import check_backend, follow, jit, overlapping_launch, tl
from specahead.kernels.residency import sizes
from specahead.kernels.residency.sizes import warps_for
from specahead.kernels.residency.tables import ResidencyTables, check_pages, check_tensor


def pin_gpu_pages(
    tables: ResidencyTables, pages: Tensor, gpu_pages: Tensor, round: Tensor, kv_heads: int, backend: str = "torch"
) -> None:
    """Let pages that `round` writes lie in given GPU pages, every head in every row; they are dirty, without bit.

    What else is in a GPU page is forgotten, dirty or not. Where a page lay elsewhere, that line is free; it keeps its
    stamp.

    pages, gpu_pages: [n] int32, each listed once at most; where one is outside of the tables, both are passed over
    round: [1] int32
    """
    check_backend("pin_gpu_pages", backend)
    check_pages("pin_gpu_pages", tables, pages, kv_heads)
    check_tensor("pin_gpu_pages", "gpu_pages", gpu_pages, tuple(pages.shape), torch.int32, tables.page_in.device)
    check_tensor("pin_gpu_pages", "round", round, (1,), torch.int32, tables.page_in.device)
    if backend == "torch":
        fit = (gpu_pages >= 0) & (gpu_pages < tables.lines // kv_heads)
        fit &= (pages >= 0) & (pages < tables.pages // kv_heads)
        page, line = (_of_heads(t[fit], kv_heads) for t in (pages, gpu_pages))
        for row in range(tables.rows):
            former, other = tables.line_of[row, page].long(), tables.page_in[row, line].long()
            tables.line_of[row, other[other >= 0]] = -1
            _free_lines(tables, row, former[former >= 0])
            tables.line_of[row, page] = line.int()
            tables.page_in[row, line] = page.int()
            tables.referenced[row, line] = 0
            tables.dirty[row, line] = 1
            tables.stamps[row, line] = round
        return
    if pages.numel():
        _pin_kernel[(tables.rows,)](
            *(pages.contiguous(), gpu_pages.contiguous(), round),
            *(tables.line_of, tables.page_in, tables.referenced, tables.stamps, tables.dirty),
            *(tables.pages, tables.lines, kv_heads, len(pages)),
            CHUNK=sizes.LISTED,
            num_warps=warps_for(sizes.LISTED),
            **overlapping_launch(pages.device),
        )


def mark_stored(tables: ResidencyTables, pages: Tensor, kv_heads: int, backend: str = "torch") -> None:
    """These pages have been stored, every head in every row: they are not dirty, and left to the clock.

    pages: [n] int32; what is in no line is passed over. What was written or freed after the copy began must not be
        listed.
    """
    _settle("mark_stored", tables, pages, kv_heads, backend, drop=False)


def drop_pages(tables: ResidencyTables, pages: Tensor, kv_heads: int, backend: str = "torch") -> None:
    """Forget pages that were freed, dirty or not, every head in every row: their lines are free, without bit.

    The lines keep their stamps: a round in flight may still read them, or a copy into them be on its way, so they are
    taken only when that round has ended.

    pages: [n] int32; what is not cached is passed over
    """
    _settle("drop_pages", tables, pages, kv_heads, backend, drop=True)


def _of_heads(pages: Tensor, kv_heads: int) -> Tensor:
    """[n] to [n * kv_heads] int64."""
    return (pages[:, None].long() * kv_heads + torch.arange(kv_heads, device=pages.device)).flatten()


def _free_lines(tables: ResidencyTables, row: int, lines: Tensor) -> None:
    tables.page_in[row, lines] = -1
    tables.referenced[row, lines] = 0
    tables.dirty[row, lines] = 0


def _settle(operation: str, tables: ResidencyTables, pages: Tensor, kv_heads: int, backend: str, drop: bool) -> None:
    """Make the lines of pages that are cached clean or, with `drop`, free."""
    check_backend(operation, backend)
    check_pages(operation, tables, pages, kv_heads)
    if backend == "torch":
        listed = _of_heads(pages[(pages >= 0) & (pages < tables.pages // kv_heads)], kv_heads)
        for row in range(tables.rows):
            page = listed[tables.line_of[row, listed] >= 0]
            line = tables.line_of[row, page].long()
            tables.dirty[row, line] = 0
            if drop:
                tables.line_of[row, page] = -1
                _free_lines(tables, row, line)
    elif pages.numel():
        _settle_kernel[(-(-len(pages) * kv_heads // sizes.LISTED), tables.rows)](
            *(pages.contiguous(), tables.line_of, tables.page_in, tables.referenced, tables.dirty),
            *(tables.pages, tables.lines, kv_heads, len(pages)),
            DROP=drop,
            CHUNK=sizes.LISTED,
            num_warps=warps_for(sizes.LISTED),
            **overlapping_launch(pages.device),
        )


@jit
def _heads_at(pages_ptr, place, count, end, kv_heads):
    """Of pages or gpu_pages, every head's at `place`, -1 where there is none below `end`."""
    page = tl.load(pages_ptr + place // kv_heads, mask=place < count * kv_heads, other=-1)
    return tl.where((page >= 0) & (page < end // kv_heads), page * kv_heads + place % kv_heads, -1)


@jit
def _pin_kernel(
    pages_ptr,
    gpu_pages_ptr,
    round_ptr,
    line_of_ptr,
    page_in_ptr,
    referenced_ptr,
    stamps_ptr,
    dirty_ptr,
    pages,
    lines,
    kv_heads,
    count,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row. All is forgotten that lies in the gpu_pages, and where pages lie; only then anything is placed.

    What is read and forgotten at the same time is placed anew in any case: reads may find it or not.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    line_of_ptr += row * pages
    page_in_ptr += row * lines
    referenced_ptr += row * lines
    stamps_ptr += row * lines
    dirty_ptr += row * lines
    now = tl.load(round_ptr)
    for start in tl.range(0, count * kv_heads, CHUNK):
        place = start + tl.arange(0, CHUNK)
        page, line, listed = _pinned_at(pages_ptr, gpu_pages_ptr, place, count, pages, lines, kv_heads)
        former = tl.load(line_of_ptr + page, mask=listed, other=-1)
        other = tl.load(page_in_ptr + line, mask=listed, other=-1)
        tl.store(line_of_ptr + other, -1, mask=other >= 0)
        tl.store(page_in_ptr + former, -1, mask=former >= 0)
        tl.store(referenced_ptr + former, 0, mask=former >= 0)
        tl.store(dirty_ptr + former, 0, mask=former >= 0)
    tl.debug_barrier()
    for start in tl.range(0, count * kv_heads, CHUNK):
        place = start + tl.arange(0, CHUNK)
        page, line, listed = _pinned_at(pages_ptr, gpu_pages_ptr, place, count, pages, lines, kv_heads)
        tl.store(line_of_ptr + page, line, mask=listed)
        tl.store(page_in_ptr + line, page, mask=listed)
        tl.store(referenced_ptr + line, 0, mask=listed)
        tl.store(stamps_ptr + line, now, mask=listed)
        tl.store(dirty_ptr + line, 1, mask=listed)


@jit
def _pinned_at(pages_ptr, gpu_pages_ptr, place, count, pages, lines, kv_heads):
    """Every head's page and line; and whether they are to be pinned."""
    page = _heads_at(pages_ptr, place, count, pages, kv_heads)
    line = _heads_at(gpu_pages_ptr, place, count, lines, kv_heads)
    return page, line, (page >= 0) & (line >= 0)


@jit
def _settle_kernel(
    pages_ptr,
    line_of_ptr,
    page_in_ptr,
    referenced_ptr,
    dirty_ptr,
    pages,
    lines,
    kv_heads,
    count,
    DROP: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A page listed twice is found as it was or as it will be."""
    follow(PDL)
    row = tl.program_id(1).to(tl.int64)
    page = _heads_at(pages_ptr, tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), count, pages, kv_heads)
    line = tl.load(line_of_ptr + row * pages + page, mask=page >= 0, other=-1)
    cached = line >= 0
    tl.store(dirty_ptr + row * lines + line, 0, mask=cached)
    if DROP:
        tl.store(referenced_ptr + row * lines + line, 0, mask=cached)
        tl.store(page_in_ptr + row * lines + line, -1, mask=cached)
        tl.store(line_of_ptr + row * pages + page, -1, mask=cached)
