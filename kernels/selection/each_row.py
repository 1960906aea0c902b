"""Top-k or nucleus of each row by itself, in Triton: a program holds a row in registers and searches for its threshold.

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


def select_in_each_row(
    operation: str, weights: Tensor, valid: Tensor, k: Tensor | None, mass: float, width: int
) -> tuple[Tensor, Tensor]:
    """Return the top k of each row or, where `k` is None, its nucleus, as `specahead.kernels.selection` describes both.

    weights: [rows, n] float32, contiguous, n at most CHUNK; valid, k: [rows] integers; width: of the lists
    Raises ValueError, in the name of `operation`, for weights that are not contiguous float32.
    """
    if weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(
            f"{operation}: backend 'triton' needs contiguous float32 weights, got {weights.dtype} with strides "
            f"{weights.stride()}"
        )
    rows, n = weights.shape
    lists = torch.empty(rows, width, dtype=torch.int32, device=weights.device)
    counts = torch.empty(rows, dtype=torch.int32, device=weights.device)
    if rows:
        chunk = max(128, power_of_two(n))
        unit = 4 if n % 4 == 0 else 1
        valid = valid.contiguous()  # it may be one number, expanded
        wanted = valid if k is None else k.contiguous()
        _select_in_row_kernel[(rows,)](
            *(weights, valid, wanted, lists, counts, mass, n // unit, width),
            NUCLEUS=k is None,
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
def _amount_of(key, NUCLEUS: tl.constexpr):
    """Return what each key adds to an amount: its weight in a nucleus, else 1."""
    return tl.where(key > 0, key.to(tl.float32, bitcast=True), 0.0) if NUCLEUS else tl.where(key >= 0, 1.0, 0.0)


@jit
def _count_keys(key, probes):
    """Measure a top k for `search`."""
    counts = count_at_or_above(key, probes)
    return counts, counts


@jit
def _weigh_keys(key, probes):
    """Measure a nucleus for `search`. Probes are above 0, where a key's bits are its weight."""
    weight = key.to(tl.float32, bitcast=True)
    reached = (
        tl.sum(tl.where(key >= probes[0], weight, 0.0), 0),
        tl.sum(tl.where(key >= probes[1], weight, 0.0), 0),
        tl.sum(tl.where(key >= probes[2], weight, 0.0), 0),
        tl.sum(tl.where(key >= probes[3], weight, 0.0), 0),
    )
    return reached, count_at_or_above(key, probes)


@jit
def _guess(sample, share, NUCLEUS: tl.constexpr):
    """Return the keys between which a sample, compared all with all, has the threshold: 1.65 standard deviations each
    way. Where the sample says nothing, they are its least key above 0 and its greatest.
    """
    amount = _amount_of(sample, NUCLEUS)
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
    mass,
    n_units,
    width,
    NUCLEUS: tl.constexpr,
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
    if NUCLEUS:
        total = tl.sum(_amount_of(key, NUCLEUS), 0)
        wanted = mass * total
        share = wanted / tl.maximum(total, 1e-30)
    else:
        total = size
        wanted = tl.maximum(tl.minimum(tl.load(k_ptr + row).to(tl.int32), size), 0)
        share = wanted.to(tl.float32) / tl.maximum(total, 1).to(tl.float32)
    first, last = _guess(sample, share, NUCLEUS)
    # Key 0 is at or below every entry, `past` above all of them.
    zero = size * 0
    past = tl.maximum(tl.max(key, 0), 0) + 1
    first = tl.minimum(tl.maximum(first, 1), past - 1)
    last = tl.minimum(tl.maximum(last, 1), past - 1)
    third = (last - first) // 3
    probes = (first, first + third, last - third, last)
    bounds = Bounds(lo=zero, hi=past, at_lo=total, at_hi=total * 0, many_lo=size, many_hi=zero)
    if NUCLEUS:
        bounds = search(_weigh_keys, key, probes, wanted, bounds, True)
    else:
        bounds = search(_count_keys, key, probes, wanted, bounds, False)
    # Entries at or above `hi` are chosen. Those between the bounds tie: a nucleus takes all, a top k the first ones.
    count = bounds.many_lo if NUCLEUS else wanted
    left = count - bounds.many_hi
    chosen = (key >= tl.where(left > 0, bounds.lo, bounds.hi)).to(tl.int32)
    if (left > 0) & (left < bounds.many_lo - bounds.many_hi):
        tied = ((key >= bounds.lo) & (key < bounds.hi)).to(tl.int32)
        chosen = tl.where((tied == 1) & (tl.cumsum(tied, 0) > left), 0, chosen)
    place = tl.where(chosen == 1, tl.cumsum(chosen, 0) - 1, width)
    tl.store(lists_ptr + row * width + place, column, mask=place < width)
    tl.store(counts_ptr + row, tl.minimum(count, width))
