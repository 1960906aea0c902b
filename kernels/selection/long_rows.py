"""Rows of more than a program can hold, shared out over programs.

Pivots, ranked in a sample of a row, bound its threshold. Programs that each have a span of the row count what is above
the bounds and put aside what is between them; one program searches that; and the spans' programs write the lists.
"""

import torch
from torch import Tensor

import kernels.selection.short_rows as short_rows
from kernels.backends import follow, jit, overlapping_launch, power_of_two, tl
from kernels.selection.search import (
    about,
    aim,
    count_keys,
    is_open_still,
    load_keys,
    narrow,
    probes_of,
    tighten,
    unit_of,
    without_choice,
    worth_of,
    write_list,
)

SPAN = 2048  # entries a program
PIVOTS = 16  # ranked by a program
PARTS = 2  # programs that rank a row's pivots
RANKED_IN = 4096  # entries of a sample, at most
SPREAD = 3.5  # standard deviations of the sample between the threshold and its bounds
ASIDE = 16384  # entries between the bounds, at most


def select_long_rows(
    weights: Tensor, valid: Tensor, k: Tensor, mass: float | None, lists: Tensor, counts: Tensor
) -> None:
    """Fill `lists` and `counts`: bounds from a sample, what lies between them, the threshold, the lists.

    mass: of the nucleus; None for the top k.
    """
    rows, n = weights.shape
    device, unit, chunk = weights.device, unit_of(n), short_rows.CHUNK
    long, span = power_of_two(n), min(SPAN, chunk)
    spans = -(-n // span)
    room = min(ASIDE, max(chunk // 2, long // 4))
    bounds = torch.empty(rows, 2, PARTS, dtype=torch.int32, device=device)
    told = torch.empty(2, rows, power_of_two(spans), dtype=torch.int64, device=device)
    sums = torch.empty(rows, 3, 0 if mass is None else spans, dtype=torch.float32, device=device)
    aside = torch.empty(rows, room, dtype=torch.float32, device=device)
    state = torch.empty(rows, 3, dtype=torch.int32, device=device)
    # A sixteenth of a row: then, by simulation, an eighth at most lies between the bounds, of heavy tails more.
    _rank_pivots(weights, valid, k, mass, bounds, told, min(RANKED_IN, chunk, max(128, long // 16)))
    of_row = {"SPAN": span, "SPANS": power_of_two(spans), "UNIT": unit, **overlapping_launch(device)}
    of_search = {"NUCLEUS": mass is not None, "PARTS": PARTS, "ROOM": room, **of_row}
    warps = max(1, span // 512)
    _put_aside_kernel[(rows, spans)](
        *(weights, valid, bounds, told, sums, aside, n // unit), **of_search, num_warps=warps
    )
    _threshold_kernel[(rows,)](
        *(weights, valid, k, bounds, told, sums, aside, state, 0.0 if mass is None else mass),
        *(n // unit, spans),
        **of_search,
        num_warps=min(short_rows.WARPS, max(2, room // 512)),
    )
    _emit_kernel[(rows, spans)](
        *(weights, valid, state, told[1], lists, counts, n // unit, lists.shape[1]), **of_row, num_warps=warps
    )


def _rank_pivots(
    weights: Tensor, valid: Tensor, k: Tensor, mass: float | None, bounds: Tensor, told: Tensor, sample: int
) -> None:
    """Fill `bounds` and clear `told`; sample: entries of a row that pivots are ranked in."""
    rows, n = weights.shape
    unit = unit_of(n)
    _bracket_kernel[(rows, PARTS)](
        *(weights, valid, k, bounds, told, 0.0 if mass is None else mass, n // unit),
        NUCLEUS=mass is not None,
        FEW=min(short_rows.SAMPLE, sample),
        SAMPLE=sample,
        PIECE=min(512, sample),
        PIVOTS=PIVOTS,
        PARTS=PARTS,
        SPREAD=SPREAD,
        SPANS=told.shape[2],
        UNIT=unit,
        num_warps=4,  # each reads all of the sample
        **overlapping_launch(weights.device),
    )


# What a span's program tells those after it of the same row is three counts and that they are there: bits 0 to 19, 20
# to 39, 40 to 59, and 60. They wait for it, which ends: programs start in order.


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
    first, last = about(load_keys(weights_ptr, few, size, 1), share, 5.0, 4.0, NUCLEUS)
    pivot = first + (last - first) // (PIVOTS * PARTS - 1) * (part * PIVOTS + tl.arange(0, PIVOTS))
    reached = tl.zeros([PIVOTS, PIECE], tl.float32)
    squares = tl.zeros([PIVOTS, PIECE], tl.float32)
    held = tl.zeros([PIECE], tl.float32)
    held_squares = tl.zeros([PIECE], tl.float32)
    for start in tl.static_range(0, SAMPLE, PIECE):
        each = (start + tl.arange(0, PIECE)) * stride
        key = load_keys(weights_ptr, each, size, 1)
        worth = worth_of(key, NUCLEUS)
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
        key = load_keys(weights_ptr, (start + tl.arange(0, PIECE)) * stride, size, 1)
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
    key = load_keys(weights_ptr + row * n, at, size, UNIT)
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
        worth = worth_of(key, NUCLEUS)
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
    wanted, choosing = aim(k_ptr, row, size, total, mass, NUCLEUS)
    zero = size * 0
    none = total * 0
    if choosing:
        state = (zero, zero + 0x7F800001, total, none, size, zero)
        inner = tl.arange(0, SPAN)
        searching = zero + 1
        while searching == 1:
            # By the lower bound, by what is above it, and by the upper one.
            c0 = c1 + found
            with_lowest = tl.where(equal > 0, s0 + equal.to(tl.float32) * worth_of(p0, NUCLEUS), s0)
            state = tighten(p0, with_lowest, c0 + equal, wanted, state)
            state = tighten(p0 + 1, s0, c0, wanted, state)
            state = tighten(p1, s1, c1, wanted, state)
            # What was put aside is what there is between the bounds.
            lo, hi, _at_lo, _at_hi, many_lo, many_hi = state
            caught = (lo == p0 + 1) & (hi == p1) & (found <= ROOM)
            is_open = is_open_still(wanted, state, NUCLEUS)
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
                    key = load_keys(weights_ptr, start + inner, size, UNIT)
                    between = (key > p0) & (key < p1)
                    member = between.to(tl.int32)
                    counts += tl.where(key >= p1, 65536, tl.where(key == p0, 1, 0))
                    if NUCLEUS:
                        worth = worth_of(key, NUCLEUS)
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
        if is_open_still(wanted, state, NUCLEUS):
            tl.debug_barrier()
            places = tl.arange(0, ROOM)
            key = load_keys(aside_ptr, places, found, 4)
            probes = probes_of(wanted, state, zero)
            state = narrow(key, probes, state[3], state[5], wanted, state, NUCLEUS)
        lo, hi, _at_lo, _at_hi, _many_lo, many_hi = state
        left = wanted.to(tl.int32) - many_hi
        if NUCLEUS:
            hi = lo  # with all that tie
            left = zero
        tl.store(state_ptr, lo)
        tl.store(state_ptr + 1, hi)
        tl.store(state_ptr + 2, left)
    else:
        lo = without_choice(wanted, NUCLEUS)
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
    key = load_keys(weights_ptr + row * n, at, size, UNIT)
    follow(PDL)
    state_ptr += row * 3
    lo, hi, left = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)
    sure, ties = count_keys(key, lo, hi)
    told_ptr += row * SPANS
    _tell(told_ptr, span, sure, ties, sure * 0)
    told = _told_before(told_ptr, span, SPANS)
    sure_before, ties_before = _told(told, 0), _told(told, 1)
    write_list(lists_ptr + row * width, at, key, lo, hi, sure_before, ties_before, ties, left, width)
    if span == tl.num_programs(1) - 1:
        many = sure_before + sure + tl.minimum(ties_before + ties, left)
        tl.store(counts_ptr + row, tl.minimum(many, width))
