"""From rows of block weights to compact, ascending block lists: top-k and nucleus.

Triton: one program a row. Weights order as their bit patterns do, since none is negative; a threshold is found by
bisection on these, sorting nothing: each pass looks how far three probes reach, one in the middle and two about where
the threshold must be if the weights between are spread evenly. Rows that fit a program's registers are read once.
Of others a sample says where to probe, and what is left between the probes is put aside.
"""

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, power_of_two, tl

_CHUNK = 8192  # entries of a row that a program holds at a time


def select_top_k(
    weights: Tensor, valid: Tensor, k: Tensor, backend: str = "torch", width: int | None = None
) -> tuple[Tensor, Tensor]:
    """The `k` heaviest entries of each row among its first `valid` ones; ties go to the lower index.

    weights: [rows, n] float, not negative, infinity the heaviest; for `triton` float32, contiguous
    valid, k: [rows] int32 or int64; a k beyond `valid` selects all
    width: of the lists, at least the greatest count; None: that count, or n for `triton`, which does not wait for it
    Returns lists [rows, width] int32 ascending, and counts [rows] int32; entries past the count say nothing.
    """
    check_backend("select_top_k", backend, ("torch", "triton"))
    if backend == "triton":
        return _select_rows("select_top_k", weights, valid, k, None, width)
    return compact(top_k_mask(weights, valid, k), width)


def top_k_mask(weights: Tensor, valid: Tensor, k: Tensor) -> Tensor:
    """`select_top_k` as bool [rows, n]."""
    if weights.device.type == "cpu" and not bool((weights >= 0).all()):
        raise ValueError("select_top_k: weights must not be negative nor NaN")
    columns = torch.arange(weights.shape[1], device=weights.device)
    ranked = weights.where(columns < valid[:, None], -1.0)
    order = ranked.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, columns.expand_as(order))
    return (rank < torch.minimum(k, valid)[:, None]) & (columns < valid[:, None])


def select_nucleus(
    weights: Tensor,
    valid: Tensor,
    mass: float,
    iterations: int = 24,
    backend: str = "torch",
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The entries at or above a threshold that leaves at least `mass` of each row's total weight.

    Sorting-free (SpecAttn, Algorithm 2): bisection on the threshold. The lower bound is returned, so the
    selection never holds less than `mass`. Arguments and result as for `select_top_k`; 0 < mass <= 1.
    iterations: of `torch`; `triton` goes on until no weight lies between the bounds, and adds in float32.
    """
    check_backend("select_nucleus", backend, ("torch", "triton"))
    if backend == "triton":
        _check_mass(mass)
        return _select_rows("select_nucleus", weights, valid, None, mass, width)
    return compact(nucleus_mask(weights, valid, mass, iterations), width)


def nucleus_mask(weights: Tensor, valid: Tensor, mass: float, iterations: int = 24) -> Tensor:
    """`select_nucleus` as bool [rows, n]."""
    if weights.device.type == "cpu" and not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ValueError("select_nucleus: weights must be finite and not negative")
    _check_mass(mass)
    inside = torch.arange(weights.shape[1], device=weights.device) < valid[:, None]
    masked = weights.double().where(inside, 0)
    wanted = mass * masked.sum(1)
    low, high = torch.zeros_like(wanted), masked.amax(1) if masked.shape[1] else torch.zeros_like(wanted)
    for _ in range(iterations):
        middle = (low + high) / 2
        enough = masked.where(masked >= middle[:, None], 0).sum(1) >= wanted
        low, high = middle.where(enough, low), high.where(enough, middle)
    return inside & (masked >= low[:, None])


def compact(chosen: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Bool [rows, n] to ascending lists [rows, width] int32 padded with 0, and counts [rows] int32.

    width: at least the greatest count, which it is if None.
    """
    counts = chosen.sum(1, dtype=torch.int32)
    if width is None:
        width = int(counts.max()) if counts.numel() else 0
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :width].to(torch.int32)
    order = torch.nn.functional.pad(order, (0, width - order.shape[1]))
    return order.where(torch.arange(width, device=chosen.device) < counts[:, None], 0), counts


