"""From rows of block weights to compact, ascending block lists: top-k and nucleus.

Triton: one program a row. Weights order as their bit patterns do, since none is negative; a threshold is searched for
on these, sorting nothing: each pass looks how far four probes reach, first about where a sample has the threshold, then
about where it must be if the weights between the bounds are spread evenly. Rows that fit a program's registers are read
once. Of others a larger sample gives two bounds, and one pass puts aside what lies between them.
"""

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, power_of_two, tl

_CHUNK = 8192  # entries of a row that a program holds at a time
_SAMPLE = 128  # of these, compared all with all


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
        SAMPLE=min(_SAMPLE, chunk),
        ONE=n <= chunk,
        num_warps=min(16, max(2, chunk // 256)),
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
def _worth(key, NUCLEUS: tl.constexpr):
    """What a key adds to what is reached."""
    worth = tl.where(key >= 0, 1.0, 0.0)
    if NUCLEUS:
        worth = tl.where(key > 0, key.to(tl.float32, bitcast=True), 0.0)
    return worth


@jit
def _is_open(wanted, lo, hi, at_lo, many_lo, many_hi, few, NUCLEUS: tl.constexpr):
    is_open = (hi - lo > 1) & (many_lo - many_hi > few)
    if not NUCLEUS:
        is_open = is_open & (at_lo != wanted)
    return is_open


@jit
def _probes(wanted, lo, hi, at_lo, at_hi, many_lo, many_hi, turn):
    """Four: where the threshold is if the keys between the bounds are spread evenly, give or take; else at fifths."""
    each = tl.arange(0, 4).to(tl.float32)
    share = (at_lo - wanted) / tl.maximum(at_lo - at_hi, 1e-30)
    spread = 1.0 / tl.sqrt(tl.maximum(many_lo - many_hi, 1).to(tl.float32))
    evenly = (spread > 0.33) | (turn == 2)
    part = tl.where(evenly, (each + 1) * 0.2, share + (each - 1.5) * (0.8 * spread))
    part = tl.minimum(tl.maximum(part, 0.0), 1.0)
    probe = lo + ((hi - lo).to(tl.float32) * part).to(tl.int32)
    return tl.minimum(tl.maximum(probe, lo + 1), hi - 1)


@jit
def _narrow(
    key, probe, base, many, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi, few, NUCLEUS: tl.constexpr
):
    """Until no more than a few weights lie between the bounds.

    probe: [4], tried first; base, many: what keys that are not here reach, and their number
    """
    worth = _worth(key, NUCLEUS)
    turn = many_hi * 0
    while _is_open(wanted, lo, hi, at_lo, many_lo, many_hi, few, NUCLEUS):
        probe = tl.minimum(tl.maximum(probe, lo + 1), hi - 1)
        above = key[None, :] >= probe[:, None]
        count = many + tl.sum(above.to(tl.int32), 1)
        reached = count.to(tl.float32)
        if NUCLEUS:
            reached = base + tl.sum(tl.where(above, worth[None, :], 0.0), 1)
        # Both fall as probes rise, so that each bound has the most or the least of its side.
        enough = reached >= wanted
        lo = tl.max(tl.where(enough, probe, lo), 0)
        at_lo = tl.min(tl.where(enough, reached, at_lo), 0)
        many_lo = tl.min(tl.where(enough, count, many_lo), 0)
        hi = tl.min(tl.where(enough, hi, probe), 0)
        at_hi = tl.max(tl.where(enough, at_hi, reached), 0)
        many_hi = tl.max(tl.where(enough, many_hi, count), 0)
        turn = tl.where(turn == 2, 0, turn + 1)  # every third time evenly: ties are not spread evenly at all
        probe = _probes(wanted, lo, hi, at_lo, at_hi, many_lo, many_hi, turn)
    return lo, hi, at_lo, at_hi, many_lo, many_hi


@jit
def _guess(sample, share, NUCLEUS: tl.constexpr):
    """Four probes about where a sample, all compared with all, has the threshold: [4]."""
    worth = _worth(sample, NUCLEUS)
    reached = tl.sum(tl.where(sample[None, :] >= sample[:, None], worth[None, :], 0.0), 1)
    held = tl.sum(worth, 0)
    weight = tl.where(reached - worth < share * held, 1.0 - share, share) * worth
    error = tl.sqrt(tl.sum(weight * weight, 0))
    each = tl.arange(0, 4).to(tl.float32) - 1.5
    wanted = tl.maximum(share * held - each * (1.1 * error), 1e-30)
    return tl.max(tl.where(reached[None, :] >= wanted[:, None], sample[None, :], 0), 1)


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
    SAMPLE: tl.constexpr,
    ONE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weights_ptr += row * n
    lists_ptr += row * width
    size = tl.minimum(tl.load(valid_ptr + row).to(tl.int32), n)
    inner = tl.arange(0, CHUNK)
    zero = size * 0
    some = tl.arange(0, SAMPLE) * tl.maximum((size + SAMPLE - 1) // SAMPLE, 1)
    sample = _load_keys(weights_ptr, some, some < size)
    if ONE:
        key = _load_keys(weights_ptr, inner, inner < size)
        most = tl.maximum(tl.max(key, 0), 0)
    else:  # a larger sample, first
        stride = tl.maximum((size + CHUNK - 1) // CHUNK, 1)
        key = _load_keys(weights_ptr, inner * stride, inner * stride < size)
        most = zero + 0x7F800000
    total = tl.sum(_worth(key, NUCLEUS), 0)
    if NUCLEUS:
        wanted = mass * total
        share = zero.to(tl.float32) + mass
        choosing = size > 0
        if ONE:
            choosing = total > 0
    else:
        wanted = tl.minimum(tl.load(k_ptr + row).to(tl.int32), size).to(tl.float32)
        share = wanted / tl.maximum(size, 1).to(tl.float32)
        choosing = (wanted > 0) & (wanted < size.to(tl.float32))
    # Everything reaches 0, nothing what is past the greatest.
    lo = zero
    hi = most + 1
    at_lo = total
    at_hi = total * 0
    many_lo = size
    many_hi = zero
    if choosing:
        if ONE:
            probe = _guess(sample, share, NUCLEUS)
            lo, hi, at_lo, at_hi, many_lo, many_hi = _narrow(
                key, probe, total * 0, zero, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi, zero + 1, NUCLEUS
            )
        else:
            # What the sample says of the threshold, and how far from it that may be.
            taken = tl.sum((key >= 0).to(tl.int32), 0)
            few = zero + 32
            middle, _i0, _f0, _f1, _i1, _i2 = _narrow(
                key,
                _guess(sample, share, NUCLEUS),
                at_hi,
                zero,
                share * total,
                lo,
                hi,
                total,
                at_hi,
                taken,
                zero,
                few,
                NUCLEUS,
            )
            weight = tl.where(key >= middle, 1.0 - share, share) * _worth(key, NUCLEUS)
            margin = 3.5 * tl.sqrt(tl.sum(weight * weight, 0)) + 2.0 * total / tl.maximum(taken, 1).to(
                tl.float32
            )
            off = margin / tl.maximum(total, 1e-30)
            upper, _i0, _f0, _f1, _i1, _i2 = _narrow(
                key,
                _guess(sample, share + off, NUCLEUS),
                at_hi,
                zero,
                share * total + margin,
                lo,
                hi,
                total,
                at_hi,
                taken,
                zero,
                few,
                NUCLEUS,
            )
            _i0, lower, _f0, _f1, _i1, _i2 = _narrow(
                key,
                _guess(sample, tl.maximum(share - off, 0.0), NUCLEUS),
                at_hi,
                zero,
                share * total - margin,
                lo,
                hi,
                total,
                at_hi,
                taken,
                zero,
                few,
                NUCLEUS,
            )
            # `upper` is reached by more than enough, `lower` by less: between these bounds what there is is put aside.
            p0, p1 = upper, tl.maximum(lower, upper + 1)
            found = zero
            searching = zero + 1
            while searching == 1:
                both = tl.zeros([CHUNK], tl.int32)
                held = tl.zeros([CHUNK], tl.float32)
                held0 = tl.zeros([CHUNK], tl.float32)
                held1 = tl.zeros([CHUNK], tl.float32)
                found = zero
                for start in tl.range(0, size, CHUNK):
                    at = start + inner
                    here = _load_keys(weights_ptr, at, at < size)
                    member = ((here >= p0) & (here < p1)).to(tl.int32)
                    both += tl.where(here >= p1, 65536, 0) + member
                    if NUCLEUS:
                        worth = _worth(here, NUCLEUS)
                        held += worth
                        held0 += tl.where(here >= p0, worth, 0.0)
                        held1 += tl.where(here >= p1, worth, 0.0)
                    place = found + tl.cumsum(member, 0) - 1
                    put = (member > 0) & (place < CHUNK)
                    tl.store(aside_ptr + row * CHUNK + place, here.to(tl.float32, bitcast=True), mask=put)
                    found += tl.sum(member, 0)
                c1 = tl.sum(both >> 16, 0)
                c0 = c1 + found
                if NUCLEUS:
                    total = tl.sum(held, 0)
                    wanted = mass * total
                    s0, s1 = tl.sum(held0, 0), tl.sum(held1, 0)
                else:
                    s0, s1 = c0.to(tl.float32), c1.to(tl.float32)
                enough0, enough1 = s0 >= wanted, s1 >= wanted
                lo = tl.where(enough1, p1, tl.where(enough0, p0, lo))
                at_lo = tl.where(enough1, s1, tl.where(enough0, s0, at_lo))
                many_lo = tl.where(enough1, c1, tl.where(enough0, c0, many_lo))
                hi = tl.where(enough1, hi, tl.where(enough0, p1, p0))
                at_hi = tl.where(enough1, at_hi, tl.where(enough0, s1, s0))
                many_hi = tl.where(enough1, many_hi, tl.where(enough0, c1, c0))
                caught = enough0 & (s1 < wanted) & (found <= CHUNK)
                searching = tl.where(caught | (hi - lo <= 1), 0, 1)
                if NUCLEUS:
                    lo = tl.where(total > 0, lo, 0)  # of nothing, all
                    searching = tl.where(total > 0, searching, 0)
                third = tl.maximum((hi - lo) // 3, 1)
                fits = many_lo - many_hi <= CHUNK
                p0 = tl.where(fits, lo, lo + third)
                p1 = tl.where(fits, hi, tl.maximum(hi - third, lo + third + 1))
            if (found <= CHUNK) & (hi - lo > 1) & (total > 0):
                tl.debug_barrier()
                rest = _load_keys(aside_ptr + row * CHUNK, inner, inner < found)
                probe = _probes(wanted, lo, hi, at_lo, at_hi, many_lo, many_hi, zero)
                lo, hi, at_lo, at_hi, many_lo, many_hi = _narrow(
                    rest,
                    probe,
                    at_hi,
                    many_hi,
                    wanted,
                    lo,
                    hi,
                    at_lo,
                    at_hi,
                    many_lo,
                    many_hi,
                    zero + 1,
                    NUCLEUS,
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
