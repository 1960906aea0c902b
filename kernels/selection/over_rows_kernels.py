"""The Triton kernels of one budget over all rows of a group.

Scores are ordered as their bit patterns are, since none is negative. Pivots are ranked in a sample of a group, and two
of them bound the threshold with odds of thousands to one. One pass over all scores counts those at or above the upper
bound and sorts those between the bounds into bins. The bin that holds the threshold is small enough to compare all its
entries with all. Where that fails, because the sample misled or a bin ran over, a second pass sorts the entries of that
bin; where that fails too, because many scores are alike, one program a group searches all its entries.
"""

from typing import Any, NamedTuple

from specahead.kernels.backends import follow, jit, tl
from specahead.kernels.threshold import Bounds, search


class Workspace(NamedTuple):
    """What the kernels of one selection hand on to one another.

    bracket: [groups, 4, PARTS] int32. Each part's highest pivot that enough of the sample reaches, or 0; its lowest
        that too little reaches, or one past infinity; its lowest and its highest positive pivot
    tallies: [groups, BINS + 3] int32, the entries in each bin, at or above the upper bound, at the beginning of the
        bins, and above 0
    slots: [groups, BINS, SLOTS] int64, the first entries of each bin, as `_entry` makes them
    state: [groups, 2] int32, the bits of the lowest chosen score and the last place at which a score of just these
        bits is chosen. -1, 0: not found yet
    """

    bracket: Any
    tallies: Any
    slots: Any
    state: Any


@jit
def _load_bits(scores_ptr, at, inside):
    return tl.load(scores_ptr + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)


@jit
def _entry(bits, place):
    """Return one number for a score's bits and its place in the group; of equal scores the first is the greatest."""
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@jit
def _clear_tallies(tallies_ptr, first, BINS: tl.constexpr, COUNT: tl.constexpr):
    """Set COUNT bins from `first` on, and the three counts after all bins, to 0."""
    tl.store(tallies_ptr + first + tl.arange(0, COUNT), tl.zeros([COUNT], tl.int32))
    behind = tl.arange(0, 4)
    tl.store(tallies_ptr + BINS + behind, tl.zeros([4], tl.int32), mask=behind < 3)