def _check_mass(mass: float) -> None:
    if not 0 < mass <= 1:
        raise ValueError(f"select_nucleus: mass must lie in (0, 1], got {mass}")


def _select_rows(
    operation: str, weights: Tensor, valid: Tensor, k: Tensor | None, mass: float | None, width: int | None
) -> tuple[Tensor, Tensor]:
    if weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(
            f"{operation}: backend 'triton' needs contiguous float32 weights, got {weights.dtype} with strides "
            f"{weights.stride()}"
        )
    rows, n = weights.shape
    width = n if width is None else width
    lists = torch.empty(rows, width, dtype=torch.int32, device=weights.device)
    counts = torch.empty(rows, dtype=torch.int32, device=weights.device)
    if not rows:
        return lists, counts
    chunk = min(_CHUNK, max(128, power_of_two(n)))
    aside = weights if n <= chunk else torch.empty(rows, chunk, dtype=torch.float32, device=weights.device)
    _select_rows_kernel[(rows,)](
        weights,
        valid.contiguous(),  # they may be one number, expanded
        (valid if k is None else k).contiguous(),
        aside,
        lists,
        counts,
        0.0 if mass is None else mass,
        n,
        width,
        NUCLEUS=mass is not None,
        CHUNK=chunk,
        ONE=n <= chunk,
        num_warps=min(16, max(2, chunk // 512)),
    )
    return lists, counts


# A key is a weight's bits, -1 where there is none. A search keeps `lo` and `hi`, keys that are reached by enough and
# by too little: reached is the number of keys at or above it, or, of a nucleus, their weight. States are tuples
# (lo, hi, reached at lo, reached at hi, keys at or above lo, keys at or above hi).


@jit
def _load_keys(values_ptr, at, inside):
    value = tl.load(values_ptr + at, mask=inside, other=-1.0)
    return tl.where(inside, tl.where(value == 0, 0, value.to(tl.int32, bitcast=True)), -1)


@jit
def _add_3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@jit
def _reach(key, p0, p1, p2, NUCLEUS: tl.constexpr):
    """Of the keys at or above each probe their number, and what they reach."""
    above0, above1, above2 = key >= p0, key >= p1, key >= p2
    c0, c1, c2 = tl.reduce((above0.to(tl.int32), above1.to(tl.int32), above2.to(tl.int32)), 0, _add_3)
    if NUCLEUS:
        weight = key.to(tl.float32, bitcast=True)
        s0, s1, s2 = tl.reduce(
            (tl.where(above0, weight, 0.0), tl.where(above1, weight, 0.0), tl.where(above2, weight, 0.0)),
            0,
            _add_3,
        )
    else:
        s0, s1, s2 = c0.to(tl.float32), c1.to(tl.float32), c2.to(tl.float32)
    return c0, c1, c2, s0, s1, s2


@jit
def _enter(probe, reached, count, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi):
    """Take a probe in as the new lower or upper bound, if it is nearer."""
    up = (reached >= wanted) & (probe > lo)
    down = (reached < wanted) & (probe < hi)
    lo = tl.where(up, probe, lo)
    at_lo = tl.where(up, reached, at_lo)
    many_lo = tl.where(up, count, many_lo)
    hi = tl.where(down, probe, hi)
    at_hi = tl.where(down, reached, at_hi)
    many_hi = tl.where(down, count, many_hi)
    return lo, hi, at_lo, at_hi, many_lo, many_hi


@jit
def _probes(wanted, lo, hi, at_lo, at_hi, many_lo, many_hi):
    """The middle, and two where the threshold is if the keys between the bounds are spread evenly, give or take."""
    span = hi - lo
    share = (at_lo - wanted) / tl.maximum(at_lo - at_hi, 1e-30)
    spread = 1.5 / tl.sqrt(tl.maximum(many_lo - many_hi, 1).to(tl.float32))
    p0 = lo + (span.to(tl.float32) * tl.maximum(share - spread, 0.0)).to(tl.int32)
    p1 = lo + span // 2
    p2 = lo + (span.to(tl.float32) * tl.minimum(share + spread, 1.0)).to(tl.int32)
    return tl.maximum(p0, lo + 1), tl.maximum(p1, lo + 1), tl.minimum(tl.maximum(p2, lo + 1), hi - 1)


@jit
def _is_open(wanted, lo, hi, at_lo, many_lo, many_hi, NUCLEUS: tl.constexpr):
    is_open = (hi - lo > 1) & (many_lo - many_hi > 1)
    if not NUCLEUS:
        is_open = is_open & (at_lo != wanted)
    return is_open


@jit
def _narrow(key, base, many, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi, NUCLEUS: tl.constexpr):
    """Until no more than one weight lies between the bounds. base, many: what keys that are not here reach."""
    while _is_open(wanted, lo, hi, at_lo, many_lo, many_hi, NUCLEUS):
        p0, p1, p2 = _probes(wanted, lo, hi, at_lo, at_hi, many_lo, many_hi)
        c0, c1, c2, s0, s1, s2 = _reach(key, p0, p1, p2, NUCLEUS)
        lo, hi, at_lo, at_hi, many_lo, many_hi = _enter(
            p0, s0 + base, c0 + many, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi
        )
        lo, hi, at_lo, at_hi, many_lo, many_hi = _enter(
            p1, s1 + base, c1 + many, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi
        )
        lo, hi, at_lo, at_hi, many_lo, many_hi = _enter(
            p2, s2 + base, c2 + many, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi
        )
    return lo, hi, at_lo, at_hi, many_lo, many_hi


@jit
def _reach_row(values_ptr, size, p0, p1, p2, NUCLEUS: tl.constexpr, CHUNK: tl.constexpr):
    """`_reach` of a whole row in memory."""
    c0, c1, c2, s0, s1, s2 = 0, 0, 0, 0.0, 0.0, 0.0
    for start in tl.range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        d0, d1, d2, t0, t1, t2 = _reach(_load_keys(values_ptr, at, at < size), p0, p1, p2, NUCLEUS)
        c0 += d0
        c1 += d1
        c2 += d2
        s0 += t0
        s1 += t1
        s2 += t2
    return c0, c1, c2, s0, s1, s2


@jit
def _select_rows_kernel(
    weights_ptr,
    valid_ptr,
    k_ptr,
    aside_ptr,
    lists_ptr,
    counts_ptr,
    mass,
    n,
    width,
    NUCLEUS: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weights_ptr += row * n
    lists_ptr += row * width
    size = tl.minimum(tl.load(valid_ptr + row).to(tl.int32), n)
    inner = tl.arange(0, CHUNK)
    zero = size * 0
    key = _load_keys(weights_ptr, inner, inner < size)
    # Everything reaches 0, nothing what is past infinity.
    if ONE:
        total, most = tl.sum(tl.where(key > 0, key.to(tl.float32, bitcast=True), 0.0), 0), tl.max(key, 0)
    else:
        _i0, _i1, _i2, total, _f0, _f1 = _reach_row(weights_ptr, size, zero, zero, zero, NUCLEUS, CHUNK)
        most = zero + 0x7F800000
    if NUCLEUS:
        wanted = mass * total
        choosing = wanted > 0
    else:
        total = size.to(tl.float32)
        wanted = tl.minimum(tl.load(k_ptr + row).to(tl.int32), size).to(tl.float32)
        choosing = (wanted > 0) & (wanted < total)
    lo = zero
    hi = tl.maximum(most, 0) + 1
    at_lo = total
    at_hi = total * 0
    many_lo = size
    many_hi = zero
    if choosing:
        if ONE:
            lo, hi, at_lo, at_hi, many_lo, many_hi = _narrow(
                key, total * 0, zero, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi, NUCLEUS
            )
        else:
            # What a sample says of the threshold is tried first; then the row is probed until a chunk holds the rest.
            stride = size // CHUNK + 1
            sample = _load_keys(weights_ptr, inner * stride, inner * stride < size)
            taken, _i0, _i1, held, _f0, _f1 = _reach(sample, zero, zero, zero, NUCLEUS)
            about = wanted / total * held
            margin = 3.0 * tl.sqrt(tl.minimum(about, held - about)) + 2
            if NUCLEUS:
                margin = 0.03 * held
            upper, _i0, _f0, _f1, _i1, _i2 = _narrow(
                sample, total * 0, zero, about + margin, zero, hi, held, at_hi, taken, zero, NUCLEUS
            )
            lower, _i0, _f0, _f1, _i1, _i2 = _narrow(
                sample,
                total * 0,
                zero,
                tl.maximum(about - margin, 1e-30),
                zero,
                hi,
                held,
                at_hi,
                taken,
                zero,
                NUCLEUS,
            )
            p0, p1, p2 = tl.maximum(upper, 1), tl.maximum(lower + 1, 1), tl.maximum(lower + 1, 1)
            searching = 1
            while searching == 1:
                c0, c1, c2, s0, s1, s2 = _reach_row(weights_ptr, size, p0, p1, p2, NUCLEUS, CHUNK)
                lo, hi, at_lo, at_hi, many_lo, many_hi = _enter(
                    p0, s0, c0, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi
                )
                lo, hi, at_lo, at_hi, many_lo, many_hi = _enter(
                    p1, s1, c1, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi
                )
                lo, hi, at_lo, at_hi, many_lo, many_hi = _enter(
                    p2, s2, c2, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi
                )
                searching = tl.where((many_lo - many_hi > CHUNK) & (hi - lo > 1), 1, 0)
                p0, p1, p2 = _probes(wanted, lo, hi, at_lo, at_hi, many_lo, many_hi)
            if (many_lo - many_hi <= CHUNK) & (hi - lo > 1):
                found = zero
                for start in tl.range(0, size, CHUNK):
                    at = start + inner
                    here = _load_keys(weights_ptr, at, at < size)
                    member = (here >= lo) & (here < hi)
                    place = found + tl.cumsum(member.to(tl.int32), 0) - 1
                    tl.store(aside_ptr + row * CHUNK + place, here.to(tl.float32, bitcast=True), mask=member)
                    found += tl.sum(member.to(tl.int32), 0)
                tl.debug_barrier()
                rest = _load_keys(aside_ptr + row * CHUNK, inner, inner < found)
                lo, hi, at_lo, at_hi, many_lo, many_hi = _narrow(
                    rest, at_hi, many_hi, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi, NUCLEUS
                )
        if NUCLEUS:
            hi = lo  # with all that tie
    else:  # all, or nothing
        if not NUCLEUS:
            lo = tl.where(wanted > 0, 0, 0x7F800001)  # past infinity
        hi = lo
    # Of the keys between the bounds, which are equal unless all are wanted, the first ones.
    left = tl.where(hi > lo, wanted.to(tl.int32) - many_hi, 0)
    sure = zero
    ties = zero
    for start in tl.range(0, size, CHUNK):
        if not ONE:
            key = _load_keys(weights_ptr, start + inner, start + inner < size)
        tied = (key >= lo) & (key < hi)
        both = ((key >= hi) & (key >= 0)).to(tl.int32) + tied.to(tl.int32) * 65536  # two counts in one scan
        before = tl.cumsum(both, 0) - both
        tied_before = ties + (before >> 16)
        place = sure + (before & 65535) + tl.minimum(tied_before, left)
        chosen = ((key >= hi) & (key >= 0)) | (tied & (tied_before < left))
        tl.store(lists_ptr + place, start + inner, mask=chosen & (place < width))
        total_both = tl.sum(both, 0)
        sure += total_both & 65535
        ties += total_both >> 16
    tl.store(counts_ptr + row, tl.minimum(sure + tl.minimum(ties, left), width))
