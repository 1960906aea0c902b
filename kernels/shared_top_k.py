"""The highest scores over several rows at once: one budget for a group of rows, as compact lists or as bits.

Triton: scores order as their bit patterns, since none is negative. Of a sample of a group, pivots are ranked, and two
of them bound the threshold, with odds of thousands to one. One pass over all counts what is at or above the upper one
and sorts what is between into bins; the bin that holds the threshold is small enough to compare all with all. Where
that fails (the sample misled, or a bin ran over), one program a group bisects over everything.
"""

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, power_of_two, tl

WORD = 64  # bits
_SAMPLE = 4096  # of a group, at most
_PIVOTS = 16  # ranked by a program
_PARTS = 32  # programs that rank a group's pivots
_SPREAD = 3.5  # standard deviations of the sample between the threshold and its bounds
_BINS = 4096  # between the bounds
_SLOTS = 128  # entries of a bin that are kept; 4 MB a group
_TALLY_CHUNK = 512
_EMIT_CHUNK = 256
_EMIT_WHOLE = 8192  # a row at once, where there are few
_FEW_ROWS = 512
_SLOW_CHUNK = 8192
_TALLY_PROGRAMS = 1024  # that a GPU of 132 multiprocessors holds at once


def select_top_k_over_all(
    scores: Tensor,
    counts: Tensor,
    forced: Tensor | None = None,
    backend: str = "torch",
    inner: int = 0,
) -> tuple[Tensor, Tensor]:
    """The `counts` highest positive scores of each group, and all forced entries, as ascending lists.

    scores: [groups, rows, n] float32, not negative; ties go to the lower row, then the lower entry
    counts: [groups] int32, at most so many of each group
    forced: [groups, rows, n] uint8, not 0 where an entry is taken whatever it scores; its score must be 0
    inner: rows are outer * inner; results are then [outer, groups, inner, …] (layers before sequences before heads)
    Returns lists [groups, rows, n] int32, undefined beyond their counts, and these [groups, rows] int32.
    """
    check_backend("select_top_k_over_all", backend, ("torch", "triton"))
    groups, rows, n = scores.shape
    if backend == "torch":
        chosen = _torch_top_k(scores, counts)
        if forced is not None:
            chosen |= forced.bool()
        if inner:
            chosen = chosen.unflatten(1, (-1, inner)).transpose(0, 1)
        order = (~chosen).to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)
        return order, chosen.sum(-1, dtype=torch.int32)
    shape = (rows // inner, groups, inner) if inner else (groups, rows)
    lists = torch.empty(*shape, n, dtype=torch.int32, device=scores.device)
    taken = torch.empty(shape, dtype=torch.int32, device=scores.device)
    _launch(scores, counts, forced, lists, taken, None, inner or rows)
    return lists, taken


def mark_top_k_over_all(scores: Tensor, counts: Tensor, backend: str = "torch") -> Tensor:
    """`select_top_k_over_all` as bits, the lowest first: [groups, rows, ceil(n / 64)] int64."""
    check_backend("mark_top_k_over_all", backend, ("torch", "triton"))
    groups, rows, n = scores.shape
    words = -(-n // WORD)
    if backend == "torch":
        chosen = torch.nn.functional.pad(_torch_top_k(scores, counts), (0, words * WORD - n))
        bits = chosen.view(groups, rows, words, WORD).long() << torch.arange(WORD, device=scores.device)
        return bits.sum(3)
    marked = torch.empty(groups, rows, words, dtype=torch.int64, device=scores.device)
    _launch(scores, counts, None, None, None, marked)
    return marked


def _torch_top_k(scores: Tensor, counts: Tensor) -> Tensor:
    flat = scores.flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(flat.shape[1], device=flat.device).expand_as(order)
    )
    return ((rank < counts[:, None]) & (flat > 0)).view(scores.shape)


def _launch(
    scores: Tensor,
    counts: Tensor,
    forced: Tensor | None,
    lists: Tensor | None,
    taken: Tensor | None,
    words: Tensor | None,
    inner: int = 1,
) -> None:
    groups, rows, n = scores.shape
    if not scores.numel():
        if taken is not None:
            taken.zero_()
        return
    scores, counts = scores.contiguous(), counts.contiguous()  # counts may be one number, expanded
    size, device = rows * n, scores.device
    stride = _stride(size, n)
    sampled = -(-size // stride)
    piece = min(_SAMPLE // 4, max(32, power_of_two(sampled)))
    bracket = torch.empty(groups, 4, _PARTS, dtype=torch.int32, device=device)
    tallies = torch.empty(groups, _BINS + 3, dtype=torch.int32, device=device)
    slots = torch.empty(groups, _BINS, _SLOTS, dtype=torch.int64, device=device)
    state = torch.empty(groups, 2, dtype=torch.int32, device=device)
    _bracket_kernel[(groups, _PARTS)](
        scores,
        counts,
        bracket,
        tallies,
        size,
        stride,
        sampled,
        -(-sampled // (_PIVOTS * _PARTS)),
        _SPREAD,
        PIECES=-(-sampled // piece),
        PIECE=piece,
        PIVOTS=_PIVOTS,
        PARTS=_PARTS,
        BINS=_BINS,
        num_warps=min(8, max(1, piece // 64)),
    )
    chunk = min(_TALLY_CHUNK, max(64, power_of_two(n)))
    splits = max(1, min(-(-n // chunk), _TALLY_PROGRAMS // (groups * rows)))
    _tally_kernel[(groups * rows, splits)](
        scores,
        bracket,
        tallies,
        slots,
        n,
        rows,
        CHUNK=chunk,
        PARTS=_PARTS,
        LOG_BINS=_BINS.bit_length() - 1,
        SLOTS=_SLOTS,
        num_warps=min(4, max(1, chunk // 512)),
    )
    chunk = min(_SLOW_CHUNK, max(64, power_of_two(size)))
    _threshold_kernel[(groups,)](
        scores,
        counts,
        bracket,
        tallies,
        slots,
        state,
        size,
        CHUNK=chunk,
        PARTS=_PARTS,
        LOG_BINS=_BINS.bit_length() - 1,
        SLOTS=_SLOTS,
        num_warps=16,
    )
    chunk = min(_EMIT_WHOLE if groups * rows <= _FEW_ROWS else _EMIT_CHUNK, max(64, power_of_two(n)))
    _emit_kernel[(groups * rows,)](
        scores,
        scores if forced is None else forced.contiguous(),
        state,
        scores if lists is None else lists,
        scores if taken is None else taken,
        scores if words is None else words,
        n,
        rows,
        -(-n // WORD),
        FORCED=forced is not None,
        LISTS=lists is not None,
        CHUNK=chunk,
        INNER=inner,
        num_warps=min(16, max(1, chunk // 256)),
    )


def _stride(size: int, n: int) -> int:
    """Between the entries of a sample; it sees all columns evenly."""
    stride = -(-size // _SAMPLE)
    while _divisor(stride, n) > 1:
        stride += 1
    return stride


def _divisor(a: int, b: int) -> int:
    """The greatest that both have."""
    return _divisor(b, a % b) if b else a


@jit
def _load_bits(scores_ptr, at, inside):
    return tl.load(scores_ptr + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)


@jit
def _bracket_kernel(
    scores_ptr,
    counts_ptr,
    bracket_ptr,
    tallies_ptr,
    size,
    stride,
    sampled,
    pivot_step,
    spread,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    PIVOTS: tl.constexpr,
    PARTS: tl.constexpr,
    BINS: tl.constexpr,
):
    """Some of a group's pivots are ranked in its sample; the group's tallies are cleared.

    bracket: [groups, 4, parts], each part's highest pivot that is reached by enough of the sample, or 0; its lowest
    that is reached by too little, or one past infinity; its lowest and its highest positive pivot.
    """
    group, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores_ptr += group * size
    one = (part * PIVOTS + tl.arange(0, PIVOTS)) * pivot_step
    pivot = _load_bits(scores_ptr, one.to(tl.int64) * stride, one < sampled)
    reached = tl.zeros([PIVOTS, PIECE], tl.int32)
    positive = tl.zeros([PIECE], tl.int32)
    for i in tl.static_range(PIECES):
        each = i * PIECE + tl.arange(0, PIECE)
        bits = _load_bits(scores_ptr, each.to(tl.int64) * stride, each < sampled)
        reached += (bits[None, :] >= pivot[:, None]).to(tl.int32)
        positive += (bits > 0).to(tl.int32)
    rank = tl.sum(reached, 1).to(tl.float32)
    total = tl.sum(positive, 0).to(tl.float32)
    count = tl.minimum(tl.maximum(tl.load(counts_ptr + group).to(tl.int32), 0), size)
    about = count.to(tl.float32) / size * sampled
    margin = spread * tl.sqrt(tl.maximum(about * (1.0 - about / sampled), 0.0)) + 4.0
    past = 0x7F800001  # infinity
    lo = tl.max(tl.where((pivot > 0) & (rank >= about + margin), pivot, 0), 0)
    hi = tl.min(tl.where((pivot > 0) & (rank <= about - margin), pivot, past), 0)
    hi = tl.where(total <= about - margin, 1, hi)  # more are wanted than are positive
    bracket_ptr += group * 4 * PARTS + part
    tl.store(bracket_ptr, lo)
    tl.store(bracket_ptr + PARTS, hi)
    tl.store(bracket_ptr + 2 * PARTS, tl.min(tl.where(pivot > 0, pivot, past), 0))
    tl.store(bracket_ptr + 3 * PARTS, tl.max(tl.maximum(pivot, 0), 0))
    tallies_ptr += group * (BINS + 3)
    bins = part * (BINS // PARTS) + tl.arange(0, BINS // PARTS)
    tl.store(tallies_ptr + bins, tl.zeros([BINS // PARTS], tl.int32))
    three = tl.arange(0, 4)
    tl.store(tallies_ptr + BINS + three, tl.zeros([4], tl.int32), mask=three < 3)  # every part does


@jit
def _bounds(bracket_ptr, PARTS: tl.constexpr, LOG_BINS: tl.constexpr):
    """A group's bounds, where its bins begin, and by how much a bit pattern is shifted to give its bin.

    Bin 0 has what lies between the lower bound and the bins' beginning, and what equals the latter is in none.
    """
    parts = tl.arange(0, PARTS)
    lo = tl.max(tl.load(bracket_ptr + parts), 0)
    hi = tl.min(tl.load(bracket_ptr + PARTS + parts), 0)
    lowest = tl.min(tl.load(bracket_ptr + 2 * PARTS + parts), 0)
    highest = tl.max(tl.load(bracket_ptr + 3 * PARTS + parts), 0)
    bottom = tl.minimum(tl.where(lo > 0, lo, lowest), hi - 1)
    span = tl.maximum(tl.minimum(hi, highest + 1) - bottom, 1)
    octave = (
        span.to(tl.float32).to(tl.int32, bitcast=True) >> 23
    ) - 126  # a power of two that is not below span
    shift = tl.maximum(octave - LOG_BINS, 0)
    return lo, hi, bottom, shift


@jit
def _tally_kernel(
    scores_ptr,
    bracket_ptr,
    tallies_ptr,
    slots_ptr,
    n: tl.constexpr,
    rows: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    LOG_BINS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Of a row, or a share of its chunks, what is between the bounds goes into bins; the rest is counted.

    tallies: [groups, bins + 3], of the bins, of what is at or above the upper bound, of what is at the bins' beginning,
    of what is positive. slots: [groups, bins, slots] int64, bits above what is left of 2**31 - 1 without the place in
    the group, so that of equal scores the first is the highest.
    """
    BINS: tl.constexpr = 1 << LOG_BINS
    row = tl.program_id(0)
    group = (row // rows).to(tl.int64)
    inner = tl.arange(0, CHUNK)
    first = tl.program_id(1) * CHUNK
    step = tl.num_programs(1) * CHUNK
    scores_ptr += row.to(tl.int64) * n
    following = _load_bits(scores_ptr, first + inner, first + inner < n)
    lo, hi, bottom, shift = _bounds(bracket_ptr + group * 4 * PARTS, PARTS, LOG_BINS)
    tallies_ptr += group * (BINS + 3)
    slots_ptr += group * (BINS * SLOTS)
    tl.static_assert(n < 1023 * CHUNK)
    seen = tl.zeros(
        [CHUNK], tl.int32
    )  # three counts: registers are what limits how much is on its way from memory
    for start in tl.range(first, n, step):
        bits = following
        ahead = start + step + inner
        following = _load_bits(scores_ptr, ahead, ahead < n)  # while this chunk is sorted
        positive = tl.where(bits > 0, 1 << 20, 0)
        seen += tl.where(bits >= hi, positive + 1, tl.where(bits == bottom, positive + (1 << 10), positive))
        between = (bits > lo) & (bits < hi) & (bits != bottom)
        place = tl.where(bits > bottom, 1 + tl.minimum((bits - bottom) >> shift, BINS - 2), 0)
        slot = tl.atomic_add(tallies_ptr + place, 1, mask=between, sem="relaxed")
        entry = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - (row % rows * n + start + inner)).to(tl.int64)
        tl.store(slots_ptr + place * SLOTS + slot, entry, mask=between & (slot < SLOTS))
    tl.atomic_add(tallies_ptr + BINS, tl.sum(seen & 1023, 0), sem="relaxed")
    tl.atomic_add(tallies_ptr + BINS + 1, tl.sum((seen >> 10) & 1023, 0), sem="relaxed")
    tl.atomic_add(tallies_ptr + BINS + 2, tl.sum(seen >> 20, 0), sem="relaxed")


@jit
def _threshold_kernel(
    scores_ptr,
    counts_ptr,
    bracket_ptr,
    tallies_ptr,
    slots_ptr,
    state_ptr,
    size,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    LOG_BINS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The lowest bits that are chosen in a group, and the last place at which they are; state: [groups, 2]."""
    BINS: tl.constexpr = 1 << LOG_BINS
    group = tl.program_id(0).to(tl.int64)
    tallies_ptr += group * (BINS + 3)
    bins = tl.arange(0, BINS)
    found = tl.load(tallies_ptr + bins)
    above = tl.load(tallies_ptr + BINS)
    equal = tl.load(tallies_ptr + BINS + 1)
    positive = tl.load(tallies_ptr + BINS + 2)
    count = tl.load(counts_ptr + group).to(tl.int32)
    _lo, hi, bottom, shift = _bounds(bracket_ptr + group * 4 * PARTS, PARTS, LOG_BINS)
    zero = above * 0
    wanted = tl.minimum(count, positive)
    upper = tl.where(bins > 0, found, 0)  # the bins above the bins' beginning
    in_upper = tl.sum(upper, 0)
    reached = above + in_upper - tl.cumsum(upper, 0) + upper
    bin = tl.sum(((bins > 0) & (reached >= wanted)).to(tl.int32), 0)
    members = tl.sum(tl.where(bins == bin, found, 0), 0)
    # What is above the bin, and between which bits it lies.
    greater = above + tl.sum(tl.where(bins > bin, found, 0), 0) + tl.where(bin > 0, 0, equal)
    at_lo, at_hi = greater + members, greater
    low = tl.where(bin > 0, tl.maximum(bottom + ((bin - 1) << shift), bottom + 1), 1)
    high = tl.where(bin > 0, tl.where(bin == BINS - 1, hi, bottom + (bin << shift)), bottom)
    high = tl.minimum(high, hi)
    in_bin = (wanted > greater) & (wanted <= greater + members)
    if count <= 0:
        threshold, last = zero + 0x7FFFFFFF, zero - 1
    elif count >= positive:
        threshold, last = zero + 1, zero + 0x7FFFFFFF
    elif in_bin & (members <= SLOTS):
        entries = bin.to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
        entry = tl.load(
            slots_ptr + group * (BINS * SLOTS) + entries, mask=tl.arange(0, SLOTS) < members, other=0
        )
        rank = tl.sum((entry[None, :] >= entry[:, None]).to(tl.int32), 1)
        chosen = tl.max(tl.where(rank == wanted - greater, entry, 0), 0)
        threshold, last = (chosen >> 32).to(tl.int32), 0x7FFFFFFF - (chosen & 0x7FFFFFFF).to(tl.int32)
    else:
        # The slow way, over all scores.
        if wanted <= above:
            low, high, at_lo, at_hi = hi, zero + 0x7F800001, above, zero
        elif (bin == 0) & (wanted <= greater):  # greater than what is below the bins' beginning
            low, high, at_lo, at_hi = bottom, bottom + 1, greater, greater - equal
        elif bin == 0:
            low, high, at_lo, at_hi = zero + 1, bottom, positive, greater
        scores_ptr += group * size
        inner = tl.arange(0, CHUNK)
        while (high - low > 1) & (at_lo != wanted):
            quarter = tl.maximum((high - low) // 4, 1)
            p0, p1, p2 = low + quarter, low + tl.maximum((high - low) // 2, 1), high - quarter
            c0, c1, c2 = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
            for start in tl.range(0, size, CHUNK):
                bits = _load_bits(scores_ptr, start + inner, start + inner < size)
                c0 += (bits >= p0).to(tl.int32)
                c1 += (bits >= p1).to(tl.int32)
                c2 += (bits >= p2).to(tl.int32)
            s0, s1, s2 = tl.sum(c0, 0), tl.sum(c1, 0), tl.sum(c2, 0)
            high = tl.where(s0 < wanted, p0, tl.where(s1 < wanted, p1, tl.where(s2 < wanted, p2, high)))
            at_hi = tl.where(s0 < wanted, s0, tl.where(s1 < wanted, s1, tl.where(s2 < wanted, s2, at_hi)))
            low = tl.where(s2 >= wanted, p2, tl.where(s1 >= wanted, p1, tl.where(s0 >= wanted, p0, low)))
            at_lo = tl.where(s2 >= wanted, s2, tl.where(s1 >= wanted, s1, tl.where(s0 >= wanted, s0, at_lo)))
        threshold, last = low, zero + 0x7FFFFFFF
        if at_lo != wanted:  # not all that tie: up to which place
            left = wanted - at_hi
            last = zero
            seen = zero
            start = zero
            while (seen < left) & (start < size):
                tie = (_load_bits(scores_ptr, start + inner, start + inner < size) == threshold).to(tl.int32)
                order = seen + tl.cumsum(tie, 0)
                last += tl.sum(tl.where((tie > 0) & (order == left), start + inner, 0), 0)
                seen += tl.sum(tie, 0)
                start += CHUNK
    tl.store(state_ptr + group * 2, threshold)
    tl.store(state_ptr + group * 2 + 1, last)


@jit
def _emit_kernel(
    scores_ptr,
    forced_ptr,
    state_ptr,
    lists_ptr,
    taken_ptr,
    words_ptr,
    n: tl.constexpr,
    rows: tl.constexpr,
    word_count: tl.constexpr,
    FORCED: tl.constexpr,
    LISTS: tl.constexpr,
    CHUNK: tl.constexpr,
    INNER: tl.constexpr,
):
    """One row: what lies above the threshold, what equals it and is not past the last place, and what is forced."""
    row = tl.program_id(0).to(tl.int64)
    group = row // rows
    inner = tl.arange(0, CHUNK)
    following = _load_bits(scores_ptr + row * n, inner, inner < n)
    if FORCED:
        forced_following = tl.load(forced_ptr + row * n + inner, mask=inner < n, other=0)
    threshold = tl.load(state_ptr + group * 2)
    last = tl.load(state_ptr + group * 2 + 1) - (row % rows * n).to(tl.int32)
    groups = tl.num_programs(0) // rows
    out_row = (row % rows // INNER * groups + group) * INNER + row % INNER
    taken = last * 0
    for start in tl.range(0, n, CHUNK):
        at = start + inner
        ahead = at + CHUNK
        bits = following
        following = _load_bits(scores_ptr + row * n, ahead, ahead < n)  # while this chunk is written
        chosen = (bits > threshold) | ((bits == threshold) & (at <= last))
        if FORCED:
            chosen = chosen | (forced_following != 0)
            forced_following = tl.load(forced_ptr + row * n + ahead, mask=ahead < n, other=0)
        if LISTS:
            place = tl.cumsum(chosen.to(tl.int32), 0) - 1 + taken
            tl.store(lists_ptr + out_row * n + place, at, mask=chosen)
            taken += tl.sum(chosen.to(tl.int32), 0)
        else:
            bit = chosen.to(tl.int64) << (at % 64).to(tl.int64)
            word = tl.sum(tl.reshape(bit, [CHUNK // 64, 64]), 1)
            place = start // 64 + tl.arange(0, CHUNK // 64)
            tl.store(words_ptr + row * word_count + place, word, mask=place < word_count)
    if LISTS:
        tl.store(taken_ptr + out_row, taken)
