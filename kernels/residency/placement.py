"""Pages that a step writes are pinned to GPU pages, left to the clock once they are stored, dropped when freed."""

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, follow, jit, overlapping_launch, tl
from specahead.kernels.residency import sizes
from specahead.kernels.residency.tables import ResidencyTables


def pin_gpu_pages(
    tables: ResidencyTables, pages: Tensor, gpu_pages: Tensor, round: Tensor, kv_heads: int, backend: Backend = "torch"
) -> None:
    """Let pages that `round` writes lie in given GPU pages, every head in every row. They are dirty, without bit.

    Other pages in these GPU pages are forgotten, dirty or not. Where a page lay elsewhere, that line becomes free; it
    keeps its stamp.

    pages, gpu_pages: [n] int32, each listed once at most; where one is outside of the tables, both are passed over
    round: [1] int32
    """
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
        how = _how(tables, pages, kv_heads)
        _pin_kernel[(tables.rows,)](tables, pages.contiguous(), gpu_pages.contiguous(), round, **how)


def mark_stored(tables: ResidencyTables, pages: Tensor, kv_heads: int, backend: Backend = "torch") -> None:
    """Take note that pages have been stored, every head in every row: they are clean, and the clock may take them.

    pages: [n] int32. A page in no line is passed over. Pages that were written or freed after the copy began must not
        be listed.
    """
    _settle(tables, pages, kv_heads, backend, drop=False)


def drop_pages(tables: ResidencyTables, pages: Tensor, kv_heads: int, backend: Backend = "torch") -> None:
    """Forget pages that were freed, dirty or not, every head in every row: their lines are free, without bit.

    The lines keep their stamps: a round in flight may still read them, or a copy into them be on its way, so they are
    taken only when that round has ended.

    pages: [n] int32; what is not cached is passed over
    """
    _settle(tables, pages, kv_heads, backend, drop=True)


def _of_heads(pages: Tensor, kv_heads: int) -> Tensor:
    """Return the pages of all heads, [n * kv_heads] int64, from [n] pages."""
    return (pages[:, None].long() * kv_heads + torch.arange(kv_heads, device=pages.device)).flatten()


def _free_lines(tables: ResidencyTables, row: int, lines: Tensor) -> None:
    tables.page_in[row, lines] = -1
    tables.referenced[row, lines] = 0
    tables.dirty[row, lines] = 0


def _settle(tables: ResidencyTables, pages: Tensor, kv_heads: int, backend: Backend, drop: bool) -> None:
    """Make the lines of pages that are cached clean or, with `drop`, free."""
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
        grid = -(-len(pages) * kv_heads // sizes.LISTED), tables.rows
        _settle_kernel[grid](tables, pages.contiguous(), DROP=drop, **_how(tables, pages, kv_heads))


def _how(tables: ResidencyTables, pages: Tensor, kv_heads: int) -> dict[str, int]:
    """Return arguments of both kernels, by name."""
    numbers = {"pages": tables.pages, "lines": tables.lines, "kv_heads": kv_heads, "count": len(pages)}
    how = {"CHUNK": sizes.LISTED, "num_warps": sizes.warps_for(sizes.LISTED)}
    return numbers | how | overlapping_launch(pages.device)


@jit
def _heads_at(pages_ptr, place, count, end, kv_heads):
    """Return every head's page at `place` of a list of pages or GPU pages, -1 where there is none below `end`."""
    page = tl.load(pages_ptr + place // kv_heads, mask=place < count * kv_heads, other=-1)
    return tl.where((page >= 0) & (page < end // kv_heads), page * kv_heads + place % kv_heads, -1)


@jit
def _pinned_at(pages_ptr, gpu_pages_ptr, place, count, pages, lines, kv_heads):
    """Return every head's page and line, and whether they are to be pinned."""
    page = _heads_at(pages_ptr, place, count, pages, kv_heads)
    line = _heads_at(gpu_pages_ptr, place, count, lines, kv_heads)
    return page, line, (page >= 0) & (line >= 0)


@jit
def _pin_kernel(
    tables, pages_ptr, gpu_pages_ptr, round_ptr, pages, lines, kv_heads, count, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Forget, in one row, all that lies in the GPU pages, and where the pages lie; only then place anything.

    A place that is read and forgotten at the same time is filled anew in any case: reads may find it or not.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    of_page, of_line = row * pages, row * lines
    for start in tl.range(0, count * kv_heads, CHUNK):
        place = start + tl.arange(0, CHUNK)
        page, line, listed = _pinned_at(pages_ptr, gpu_pages_ptr, place, count, pages, lines, kv_heads)
        former = tl.load(tables.line_of + of_page + page, mask=listed, other=-1)
        other = tl.load(tables.page_in + of_line + line, mask=listed, other=-1)
        tl.store(tables.line_of + of_page + other, -1, mask=other >= 0)
        _free_at(tables, of_line + former, former >= 0)
    tl.debug_barrier()
    now = tl.load(round_ptr)
    for start in tl.range(0, count * kv_heads, CHUNK):
        place = start + tl.arange(0, CHUNK)
        page, line, listed = _pinned_at(pages_ptr, gpu_pages_ptr, place, count, pages, lines, kv_heads)
        tl.store(tables.line_of + of_page + page, line, mask=listed)
        tl.store(tables.page_in + of_line + line, page, mask=listed)
        tl.store(tables.referenced + of_line + line, 0, mask=listed)
        tl.store(tables.stamps + of_line + line, now, mask=listed)
        tl.store(tables.dirty + of_line + line, 1, mask=listed)


@jit
def _free_at(tables, at, there):
    """Free lines, which keep their stamps."""
    tl.store(tables.page_in + at, -1, mask=there)
    tl.store(tables.referenced + at, 0, mask=there)
    tl.store(tables.dirty + at, 0, mask=there)


@jit
def _settle_kernel(
    tables, pages_ptr, pages, lines, kv_heads, count, DROP: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Settle a chunk of pages in one row. A page listed twice is found as it was or as it will be."""
    follow(PDL)
    row = tl.program_id(1).to(tl.int64)
    page = _heads_at(pages_ptr, tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), count, pages, kv_heads)
    line = tl.load(tables.line_of + row * pages + page, mask=page >= 0, other=-1)
    if DROP:
        _free_at(tables, row * lines + line, line >= 0)
        tl.store(tables.line_of + row * pages + page, -1, mask=line >= 0)
    else:
        tl.store(tables.dirty + row * lines + line, 0, mask=line >= 0)
