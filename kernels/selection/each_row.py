"""The top k of each row by itself, in Triton: a program holds a row in registers and searches for its threshold.

Weights are ordered as their bit patterns are, since none is negative. A key is a weight's bits, or -1 where there is no
entry.
"""

import torch
from torch import Tensor

from specahead.kernels.backends import follow, jit, overlapping_launch, power_of_two, tl
from specahead.kernels.threshold import Bounds, count_at_or_above, search

CHUNK = 8192  # entries of a row that a program holds, at most; fewer than 65,536
SAMPLE = 128  # entries of a row that are compared all with all
WARPS = 16  # of a program that holds CHUNK entries


def select_in_each_row(weights: Tensor, valid: Tensor, k: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the top k of each row, as `specahead.kernels.selection.select_top_k` describes it.

    weights: [rows, n] float32, contiguous, n at most CHUNK; valid, k: [rows] integers; width: of the lists
    Raises ValueError for weights that are not contiguous float32.
    """
    if weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(
            f"select_top_k: backend 'triton' needs contiguous float32 weights, got {weights.dtype} with strides "
            f"{weights.stride()}"
        )
    rows, n = weights.shape
    lists = torch.empty(rows, width, dtype=torch.int32, device=weights.device)
    counts = torch.empty(rows, dtype=torch.int32, device=weights.device)
    if rows:
        chunk = max(128, power_of_two(n))
        unit = 4 if n % 4 == 0 else 1
        _select_in_row_kernel[(rows,)](
            weights_ptr=weights,
            valid_ptr=valid.contiguous(),  # these may be one number, expanded
            k_ptr=k.contiguous(),
            lists_ptr=lists,
            counts_ptr=counts,
            n_units=n // unit,
            width=width,
            CHUNK=chunk,
            SAMPLE=min(SAMPLE, chunk),
            UNIT=unit,
            num_warps=min(WARPS, max(2, chunk // 512)),
            **overlapping_launch(weights.device),
        )
    return lists, counts


@jit
def _load_keys(values_ptr, at, size, UNIT: tl.constexpr):
    """Return the keys of the entries `at`, -1 from `size` on. Memory up to a multiple of UNIT entries is read."""
    value = tl.load(values_ptr + at, mask=at < (size + UNIT - 1) // UNIT * UNIT, other=0.0)
    return tl.where(at < size, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)  # -0.0 is 0.0


@jit
def _count_keys(key, probes):
    """Return how many keys are at or above each probe, as `search` takes amounts and numbers."""
    counts = count_at_or_above(key, probes)
    return counts, counts


@jit
def _guess(sample, share):
    """Return the keys between which a sample, compared all with all, has the threshold: 1.65 standard deviations each
    way. Where the sample says nothing, they are its least key above 0 and its greatest.
    """
    amount = tl.where(sample >= 0, 1.0, 0.0)
    reached = tl.sum(tl.where(sample[:, None] >= sample[None, :], amount[:, None], 0.0), 0)
    total = tl.sum(amount, 0)
    part = tl.where(reached - amount < share * total, 1.0 - share, share) * amount
    error = 1.65 * tl.sqrt(tl.sum(part * part, 0))
    least = tl.min(tl.where(sample > 0, sample, 0x7F800000), 0)
    first = tl.maximum(tl.max(tl.where(reached >= share * total + error, sample, 0), 0), least)
    last = tl.max(tl.where(reached >= tl.maximum(share * total - error, 1e-30), sample, 0), 0)
    return first, tl.maximum(last, first)


@jit
def _select_in_row_kernel(
    weights_ptr,
    valid_ptr,
    k_ptr,
    lists_ptr,
    counts_ptr,
    n_units,
    width,
    CHUNK: tl.constexpr,
    SAMPLE: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select from one row of n_units * UNIT entries, which the compiler knows to be a multiple of UNIT."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = n_units * UNIT
    weights_ptr += row * n
    size = tl.minimum(tl.load(valid_ptr + row).to(tl.int32), n)
    column = tl.arange(0, CHUNK)
    sampled = tl.arange(0, SAMPLE) * tl.maximum((size + SAMPLE - 1) // SAMPLE, 1)
    sample = _load_keys(weights_ptr, sampled, size, 1)
    key = _load_keys(weights_ptr, column, size, UNIT)
    wanted = tl.maximum(tl.minimum(tl.load(k_ptr + row).to(tl.int32), size), 0)
    first, last = _guess(sample, wanted.to(tl.float32) / tl.maximum(size, 1).to(tl.float32))
    # Key 0 is at or below every entry, `past` above all of them.
    zero = size * 0
    past = tl.maximum(tl.max(key, 0), 0) + 1
    first = tl.minimum(tl.maximum(first, 1), past - 1)
    last = tl.minimum(tl.maximum(last, 1), past - 1)
    third = (last - first) // 3
    probes = (first, first + third, last - third, last)
    bounds = Bounds(lo=zero, hi=past, at_lo=size, at_hi=zero, many_lo=size, many_hi=zero)
    bounds = search(_count_keys, key, probes, wanted, bounds, False)
    # Entries at or above `hi` are chosen. Those between the bounds tie, and the first ones are chosen.
    left = wanted - bounds.many_hi
    chosen = (key >= tl.where(left > 0, bounds.lo, bounds.hi)).to(tl.int32)
    if (left > 0) & (left < bounds.many_lo - bounds.many_hi):
        tied = ((key >= bounds.lo) & (key < bounds.hi)).to(tl.int32)
        chosen = tl.where((tied == 1) & (tl.cumsum(tied, 0) > left), 0, chosen)
    place = tl.where(chosen == 1, tl.cumsum(chosen, 0) - 1, width)
    tl.store(lists_ptr + row * width + place, column, mask=place < width)
    tl.store(counts_ptr + row, tl.minimum(wanted, width))