@jit
def bracket_kernel(
    scores_ptr,
    counts_ptr,
    work,
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
    """Rank some of a group's pivots in its sample, into `work.bracket`, and clear as many of its tallies."""
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
    past = 0x7F800001  # infinity is 0x7F800000
    lo = tl.max(tl.where((pivot > 0) & (rank >= about + margin), pivot, 0), 0)
    hi = tl.min(tl.where((pivot > 0) & (rank <= about - margin), pivot, past), 0)
    hi = tl.where(total <= about - margin, 1, hi)  # more are wanted than are positive
    bracket_ptr = work.bracket + group * 4 * PARTS + part
    tl.store(bracket_ptr, lo)
    tl.store(bracket_ptr + PARTS, hi)
    tl.store(bracket_ptr + 2 * PARTS, tl.min(tl.where(pivot > 0, pivot, past), 0))
    tl.store(bracket_ptr + 3 * PARTS, tl.max(tl.maximum(pivot, 0), 0))
    _clear_tallies(work.tallies + group * (BINS + 3), part * (BINS // PARTS), BINS, BINS // PARTS)


@jit
def _bin_bounds(bracket_ptr, PARTS: tl.constexpr, LOG_BINS: tl.constexpr):
    """Return a group's bounds, where its bins begin, and by how much a bit pattern is shifted to give its bin.

    Bin 0 holds what lies between the lower bound and the beginning of the bins. What equals the beginning is in no bin.
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
    work,
    n: tl.constexpr,
    rows: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    LOG_BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    AGAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort the scores between the bounds into bins, and count the others, in a row or in a share of its chunks.

    AGAIN: only in groups whose threshold is still to be found.
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
        size = tl.where(tl.load(work.state + group * 2) == -1, n, 0)
    following = _load_bits(scores_ptr, first + inner, first + inner < size)
    lo, hi, bottom, shift = _bin_bounds(work.bracket + group * 4 * PARTS, PARTS, LOG_BINS)
    tallies_ptr = work.tallies + group * (BINS + 3)
    slots_ptr = work.slots + group * (BINS * SLOTS)
    tl.static_assert(n < 1023 * CHUNK)
    seen = tl.zeros([CHUNK], tl.int32)  # three counts: registers limit how much is on its way from memory
    for start in tl.range(first, size, step):
        bits = following
        ahead = start + step + inner
        following = _load_bits(scores_ptr, ahead, ahead < size)  # while this chunk is sorted
        positive = tl.where(bits > 0, 1 << 20, 0)
        seen += tl.where(bits >= hi, positive + 1, tl.where(bits == bottom, positive + (1 << 10), positive))
        between = (bits > lo) & (bits < hi) & (bits != bottom)
        bin = tl.where(bits > bottom, 1 + tl.minimum((bits - bottom) >> shift, BINS - 2), 0)
        slot = tl.atomic_add(tallies_ptr + bin, 1, mask=between, sem="relaxed")
        entry = _entry(bits, row % rows * n + start + inner)
        tl.store(slots_ptr + bin * SLOTS + slot, entry, mask=between & (slot < SLOTS))
    tl.atomic_add(tallies_ptr + BINS, tl.sum(seen & 1023, 0), sem="relaxed")
    tl.atomic_add(tallies_ptr + BINS + 1, tl.sum((seen >> 10) & 1023, 0), sem="relaxed")
    tl.atomic_add(tallies_ptr + BINS + 2, tl.sum(seen >> 20, 0), sem="relaxed")


@jit
def _count_scores(group, probes):
    """Measure for `search` how many keys of a group are at or above four probes.

    group: the group's scores, the columns of a chunk, how many scores there are, and `tied`. A key is a score's bits
        or, where `tied` is not negative, the number of places from the score's own on if its bits are `tied`.
    """
    scores_ptr, column, size, tied = group
    c0, c1, c2, c3 = column * 0, column * 0, column * 0, column * 0
    for start in tl.range(0, size, column.shape[0]):
        at = start + column
        bits = _load_bits(scores_ptr, at, at < size)
        key = tl.where(tied < 0, bits, tl.where(bits == tied, size - at, 0))
        c0 += (key >= probes[0]).to(tl.int32)
        c1 += (key >= probes[1]).to(tl.int32)
        c2 += (key >= probes[2]).to(tl.int32)
        c3 += (key >= probes[3]).to(tl.int32)
    counts = (tl.sum(c0, 0), tl.sum(c1, 0), tl.sum(c2, 0), tl.sum(c3, 0))
    return counts, counts


@jit
def _search_scores(scores_ptr, size, wanted, low, high, at_low, at_high, CHUNK: tl.constexpr):
    """Return the lowest bits of the `wanted` highest scores, which lie between `low` and `high`, and the last place."""
    column = tl.arange(0, CHUNK)
    bounds = Bounds(lo=low, hi=high, at_lo=at_low, at_hi=at_high, many_lo=at_low, many_hi=at_high)
    bounds = search(_count_scores, (scores_ptr, column, size, low * 0 - 1), None, wanted, bounds, False)
    threshold, ties, zero = bounds.lo, bounds.at_lo - bounds.at_hi, wanted * 0
    places = Bounds(lo=zero + 1, hi=zero + size + 1, at_lo=ties, at_hi=zero, many_lo=ties, many_hi=zero)
    left = wanted - bounds.at_hi
    places = search(_count_scores, (scores_ptr, column, size, threshold), None, left, places, False)
    return threshold, size - places.lo


@jit
def threshold_kernel(
    scores_ptr,
    counts_ptr,
    work,
    size,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    LOG_BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    AGAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the lowest chosen bits of a group and their last place, into `work.state`.

    The first time, a bin that ran over leaves new bounds in the bracket. AGAIN: then all entries are searched.
    """
    follow(PDL)
    BINS: tl.constexpr = 1 << LOG_BINS
    group = tl.program_id(0).to(tl.int64)
    if (tl.load(work.state + group * 2) != -1) & AGAIN:
        return
    bracket_ptr = work.bracket + group * 4 * PARTS
    tallies_ptr = work.tallies + group * (BINS + 3)
    bins = tl.arange(0, BINS)
    found = tl.load(tallies_ptr + bins)
    above = tl.load(tallies_ptr + BINS)
    equal = tl.load(tallies_ptr + BINS + 1)
    positive = tl.load(tallies_ptr + BINS + 2)
    count = tl.load(counts_ptr + group).to(tl.int32)
    _lo, hi, bottom, shift = _bin_bounds(bracket_ptr, PARTS, LOG_BINS)
    zero = above * 0
    wanted = tl.minimum(count, positive)
    upper = tl.where(bins > 0, found, 0)  # the bins above the beginning of the bins
    reached = above + tl.sum(upper, 0) - tl.cumsum(upper, 0) + upper
    bin = tl.sum(((bins > 0) & (reached >= wanted)).to(tl.int32), 0)
    members = tl.sum(tl.where(bins == bin, found, 0), 0)
    # How many scores are above the bin, and between which bits it lies.
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
        slot = tl.arange(0, SLOTS)
        entry = tl.load(work.slots + (group * BINS + bin) * SLOTS + slot, mask=slot < members, other=0)
        rank = tl.sum((entry[None, :] >= entry[:, None]).to(tl.int32), 1)
        chosen = tl.max(tl.where(rank == wanted - greater, entry, 0), 0)
        threshold, last = (chosen >> 32).to(tl.int32), 0x7FFFFFFF - (chosen & 0x7FFFFFFF).to(tl.int32)
    else:
        if wanted <= above:
            low, high, at_lo, at_hi = hi, zero + 0x7F800001, above, zero
        elif (bin == 0) & (wanted <= greater):  # greater than what is below the beginning of the bins
            low, high, at_lo, at_hi = bottom, bottom + 1, greater, greater - equal
        elif bin == 0:
            low, high, at_lo, at_hi = zero + 1, bottom, positive, greater
        if AGAIN:
            threshold, last = _search_scores(scores_ptr + group * size, size, wanted, low, high, at_lo, at_hi, CHUNK)
        else:
            parts = tl.arange(0, PARTS)
            tl.store(bracket_ptr + parts, tl.zeros([PARTS], tl.int32) + low)
            tl.store(bracket_ptr + PARTS + parts, tl.zeros([PARTS], tl.int32) + high)
            _clear_tallies(tallies_ptr, 0, BINS, BINS)
            threshold, last = zero - 1, zero
    tl.store(work.state + group * 2, threshold)
    tl.store(work.state + group * 2 + 1, last)


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
    CHUNK: tl.constexpr,
    INNER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the chosen and the forced entries of one row: a list and its count, or bits where `lists_ptr` is None."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = row // rows
    inner = tl.arange(0, CHUNK)
    following = _load_bits(scores_ptr + row * n, inner, inner < n)
    if forced_ptr is not None:
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
        if forced_ptr is not None:
            chosen = chosen | (forced_following != 0)
            forced_following = tl.load(forced_ptr + row * n + ahead, mask=ahead < n, other=0)
        if lists_ptr is not None:
            place = tl.cumsum(chosen.to(tl.int32), 0) - 1 + taken
            tl.store(lists_ptr + out_row * n + place, at, mask=chosen)
            taken += tl.sum(chosen.to(tl.int32), 0)
        else:
            bit = chosen.to(tl.int64) << (at % 64).to(tl.int64)
            word = tl.sum(tl.reshape(bit, [CHUNK // 64, 64]), 1)
            place = start // 64 + tl.arange(0, CHUNK // 64)
            tl.store(words_ptr + row * word_count + place, word, mask=place < word_count)
    if lists_ptr is not None:
        tl.store(taken_ptr + out_row, taken)
