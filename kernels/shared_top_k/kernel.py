"""The Triton kernels of a budget over several rows.

Scores order as their bit patterns, since none is negative. Of a sample of a group, pivots are ranked, and two of them
bound the threshold, with odds of thousands to one. One pass over all counts what is at or above the upper one and sorts
what is between into bins; the bin that holds the threshold is small enough to compare all with all. Where that fails
(the sample misled, or a bin ran over, scores being nearly alike), a second pass sorts what is in the bin; where that
fails, too (many are alike), one program a group bisects over everything.
"""

from specahead.kernels.backends import follow, jit, tl


@jit
def _load_bits(scores_ptr, at, inside):
    return tl.load(scores_ptr + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)


@jit
def bracket_kernel(
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
    PDL: tl.constexpr,
):
    """Some of a group's pivots are ranked in its sample; the group's tallies are cleared.

    bracket: [groups, 4, parts], each part's highest pivot that is reached by enough of the sample, or 0; its lowest
    that is reached by too little, or one past infinity; its lowest and its highest positive pivot.
    """
    follow(PDL)
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
    octave = (span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126  # a power of two that is not below span
    shift = tl.maximum(octave - LOG_BINS, 0)
    return lo, hi, bottom, shift


@jit
def tally_kernel(
    scores_ptr,
    bracket_ptr,
    tallies_ptr,
    slots_ptr,
    state_ptr,
    n: tl.constexpr,
    rows: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    LOG_BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    AGAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of a row, or a share of its chunks, what is between the bounds goes into bins; the rest is counted.

    AGAIN: only of groups whose threshold is still to be found.

    tallies: [groups, bins + 3], of the bins, of what is at or above the upper bound, of what is at the bins' beginning,
    of what is positive. slots: [groups, bins, slots] int64, bits above what is left of 2**31 - 1 without the place in
    the group, so that of equal scores the first is the highest.
    """
    follow(PDL)
    BINS: tl.constexpr = 1 << LOG_BINS
    row = tl.program_id(0)
    group = (row // rows).to(tl.int64)
    inner = tl.arange(0, CHUNK)
    first = tl.program_id(1) * CHUNK
    step = tl.num_programs(1) * CHUNK
    scores_ptr += row.to(tl.int64) * n
    size = n
    if AGAIN:
        size = tl.where(tl.load(state_ptr + group * 2) == -1, n, 0)
    following = _load_bits(scores_ptr, first + inner, first + inner < size)
    lo, hi, bottom, shift = _bounds(bracket_ptr + group * 4 * PARTS, PARTS, LOG_BINS)
    tallies_ptr += group * (BINS + 3)
    slots_ptr += group * (BINS * SLOTS)
    tl.static_assert(n < 1023 * CHUNK)
    seen = tl.zeros([CHUNK], tl.int32)  # three counts: registers are what limits how much is on its way from memory
    for start in tl.range(first, size, step):
        bits = following
        ahead = start + step + inner
        following = _load_bits(scores_ptr, ahead, ahead < size)  # while this chunk is sorted
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
def _find_threshold(
    scores_ptr,
    counts_ptr,
    bracket_ptr,
    tallies_ptr,
    slots_ptr,
    state_ptr,
    group,
    size,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    LOG_BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """The state of a group, as of `threshold_kernel`."""
    BINS: tl.constexpr = 1 << LOG_BINS
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
        entry = tl.load(slots_ptr + group * (BINS * SLOTS) + entries, mask=tl.arange(0, SLOTS) < members, other=0)
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
        if AGAIN:
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
        else:
            parts = bracket_ptr + group * 4 * PARTS + tl.arange(0, PARTS)
            tl.store(parts, tl.zeros([PARTS], tl.int32) + low)
            tl.store(parts + PARTS, tl.zeros([PARTS], tl.int32) + high)
            tl.store(tallies_ptr + bins, tl.zeros([BINS], tl.int32))
            three = tl.arange(0, 4)
            tl.store(tallies_ptr + BINS + three, tl.zeros([4], tl.int32), mask=three < 3)
            threshold, last = zero - 1, zero
    tl.store(state_ptr + group * 2, threshold)
    tl.store(state_ptr + group * 2 + 1, last)


@jit
def threshold_kernel(
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
    AGAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """The lowest bits that are chosen in a group, and the last place at which they are; state: [groups, 2].

    The first time, where that takes more, the bits are left as -1, with bounds around them and cleared tallies. AGAIN:
    only such groups are looked at.
    """
    follow(PDL)
    group = tl.program_id(0).to(tl.int64)
    wanted = group >= 0
    if AGAIN:
        wanted = tl.load(state_ptr + group * 2) == -1
    if wanted:
        _find_threshold(
            *(scores_ptr, counts_ptr, bracket_ptr, tallies_ptr, slots_ptr, state_ptr),
            *(group, size, CHUNK, PARTS, LOG_BINS, SLOTS, AGAIN),
        )


@jit
def emit_kernel(
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
    PDL: tl.constexpr,
):
    """One row: what lies above the threshold, what equals it and is not past the last place, and what is forced."""
    follow(PDL)
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
