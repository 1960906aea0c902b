"""The few largest entries of long rows, in falling order: a draft's likeliest tokens."""

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, follow, jit, overlapping_launch, power_of_two, tl

_CHUNK = 4096  # entries of a program of the first launch


def top_few(values: Tensor, count: int, backend: Backend = "torch") -> Tensor:
    """Return the columns of the `count` largest entries of each row, the largest first: [rows, count] int64.

    values: [rows, entries], contiguous, of a float dtype. Of equal entries the first one comes first, as in
    torch.argmax. In a row with NaN the result may be any columns. Raises ValueError for a count beyond the entries.
    """
    rows, entries = values.shape
    if not 0 < count <= entries:
        raise ValueError(f"the {count} largest of {entries} entries: give at least 1, at most the entries")
    if backend == "torch" and count == 1:
        return values.argmax(1, keepdim=True)
    if backend == "torch":
        return values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    chunks = -(-entries // _CHUNK)
    best = torch.empty(rows, chunks, count, dtype=torch.float32, device=values.device)
    at = torch.empty(rows, chunks, count, dtype=torch.int32, device=values.device)
    out = torch.empty(rows, count, dtype=torch.int64, device=values.device)
    flags = overlapping_launch(values.device)
    _top_of_chunks_kernel[(rows, chunks)](values, best, at, entries, COUNT=count, CHUNK=_CHUNK, num_warps=4, **flags)
    _top_of_row_kernel[(rows,)](
        best, at, out, chunks * count, COUNT=count, WIDTH=power_of_two(chunks * count), num_warps=1, **flags
    )
    return out


@jit
def _top_of_chunks_kernel(
    values_ptr, best_ptr, at_ptr, entries, COUNT: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < entries
    follow(PDL)
    left = tl.load(values_ptr + row * entries + column, mask=inside, other=float("-inf")).to(tl.float32)
    open = inside
    to = (row * tl.num_programs(1) + chunk) * COUNT
    for index in tl.static_range(COUNT):
        largest = tl.max(left, 0)
        first = tl.min(tl.where(open & (left == largest), column, 2147483647), 0)
        tl.store(best_ptr + to + index, largest)
        tl.store(at_ptr + to + index, first)
        open = open & (column != first)
        left = tl.where(open, left, float("-inf"))


@jit
def _top_of_row_kernel(
    best_ptr, at_ptr, out_ptr, candidates, COUNT: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    inside = place < candidates
    follow(PDL)
    left = tl.load(best_ptr + row * candidates + place, mask=inside, other=float("-inf"))
    # A chunk with fewer than COUNT entries gives the highest number for each that it lacks.
    at = tl.load(at_ptr + row * candidates + place, mask=inside, other=2147483647)
    for index in tl.static_range(COUNT):
        largest = tl.max(tl.where(at < 2147483647, left, float("-inf")), 0)
        first = tl.min(tl.where(left == largest, at, 2147483647), 0)
        tl.store(out_ptr + row * COUNT + index, tl.where(first == 2147483647, 0, first))
        at = tl.where(at == first, 2147483647, at)
