"""Rows that fit a program's registers, a program each: each pass looks how far four probes reach."""

from torch import Tensor

from kernels.backends import jit, power_of_two, tl
from kernels.selection.search import (
    about,
    aim,
    count_keys,
    load_keys,
    narrow,
    unit_of,
    without_choice,
    worth_of,
    write_list,
)

CHUNK = 8192  # entries of a row that a program holds at a time, at most 65535; longer rows are shared out
SAMPLE = 128  # of these, compared all with all
WARPS = 16  # of a program that holds a chunk, at most


def select_short_rows(
    weights: Tensor, valid: Tensor, k: Tensor, mass: float | None, lists: Tensor, counts: Tensor
) -> None:
    """Fill `lists` and `counts`; mass: of the nucleus, None for the top k. Rows have CHUNK entries at most."""
    rows, n = weights.shape
    chunk, unit = max(128, power_of_two(n)), unit_of(n)
    _select_rows_kernel[(rows,)](
        *(weights, valid, k, lists, counts, 0.0 if mass is None else mass, n // unit, lists.shape[1]),
        NUCLEUS=mass is not None,
        CHUNK=chunk,
        SAMPLE=min(SAMPLE, chunk),
        UNIT=unit,
        num_warps=min(WARPS, max(2, chunk // 256)),
    )


@jit
def _select_rows_kernel(
    weights_ptr,
    valid_ptr,
    k_ptr,
    lists_ptr,
    counts_ptr,
    mass,
    n_units,
    width,
    NUCLEUS: tl.constexpr,
    CHUNK: tl.constexpr,
    SAMPLE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """A row of at most CHUNK."""
    row = tl.program_id(0).to(tl.int64)
    n = n_units * UNIT
    weights_ptr += row * n
    size = tl.minimum(tl.load(valid_ptr + row).to(tl.int32), n)
    inner = tl.arange(0, CHUNK)
    some = tl.arange(0, SAMPLE) * tl.maximum((size + SAMPLE - 1) // SAMPLE, 1)
    sample = load_keys(weights_ptr, some, size, 1)
    key = load_keys(weights_ptr, inner, size, UNIT)
    total = size.to(tl.float32)
    if NUCLEUS:
        total = tl.sum(worth_of(key, NUCLEUS), 0)
    wanted, choosing = aim(k_ptr, row, size, total, mass, NUCLEUS)
    share = wanted / tl.maximum(total, 1e-30)
    # Everything reaches 0, nothing what is past the greatest.
    zero = size * 0
    lo = zero
    hi = tl.maximum(tl.max(key, 0), 0) + 1
    many_hi = zero
    left = zero
    if choosing:
        first, last = about(sample, share, 1.65, 0.0, NUCLEUS)
        p0 = tl.minimum(tl.maximum(first, 1), hi - 1)
        p3 = tl.minimum(tl.maximum(last, 1), hi - 1)
        third = (p3 - p0) // 3
        probes = (p0, p0 + third, p3 - third, p3)
        state = (lo, hi, total, total * 0, size, zero)
        lo, hi, _at_lo, _at_hi, _many_lo, many_hi = narrow(key, probes, total * 0, zero, wanted, state, NUCLEUS)
        if NUCLEUS:
            hi = lo  # with all that tie
        else:
            left = wanted.to(tl.int32) - many_hi
    else:
        lo = without_choice(wanted, NUCLEUS)
        hi = lo
    sure, ties = count_keys(key, lo, hi)
    write_list(lists_ptr + row * width, inner, key, lo, hi, zero, zero, ties, left, width)
    tl.store(counts_ptr + row, tl.minimum(sure + tl.minimum(ties, left), width))
