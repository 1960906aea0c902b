"""From rows of block weights to compact, ascending block lists: top-k and nucleus.

Triton: weights order as their bit patterns do, since none is negative; a threshold is searched for on these, sorting
nothing: each pass looks how far four probes reach, first about where a sample has the threshold, then about where it
must be if the weights between the bounds are spread evenly. Rows that fit a program's registers have one program each.
Longer ones are shared out: pivots, ranked in a sample of a row, bound its threshold; programs that each have a span of
it count what is above the bounds and put aside what is between, one searches that, and the spans' programs write.
"""

import torch
from torch import Tensor

from kernels.backends import check_backend, follow, jit, overlapping_launch, power_of_two, tl

_CHUNK = 8192  # entries of a row that a program holds at a time, at most 65535; longer rows are shared out
_SAMPLE = 128  # of these, compared all with all
_WARPS = 16  # of a program that holds a chunk, at most
# Of rows that are shared out.
_SPAN = 2048  # entries a program
_PIVOTS = 16  # ranked by a program
_PARTS = 2  # programs that rank a row's pivots
_RANKED_IN = 4096  # entries of a sample, at most
_SPREAD = 3.5  # standard deviations of the sample between the threshold and its bounds
_ASIDE = 16384  # entries between the bounds, at most


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
    valid = valid.contiguous()  # it may be one number, expanded
    k = valid if k is None else k.contiguous()
    if n > _CHUNK:
        _share_out(weights, valid, k, mass, lists, counts)
        return lists, counts
    chunk = max(128, power_of_two(n))
    unit = _unit(n)
    _select_rows_kernel[(rows,)](
        weights,
        valid,
        k,
        lists,
        counts,
        0.0 if mass is None else mass,
        n // unit,
        width,
        NUCLEUS=mass is not None,
        CHUNK=chunk,
        SAMPLE=min(_SAMPLE, chunk),
        UNIT=unit,
        num_warps=min(_WARPS, max(2, chunk // 256)),
    )
    return lists, counts


def _share_out(
    weights: Tensor, valid: Tensor, k: Tensor, mass: float | None, lists: Tensor, counts: Tensor
) -> None:
    """Rows of more than a chunk: bounds from a sample, what lies between them, the threshold, the lists."""
    rows, n = weights.shape
    device, nucleus, unit = weights.device, mass is not None, _unit(n)
    long = power_of_two(n)
    span = min(_SPAN, _CHUNK)
    spans = -(-n // span)
    room = min(_ASIDE, max(_CHUNK // 2, long // 4))
    # A sixteenth of a row: then, by simulation, an eighth at most lies between the bounds, of heavy tails more.
    sample = min(_RANKED_IN, _CHUNK, max(128, long // 16))
    warps = max(1, span // 512)
    bounds = torch.empty(rows, 2, _PARTS, dtype=torch.int32, device=device)
    told = torch.empty(2, rows, power_of_two(spans), dtype=torch.int64, device=device)
    sums = torch.empty(rows, 3, spans if nucleus else 0, dtype=torch.float32, device=device)
    aside = torch.empty(rows, room, dtype=torch.float32, device=device)
    state = torch.empty(rows, 3, dtype=torch.int32, device=device)
    share = 0.0 if mass is None else mass
    overlap = overlapping_launch(device)
    _bracket_kernel[(rows, _PARTS)](
        weights,
        valid,
        k,
        bounds,
        told,
        share,
        n // unit,
        NUCLEUS=nucleus,
        FEW=min(_SAMPLE, sample),
        SAMPLE=sample,
        PIECE=min(512, sample),
        PIVOTS=_PIVOTS,
        PARTS=_PARTS,
        SPREAD=_SPREAD,
        SPANS=power_of_two(spans),
        UNIT=unit,
        num_warps=4,  # each reads all of the sample
        **overlap,
    )
    _put_aside_kernel[(rows, spans)](
        weights,
        valid,
        bounds,
        told,
        sums,
        aside,
        n // unit,
        NUCLEUS=nucleus,
        SPAN=span,
        PARTS=_PARTS,
        SPANS=power_of_two(spans),
        ROOM=room,
        UNIT=unit,
        num_warps=warps,
        **overlap,
    )
    _threshold_kernel[(rows,)](
        weights,
        valid,
        k,
        bounds,
        told,
        sums,
        aside,
        state,
        share,
        n // unit,
        spans,
        NUCLEUS=nucleus,
        SPAN=span,
        PARTS=_PARTS,
        SPANS=power_of_two(spans),
        ROOM=room,
        UNIT=unit,
        num_warps=min(_WARPS, max(2, room // 512)),
        **overlap,
    )
    _emit_kernel[(rows, spans)](
        weights,
        valid,
        state,
        told[1],
        lists,
        counts,
        n // unit,
        lists.shape[1],
        SPAN=span,
        SPANS=power_of_two(spans),
        UNIT=unit,
        num_warps=warps,
        **overlap,
    )


def _unit(n: int) -> int:
    """What the compiler is told that a row's length is a multiple of: entries that can be loaded at once."""
    return 4 if n % 4 == 0 else 1


# A key is a weight's bits, -1 where there is none. A search keeps `lo` and `hi`, keys that are reached by enough and
# by too little: reached is the number of keys at or above it, or, of a nucleus, their weight. States are tuples
# (lo, hi, reached at lo, reached at hi, keys at or above lo, keys at or above hi).


@jit
def _load_keys(values_ptr, at, size, UNIT: tl.constexpr):
    """Of entries `at` below `size`. What follows these up to a whole unit must be there, but does not count."""
    value = tl.load(values_ptr + at, mask=at < (size + UNIT - 1) // UNIT * UNIT, other=0.0)
    return tl.where(at < size, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)  # -0.0 is 0.0


@jit
def _worth(key, NUCLEUS: tl.constexpr):
    """What a key adds to what is reached."""
    worth = tl.where(key >= 0, 1.0, 0.0)
    if NUCLEUS:
        worth = tl.where(key > 0, key.to(tl.float32, bitcast=True), 0.0)
    return worth


@jit
def _aim(k_ptr, row, size, total, mass, NUCLEUS: tl.constexpr):
    """What is to be reached, and whether there is a choice; total: of all, of a nucleus."""
    if NUCLEUS:
        wanted = mass * total
        choosing = total > 0
    else:
        wanted = tl.minimum(tl.load(k_ptr + row).to(tl.int32), size).to(tl.float32)
        choosing = (wanted > 0) & (wanted < size.to(tl.float32))
    return wanted, choosing


@jit
def _without_choice(wanted, NUCLEUS: tl.constexpr):
    """The threshold where all or nothing is chosen; of no weight at all, all."""
    lo = (wanted * 0).to(tl.int32)
    if not NUCLEUS:
        lo = tl.where(wanted > 0, 0, 0x7F800001)  # past infinity
    return lo


@jit
def _is_open(wanted, lo, hi, at_lo, many_lo, many_hi, NUCLEUS: tl.constexpr):
    is_open = (hi - lo > 1) & (many_lo - many_hi > 1)
    if not NUCLEUS:
        is_open = is_open & (at_lo != wanted)
    return is_open


@jit
def _tighten(probe, reached, count, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi):
    """The bounds by one probe more; of several, in ascending order."""
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
def _probes(wanted, lo, hi, at_lo, at_hi, many_lo, many_hi, turn):
    """Four: where the threshold is if the keys between the bounds are spread evenly, give or take; else at fifths."""
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
def _reached(key, probe, base, count, NUCLEUS: tl.constexpr):
    """probe: more than 0, so that what is at or above it has the worth of its bits"""
    reached = count.to(tl.float32)
    if NUCLEUS:
        reached = base + tl.sum(tl.where(key >= probe, key.to(tl.float32, bitcast=True), 0.0), 0)
    return reached


@jit
def _narrow(
    key, p0, p1, p2, p3, base, many, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi, NUCLEUS: tl.constexpr
):
    """Until no more than one weight lies between the bounds.

    p0 … p3: tried first, ascending; base, many: what keys that are not here reach, and their number
    """
    tl.static_assert(key.shape[0] < 65536)
    turn = many_hi * 0
    while _is_open(wanted, lo, hi, at_lo, many_lo, many_hi, NUCLEUS):
        # Four counts in one sum: what costs is that all warps meet.
        below = tl.where(key >= p0, 1, 0) + tl.where(key >= p1, 65536, 0)
        above = tl.where(key >= p2, 1, 0) + tl.where(key >= p3, 65536, 0)
        counts = tl.sum(below.to(tl.int64) + (above.to(tl.int64) << 32), 0)
        n0 = many + (counts & 65535).to(tl.int32)
        n1 = many + ((counts >> 16) & 65535).to(tl.int32)
        n2 = many + ((counts >> 32) & 65535).to(tl.int32)
        n3 = many + ((counts >> 48) & 65535).to(tl.int32)
        r0 = _reached(key, p0, base, n0, NUCLEUS)
        r1 = _reached(key, p1, base, n1, NUCLEUS)
        r2 = _reached(key, p2, base, n2, NUCLEUS)
        r3 = _reached(key, p3, base, n3, NUCLEUS)
        lo, hi, at_lo, at_hi, many_lo, many_hi = _tighten(
            p0, r0, n0, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi
        )
        lo, hi, at_lo, at_hi, many_lo, many_hi = _tighten(
            p1, r1, n1, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi
        )
        lo, hi, at_lo, at_hi, many_lo, many_hi = _tighten(
            p2, r2, n2, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi
        )
        lo, hi, at_lo, at_hi, many_lo, many_hi = _tighten(
            p3, r3, n3, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi
        )
        turn = tl.where(turn == 2, 0, turn + 1)  # every third time evenly: ties are not spread evenly at all
        p0, p1, p2, p3 = _probes(wanted, lo, hi, at_lo, at_hi, many_lo, many_hi, turn)
    return lo, hi, at_lo, at_hi, many_lo, many_hi


@jit
def _about(sample, share, deviations, slack, NUCLEUS: tl.constexpr):
    """Where a sample, all compared with all, has the threshold, give or take so many standard deviations and entries.

    The least above 0 of the sample where it says nothing of what is below; its greatest likewise.
    """
    worth = _worth(sample, NUCLEUS)
    reached = tl.sum(tl.where(sample[:, None] >= sample[None, :], worth[:, None], 0.0), 0)
    held = tl.sum(worth, 0)
    weight = tl.where(reached - worth < share * held, 1.0 - share, share) * worth
    error = deviations * tl.sqrt(tl.sum(weight * weight, 0)) + slack * held / sample.shape[0]
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
):
    """A row of at most CHUNK."""
    row = tl.program_id(0).to(tl.int64)
    n = n_units * UNIT
    weights_ptr += row * n
    size = tl.minimum(tl.load(valid_ptr + row).to(tl.int32), n)
    inner = tl.arange(0, CHUNK)
    some = tl.arange(0, SAMPLE) * tl.maximum((size + SAMPLE - 1) // SAMPLE, 1)
    sample = _load_keys(weights_ptr, some, size, 1)
    key = _load_keys(weights_ptr, inner, size, UNIT)
    total = size.to(tl.float32)
    if NUCLEUS:
        total = tl.sum(_worth(key, NUCLEUS), 0)
    wanted, choosing = _aim(k_ptr, row, size, total, mass, NUCLEUS)
    share = wanted / tl.maximum(total, 1e-30)
    # Everything reaches 0, nothing what is past the greatest.
    zero = size * 0
    lo = zero
    hi = tl.maximum(tl.max(key, 0), 0) + 1
    many_hi = zero
    left = zero
    if choosing:
        first, last = _about(sample, share, 1.65, 0.0, NUCLEUS)
        p0 = tl.minimum(tl.maximum(first, 1), hi - 1)
        p3 = tl.minimum(tl.maximum(last, 1), hi - 1)
        third = (p3 - p0) // 3
        lo, hi, _at_lo, _at_hi, _many_lo, many_hi = _narrow(
            key,
            p0,
            p0 + third,
            p3 - third,
            p3,
            total * 0,
            zero,
            wanted,
            lo,
            hi,
            total,
            total * 0,
            size,
            zero,
            NUCLEUS,
        )
        if NUCLEUS:
            hi = lo  # with all that tie
        else:
            left = wanted.to(tl.int32) - many_hi
    else:
        lo = _without_choice(wanted, NUCLEUS)
        hi = lo
    sure, ties = _counts(key, lo, hi)
    _write(lists_ptr + row * width, inner, key, lo, hi, zero, zero, ties, left, width)
    tl.store(counts_ptr + row, tl.minimum(sure + tl.minimum(ties, left), width))


@jit
def _counts(key, lo, hi):
    """Of what is at or above `hi`, of what is between the bounds."""
    both = tl.sum(tl.where(key >= hi, 1, tl.where(key >= lo, 65536, 0)), 0)
    return both & 65535, both >> 16


@jit
def _write(list_ptr, at, key, lo, hi, sure_before, ties_before, ties, left, width):
    """Of entries `at`, those at or above `hi`, and of those between the bounds, `ties`, the first `left` of the row."""
    chosen = (key >= tl.where(left > ties_before, lo, hi)).to(tl.int32)
    if (left > ties_before) & (left < ties_before + ties):
        tied = ((key >= lo) & (key < hi)).to(tl.int32)
        chosen = tl.where((tied == 1) & (ties_before + tl.cumsum(tied, 0) > left), 0, chosen)
    place = sure_before + tl.minimum(ties_before, left) + tl.cumsum(chosen, 0) - 1
    place = tl.where(chosen == 1, place, width)
    tl.store(list_ptr + place, at, mask=place < width)


# Rows that are shared out. What a span's program tells those after it of the same row is three counts and that they
# are there: bits 0 to 19, 20 to 39, 40 to 59, and 60. They wait for it, which ends: programs start in order.


@jit
def _tell(told_ptr, span, c0, c1, c2):
    told = c0.to(tl.int64) | (c1.to(tl.int64) << 20) | (c2.to(tl.int64) << 40) | (1 << 60)
    tl.atomic_xchg(told_ptr + span, told, sem="relaxed")


@jit
def _told(told, i: tl.constexpr):
    """One of the three counts, of all spans told of."""
    return tl.sum(((told >> (20 * i)) & 0xFFFFF).to(tl.int32), 0)


@jit
def _told_before(told_ptr, span, SPANS: tl.constexpr):
    spans = tl.arange(0, SPANS)
    told = tl.load(told_ptr + spans, mask=spans < span, other=1 << 60, volatile=True)
    while tl.min(told, 0) == 0:
        told = tl.load(told_ptr + spans, mask=spans < span, other=1 << 60, volatile=True)
    return told


@jit
def _bounds(bounds_ptr, row, PARTS: tl.constexpr):
    """The keys from which entries are put aside, and from which they are above. The first is less."""
    parts = tl.arange(0, PARTS)
    bounds_ptr += row * 2 * PARTS
    lo = tl.max(tl.load(bounds_ptr + parts), 0)
    return lo, tl.maximum(tl.min(tl.load(bounds_ptr + PARTS + parts), 0), lo + 1)


@jit
def _bracket_kernel(
    weights_ptr,
    valid_ptr,
    k_ptr,
    bounds_ptr,
    told_ptr,
    mass,
    n_units,
    NUCLEUS: tl.constexpr,
    FEW: tl.constexpr,
    SAMPLE: tl.constexpr,
    PIECE: tl.constexpr,
    PIVOTS: tl.constexpr,
    PARTS: tl.constexpr,
    SPREAD: tl.constexpr,
    SPANS: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some of a row's pivots are ranked in its sample; what spans will tell is cleared.

    Pivots lie evenly about where a few of the row have the threshold. bounds: [rows, 2, parts], each part's highest
    pivot that is reached by enough of the sample, or 0; its lowest that is reached by too little, or one past infinity.
    The former is raised to what the sample has there, so that many ties are all at the bound.
    """
    follow(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = n_units * UNIT
    weights_ptr += row * n
    size = tl.minimum(tl.load(valid_ptr + row).to(tl.int32), n)
    stride = tl.maximum((size + SAMPLE - 1) // SAMPLE, 1)
    taken = (size + stride - 1) // stride
    if NUCLEUS:
        share = mass + tl.zeros([], tl.float32)
    else:
        share = tl.load(k_ptr + row).to(tl.float32) / tl.maximum(size, 1).to(tl.float32)
        share = tl.minimum(tl.maximum(share, 0.0), 1.0)
    few = tl.arange(0, FEW) * tl.maximum((size + FEW - 1) // FEW, 1)
    first, last = _about(_load_keys(weights_ptr, few, size, 1), share, 5.0, 4.0, NUCLEUS)
    pivot = first + (last - first) // (PIVOTS * PARTS - 1) * (part * PIVOTS + tl.arange(0, PIVOTS))
    reached = tl.zeros([PIVOTS, PIECE], tl.float32)
    squares = tl.zeros([PIVOTS, PIECE], tl.float32)
    held = tl.zeros([PIECE], tl.float32)
    held_squares = tl.zeros([PIECE], tl.float32)
    for start in tl.static_range(0, SAMPLE, PIECE):
        each = (start + tl.arange(0, PIECE)) * stride
        key = _load_keys(weights_ptr, each, size, 1)
        worth = _worth(key, NUCLEUS)
        above = key[None, :] >= pivot[:, None]
        reached += tl.where(above, worth[None, :], 0.0)
        held += worth
        if NUCLEUS:
            squares += tl.where(above, (worth * worth)[None, :], 0.0)
            held_squares += worth * worth
    rank, total = tl.sum(reached, 1), tl.sum(held, 0)
    rank_squares, total_squares = rank, total
    if NUCLEUS:
        rank_squares, total_squares = tl.sum(squares, 1), tl.sum(held_squares, 0)
    # Of (what a pivot reaches) - share * (all), both of the sample, with no pivot known to be right.
    above_part, below_part = (1.0 - share) * (1.0 - share), share * share
    variance = above_part * rank_squares + below_part * tl.maximum(total_squares - rank_squares, 0.0)
    margin = SPREAD * tl.sqrt(variance) + 4.0 * total / tl.maximum(taken, 1).to(tl.float32)
    off = rank - share * total
    bounds_ptr += row * 2 * PARTS + part
    past = 0x7F800001  # infinity
    lo = tl.max(tl.where((off >= margin) & (rank > 0), pivot, 0), 0)
    lowest = tl.full([PIECE], past, tl.int32)
    for start in tl.static_range(0, SAMPLE, PIECE):
        key = _load_keys(weights_ptr, (start + tl.arange(0, PIECE)) * stride, size, 1)
        lowest = tl.minimum(lowest, tl.where(key >= lo, key, past))
    tl.store(bounds_ptr, tl.where(lo > 0, tl.min(lowest, 0), 0))
    tl.store(bounds_ptr + PARTS, tl.min(tl.where(off <= -margin, pivot, past), 0))
    if part == 0:
        spans = tl.arange(0, SPANS)
        rows = tl.num_programs(0).to(tl.int64)
        tl.store(told_ptr + row * SPANS + spans, tl.zeros([SPANS], tl.int64))
        tl.store(told_ptr + (rows + row) * SPANS + spans, tl.zeros([SPANS], tl.int64))


@jit
def _put_aside_kernel(
    weights_ptr,
    valid_ptr,
    bounds_ptr,
    told_ptr,
    sums_ptr,
    aside_ptr,
    n_units,
    NUCLEUS: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    SPANS: tl.constexpr,
    ROOM: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of a span, what lies between the bounds goes to its row's others, in order; the rest is counted.

    told: of what equals the lower bound (it may be many ties, which need no search), of what is between, of what is
    above. sums: [rows, 3, spans], weights of all, above the lower bound, and at or above the upper one.
    aside: [rows, room]
    """
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = n_units * UNIT
    at = span * SPAN + tl.arange(0, SPAN)
    size = tl.minimum(tl.load(valid_ptr + row).to(tl.int32), n)
    key = _load_keys(weights_ptr + row * n, at, size, UNIT)
    follow(PDL)
    lo, hi = _bounds(bounds_ptr, row, PARTS)
    between = (key > lo) & (key < hi)
    member = between.to(tl.int32)
    others = tl.sum(tl.where(key >= hi, 65536, tl.where(key == lo, 1, 0)), 0)
    order = tl.cumsum(member, 0)
    found = tl.max(order, 0)
    told_ptr += row * SPANS
    _tell(told_ptr, span, others & 65535, found, others >> 16)
    if NUCLEUS:
        worth = _worth(key, NUCLEUS)
        spans = tl.num_programs(1)
        sums_ptr += row * 3 * spans + span
        tl.store(sums_ptr, tl.sum(worth, 0))
        tl.store(sums_ptr + spans, tl.sum(tl.where(key > lo, worth, 0.0), 0))
        tl.store(sums_ptr + 2 * spans, tl.sum(tl.where(key >= hi, worth, 0.0), 0))
    if found > 0:
        place = tl.where(between, order - 1 + _told(_told_before(told_ptr, span, SPANS), 1), ROOM)
        tl.store(aside_ptr + row * ROOM + place, key.to(tl.float32, bitcast=True), mask=place < ROOM)


@jit
def _threshold_kernel(
    weights_ptr,
    valid_ptr,
    k_ptr,
    bounds_ptr,
    told_ptr,
    sums_ptr,
    aside_ptr,
    state_ptr,
    mass,
    n_units,
    span_count,
    NUCLEUS: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    SPANS: tl.constexpr,
    ROOM: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's last bounds, between which keys are equal or all are wanted, and how many; state: [rows, 3]."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = n_units * UNIT
    weights_ptr += row * n
    aside_ptr += row * ROOM
    state_ptr += row * 3
    size = tl.minimum(tl.load(valid_ptr + row).to(tl.int32), n)
    spans = tl.arange(0, SPANS)
    told = tl.load(told_ptr + row * SPANS + spans, mask=spans < span_count, other=0)
    equal, found, c1 = _told(told, 0), _told(told, 1), _told(told, 2)
    p0, p1 = _bounds(bounds_ptr, row, PARTS)
    total = size.to(tl.float32)
    s0, s1 = (c1 + found).to(tl.float32), c1.to(tl.float32)
    if NUCLEUS:
        sums_ptr += row * 3 * span_count + spans
        total = tl.sum(tl.load(sums_ptr, mask=spans < span_count, other=0.0), 0)
        s0 = tl.sum(tl.load(sums_ptr + span_count, mask=spans < span_count, other=0.0), 0)
        s1 = tl.sum(tl.load(sums_ptr + 2 * span_count, mask=spans < span_count, other=0.0), 0)
    wanted, choosing = _aim(k_ptr, row, size, total, mass, NUCLEUS)
    zero = size * 0
    none = total * 0
    if choosing:
        lo, hi, at_lo, at_hi, many_lo, many_hi = zero, zero + 0x7F800001, total, none, size, zero
        inner = tl.arange(0, SPAN)
        searching = zero + 1
        while searching == 1:
            # By the lower bound, by what is above it, and by the upper one.
            c0 = c1 + found
            with_lowest = tl.where(equal > 0, s0 + equal.to(tl.float32) * _worth(p0, NUCLEUS), s0)
            lo, hi, at_lo, at_hi, many_lo, many_hi = _tighten(
                p0, with_lowest, c0 + equal, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi
            )
            lo, hi, at_lo, at_hi, many_lo, many_hi = _tighten(
                p0 + 1, s0, c0, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi
            )
            lo, hi, at_lo, at_hi, many_lo, many_hi = _tighten(
                p1, s1, c1, wanted, lo, hi, at_lo, at_hi, many_lo, many_hi
            )
            # What was put aside is what there is between the bounds.
            caught = (lo == p0 + 1) & (hi == p1) & (found <= ROOM)
            is_open = _is_open(wanted, lo, hi, at_lo, many_lo, many_hi, NUCLEUS)
            searching = tl.where(is_open & ~caught, 1, 0)
            if searching == 1:  # the sample misled, or there is too much: over all of the row
                third = tl.maximum((hi - lo) // 3, 1)
                fits = many_lo - many_hi <= ROOM
                p0 = tl.where(fits, lo, lo + third)
                p1 = tl.where(fits, hi, tl.maximum(hi - third, lo + third + 1))
                counts = tl.zeros([SPAN], tl.int32)
                held0 = tl.zeros([SPAN], tl.float32)
                held1 = tl.zeros([SPAN], tl.float32)
                found = zero
                for start in tl.range(0, size, SPAN):
                    key = _load_keys(weights_ptr, start + inner, size, UNIT)
                    between = (key > p0) & (key < p1)
                    member = between.to(tl.int32)
                    counts += tl.where(key >= p1, 65536, tl.where(key == p0, 1, 0))
                    if NUCLEUS:
                        worth = _worth(key, NUCLEUS)
                        held0 += tl.where(key > p0, worth, 0.0)
                        held1 += tl.where(key >= p1, worth, 0.0)
                    place = found + tl.cumsum(member, 0) - 1
                    put = between & (place < ROOM)
                    tl.store(aside_ptr + place, key.to(tl.float32, bitcast=True), mask=put)
                    found += tl.sum(member, 0)
                equal, c1 = tl.sum(counts & 65535, 0), tl.sum(counts >> 16, 0)
                s0, s1 = (c1 + found).to(tl.float32), c1.to(tl.float32)
                if NUCLEUS:
                    s0, s1 = tl.sum(held0, 0), tl.sum(held1, 0)
        if _is_open(wanted, lo, hi, at_lo, many_lo, many_hi, NUCLEUS):
            tl.debug_barrier()
            places = tl.arange(0, ROOM)
            key = _load_keys(aside_ptr, places, found, 4)
            q0, q1, q2, q3 = _probes(wanted, lo, hi, at_lo, at_hi, many_lo, many_hi, zero)
            lo, hi, at_lo, at_hi, many_lo, many_hi = _narrow(
                key,
                q0,
                q1,
                q2,
                q3,
                at_hi,
                many_hi,
                wanted,
                lo,
                hi,
                at_lo,
                at_hi,
                many_lo,
                many_hi,
                NUCLEUS,
            )
        left = wanted.to(tl.int32) - many_hi
        if NUCLEUS:
            hi = lo  # with all that tie
            left = zero
        tl.store(state_ptr, lo)
        tl.store(state_ptr + 1, hi)
        tl.store(state_ptr + 2, left)
    else:
        lo = _without_choice(wanted, NUCLEUS)
        tl.store(state_ptr, lo)
        tl.store(state_ptr + 1, lo)
        tl.store(state_ptr + 2, zero)


@jit
def _emit_kernel(
    weights_ptr,
    valid_ptr,
    state_ptr,
    told_ptr,
    lists_ptr,
    counts_ptr,
    n_units,
    width,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A span's part of its row's list; told: of what is above the bounds, of what is between them."""
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = n_units * UNIT
    at = span * SPAN + tl.arange(0, SPAN)
    size = tl.minimum(tl.load(valid_ptr + row).to(tl.int32), n)
    key = _load_keys(weights_ptr + row * n, at, size, UNIT)
    follow(PDL)
    state_ptr += row * 3
    lo, hi, left = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)
    sure, ties = _counts(key, lo, hi)
    told_ptr += row * SPANS
    _tell(told_ptr, span, sure, ties, sure * 0)
    told = _told_before(told_ptr, span, SPANS)
    sure_before, ties_before = _told(told, 0), _told(told, 1)
    _write(lists_ptr + row * width, at, key, lo, hi, sure_before, ties_before, ties, left, width)
    if span == tl.num_programs(1) - 1:
        many = sure_before + sure + tl.minimum(ties_before + ties, left)
        tl.store(counts_ptr + row, tl.minimum(many, width))
