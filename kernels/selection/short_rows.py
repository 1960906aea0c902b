"""Rows that fit a program's registers, a program each: a threshold is searched for on the weights' bits.

Weights order as their bit patterns do, since none is negative. A key is a weight's bits, -1 where there is none. A
search keeps `lo` and `hi`, keys that are reached by enough and by too little: reached is the number of keys at or above
it, or, of a nucleus, their weight. A state is a tuple (lo, hi, reached at lo, reached at hi, keys at or above lo, keys
at or above hi). Each pass looks how far four probes reach.
"""

import torch
from torch import Tensor

from specahead.kernels.backends import follow, jit, overlapping_launch, power_of_two, tl

CHUNK = 8192  # entries of a row that a program holds, at most 65535
SAMPLE = 128  # of these, compared all with all
WARPS = 16  # of a program that holds a chunk, at most


def select_short_rows(
    operation: str, weights: Tensor, valid: Tensor, k: Tensor | None, mass: float, width: int
) -> tuple[Tensor, Tensor]:
    """Return lists and counts as `kernels.selection` describes them: of the top k, or, where `k` is None, the nucleus.

    Rows have CHUNK entries at most. Raises ValueError, in the name of `operation`, if weights are not contiguous
    float32.
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
        unit = 4 if n % 4 == 0 else 1  # what the compiler is told that n is a multiple of
        valid = valid.contiguous()  # it may be one number, expanded
        _select_rows_kernel[(rows,)](
            *(weights, valid, valid if k is None else k.contiguous(), lists, counts, mass, n // unit, width),
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
    """Of entries `at` below `size`. What follows these up to a whole unit must be there, but does not count."""
    value = tl.load(values_ptr + at, mask=at < (size + UNIT - 1) // UNIT * UNIT, other=0.0)
    return tl.where(at < size, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)  # -0.0 is 0.0


@jit
def _worth_of(key, NUCLEUS: tl.constexpr):
    """What a key adds to what is reached."""
    worth = tl.where(key >= 0, 1.0, 0.0)
    if NUCLEUS:
        worth = tl.where(key > 0, key.to(tl.float32, bitcast=True), 0.0)
    return worth


@jit
def _tighten(probe, reached, count, wanted, state):
    """The state by one probe more; of several, in ascending order."""
    lo, hi, at_lo, at_hi, many_lo, many_hi = state
    enough = reached >= wanted
    lower = enough & (probe > lo)
    upper = (reached < wanted) & (probe < hi)
    lo = tl.where(lower, probe, lo)
    at_lo = tl.where(lower, reached, at_lo)
    many_lo = tl.where(lower, count, many_lo)
    hi = tl.where(upper, probe, hi)
    at_hi = tl.where(upper, reached, at_hi)
    many_hi = tl.where(upper, count, many_hi)
    return lo, hi, at_lo, at_hi, many_lo, many_hi


@jit
def _probe(part, lo, hi):
    probe = lo + ((hi - lo).to(tl.float32) * tl.minimum(tl.maximum(part, 0.0), 1.0)).to(tl.int32)
    return tl.minimum(tl.maximum(probe, lo + 1), hi - 1)


@jit
def _probes_of(wanted, state, turn):
    """Four probes: about where the threshold is if the keys between the bounds are spread evenly; else at fifths."""
    lo, hi, at_lo, at_hi, many_lo, many_hi = state
    share = (at_lo - wanted) / tl.maximum(at_lo - at_hi, 1e-30)
    spread = 1.0 / tl.sqrt(tl.maximum(many_lo - many_hi, 1).to(tl.float32))
    evenly = (spread > 0.33) | (turn == 2)
    first = tl.where(evenly, 0.2, share - 1.2 * spread)
    step = tl.where(evenly, 0.2, 0.8 * spread)
    return (
        _probe(first, lo, hi),
        _probe(first + step, lo, hi),
        _probe(first + 2 * step, lo, hi),
        _probe(first + 3 * step, lo, hi),
    )


@jit
def _is_open(wanted, state, NUCLEUS: tl.constexpr):
    """Whether the search has to go on: where nothing is wanted, or no entry has weight, it need not begin."""
    lo, hi, at_lo, _at_hi, many_lo, many_hi = state
    unmet = (at_lo > 0) if NUCLEUS else (at_lo != wanted) & (wanted > 0)
    return (hi - lo > 1) & (many_lo - many_hi > 1) & unmet


@jit
def _narrow(key, probes, wanted, state, NUCLEUS: tl.constexpr):
    """Search until no more than one weight lies between the bounds; probes: four, ascending, tried first."""
    tl.static_assert(key.shape[0] < 65536)
    turn = state[5] * 0
    p0, p1, p2, p3 = probes
    while _is_open(wanted, state, NUCLEUS):
        # Four counts in one sum: what costs is that all warps meet.
        below = tl.where(key >= p0, 1, 0) + tl.where(key >= p1, 65536, 0)
        above = tl.where(key >= p2, 1, 0) + tl.where(key >= p3, 65536, 0)
        counts = tl.sum(below.to(tl.int64) + (above.to(tl.int64) << 32), 0)
        tried = (p0, p1, p2, p3)
        for i in tl.static_range(4):
            count = ((counts >> (16 * i)) & 65535).to(tl.int32)
            reached = count.to(tl.float32)
            if NUCLEUS:  # a probe is more than 0: what is at or above it has the worth of its bits
                reached = tl.sum(tl.where(key >= tried[i], key.to(tl.float32, bitcast=True), 0.0), 0)
            state = _tighten(tried[i], reached, count, wanted, state)
        turn = tl.where(turn == 2, 0, turn + 1)  # every third time evenly: ties are not spread evenly at all
        p0, p1, p2, p3 = _probes_of(wanted, state, turn)
    return state


@jit
def _about(sample, share, NUCLEUS: tl.constexpr):
    """Where a sample, all compared with all, has the threshold, give or take 1.65 standard deviations.

    The least above 0 of the sample where it says nothing of what is below; its greatest likewise.
    """
    worth = _worth_of(sample, NUCLEUS)
    reached = tl.sum(tl.where(sample[:, None] >= sample[None, :], worth[:, None], 0.0), 0)
    held = tl.sum(worth, 0)
    weight = tl.where(reached - worth < share * held, 1.0 - share, share) * worth
    error = 1.65 * tl.sqrt(tl.sum(weight * weight, 0))
    least = tl.min(tl.where(sample > 0, sample, 0x7F800000), 0)
    first = tl.maximum(tl.max(tl.where(reached >= share * held + error, sample, 0), 0), least)
    last = tl.max(tl.where(reached >= tl.maximum(share * held - error, 1e-30), sample, 0), 0)
    return first, tl.maximum(last, first)


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
    PDL: tl.constexpr,
):
    """A row of at most CHUNK."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = n_units * UNIT
    weights_ptr += row * n
    size = tl.minimum(tl.load(valid_ptr + row).to(tl.int32), n)
    inner = tl.arange(0, CHUNK)
    some = tl.arange(0, SAMPLE) * tl.maximum((size + SAMPLE - 1) // SAMPLE, 1)
    sample = _load_keys(weights_ptr, some, size, 1)
    key = _load_keys(weights_ptr, inner, size, UNIT)
    if NUCLEUS:
        total = tl.sum(_worth_of(key, NUCLEUS), 0)
        wanted = mass * total
    else:
        total = size.to(tl.float32)
        wanted = tl.maximum(tl.minimum(tl.load(k_ptr + row).to(tl.int32), size), 0).to(tl.float32)
    first, last = _about(sample, wanted / tl.maximum(total, 1e-30), NUCLEUS)
    # Everything reaches 0, nothing what is past the greatest.
    zero = size * 0
    past = tl.maximum(tl.max(key, 0), 0) + 1
    p0 = tl.minimum(tl.maximum(first, 1), past - 1)
    p3 = tl.minimum(tl.maximum(last, 1), past - 1)
    third = (p3 - p0) // 3
    state = (zero, past, total, total * 0, size, zero)
    state = _narrow(key, (p0, p0 + third, p3 - third, p3), wanted, state, NUCLEUS)
    lo, hi, _at_lo, _at_hi, many_lo, many_hi = state
    # What is at or above `hi` is chosen; of what ties between the bounds, a nucleus has all, the top k the first ones.
    count = many_lo if NUCLEUS else wanted.to(tl.int32)
    left = count - many_hi
    chosen = (key >= tl.where(left > 0, lo, hi)).to(tl.int32)
    if (left > 0) & (left < many_lo - many_hi):
        tied = ((key >= lo) & (key < hi)).to(tl.int32)
        chosen = tl.where((tied == 1) & (tl.cumsum(tied, 0) > left), 0, chosen)
    place = tl.where(chosen == 1, tl.cumsum(chosen, 0) - 1, width)
    tl.store(lists_ptr + row * width + place, inner, mask=place < width)
    tl.store(counts_ptr + row, tl.minimum(count, width))
