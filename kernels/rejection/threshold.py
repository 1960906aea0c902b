"""A position's threshold, found among its candidates by bisection on the bits of their depths; the token's test."""

import specahead.kernels.rejection.layout as layout
from specahead.kernels.backends import follow, jit, tl
from specahead.kernels.rejection.greedy import likeliest_of
from specahead.kernels.rejection.layout import FLOATS, INTS, SUPPORT, bits_of, depth_of, is_kept, scale_of, weight_of


@jit
def _sum(values):
    return tl.sum(tl.sum(values, 1), 0)


@jit
def _candidates(source, column, CHUNK: tl.constexpr, SPLITS_2: tl.constexpr, CANDIDATES: tl.constexpr):
    """Of each chunk of a position its listed entries from `column` on: indices and depth bits [SPLITS_2, CANDIDATES].

    source: a position's logits, its lists, the entries of each list [SPLITS_2] and of the longest, the peak and the
    scale. Bits are -1 past a list's entries.
    """
    row_ptr, lists_ptr, held, _most, peak, scale = source
    splits = tl.arange(0, SPLITS_2)[:, None]
    columns = column + tl.arange(0, CANDIDATES)[None, :]
    there = columns < held[:, None]
    index = splits * CHUNK + tl.load(lists_ptr + splits * CHUNK + columns, mask=there, other=0).to(tl.int32)
    logits = tl.load(row_ptr + index, mask=there, other=0.0).to(tl.float32)
    return index, tl.where(there, bits_of(depth_of(logits, peak, scale)), -1)


@jit
def _masses_to(
    bits, weights, p0, p1, p2, source, CHUNK: tl.constexpr, SPLITS_2: tl.constexpr, CANDIDATES: tl.constexpr
):
    """The weights' sums of candidates up to three depths: of a first tile, given, and of others, read every time."""
    m0 = _sum(tl.where(bits <= p0, weights, 0.0))
    m1 = _sum(tl.where(bits <= p1, weights, 0.0))
    m2 = _sum(tl.where(bits <= p2, weights, 0.0))
    for column in tl.range(CANDIDATES, source[3], CANDIDATES):
        _, more = _candidates(source, column, CHUNK, SPLITS_2, CANDIDATES)
        others = tl.where(more >= 0, weight_of(more), 0.0)
        m0 += _sum(tl.where(more <= p0, others, 0.0))
        m1 += _sum(tl.where(more <= p1, others, 0.0))
        m2 += _sum(tl.where(more <= p2, others, 0.0))
    return m0, m1, m2


@jit
def _ties_to(index, bits, cut, last, source, CHUNK: tl.constexpr, SPLITS_2: tl.constexpr, CANDIDATES: tl.constexpr):
    """How many candidates at just this depth have an index up to `last`."""
    ties = _sum(((bits == cut) & (index <= last)).to(tl.int32))
    for column in tl.range(CANDIDATES, source[3], CANDIDATES):
        where, more = _candidates(source, column, CHUNK, SPLITS_2, CANDIDATES)
        ties += _sum(((more == cut) & (where <= last)).to(tl.int32))
    return ties


@jit
def _threshold(
    source, bracket, VOCAB: tl.constexpr, CHUNK: tl.constexpr, SPLITS_2: tl.constexpr, CANDIDATES: tl.constexpr
):
    """CUT, LAST and KEPT of a position from its candidates.

    source: as for `_candidates`; bracket: the mass that is wanted, the candidates' first depth and the mass before it.
    """
    wanted, start, before = bracket
    most = source[3]
    index, bits = _candidates(source, 0, CHUNK, SPLITS_2, CANDIDATES)
    weights = tl.where(bits >= 0, weight_of(bits), 0.0)
    low = tl.min(tl.min(tl.where(bits >= 0, bits, 2**31 - 1), 1), 0)
    high = tl.max(tl.max(bits, 1), 0)
    for column in tl.range(CANDIDATES, source[3], CANDIDATES):
        _, more = _candidates(source, column, CHUNK, SPLITS_2, CANDIDATES)
        low = tl.minimum(low, tl.min(tl.min(tl.where(more >= 0, more, 2**31 - 1), 1), 0))
        high = tl.maximum(high, tl.max(tl.max(more, 1), 0))
    # The least depth up to which the mass is enough; the largest candidate's if rounding leaves all short of it.
    # Three probes a step, which do not wait for each other. A last step takes the mass above that depth.
    above = before
    searching = most > 0
    while searching:
        searching = low < high
        quarter = (high - low) // 4
        p0 = tl.where(searching, low + quarter, low - 1)
        p1 = tl.where(searching, low + (high - low) // 2, low - 1)
        p2 = tl.where(searching, high - 1 - quarter, low - 1)
        m0, m1, m2 = _masses_to(bits, weights, p0, p1, p2, source, CHUNK, SPLITS_2, CANDIDATES)
        above = before + m0
        enough0, enough1, enough2 = above >= wanted, before + m1 >= wanted, before + m2 >= wanted
        floor = tl.where(enough0, low, tl.where(enough1, p0 + 1, tl.where(enough2, p1 + 1, p2 + 1)))
        roof = tl.where(enough0, p0, tl.where(enough1, p1, tl.where(enough2, p2, high)))
        low = tl.where(searching, floor, low)
        high = tl.where(searching, roof, high)
    # Of the entries at this depth the first ones: as many as it takes, and one at least.
    ties = _ties_to(index, bits, low, VOCAB, source, CHUNK, SPLITS_2, CANDIDATES)
    weight = weight_of(low)
    lacking = tl.ceil((wanted - above) / tl.maximum(weight, 1e-37))
    needed = tl.minimum(tl.minimum(tl.maximum(lacking, 1.0), 2.0**30).to(tl.int32), ties)
    first, last = 0, tl.where(needed < ties, VOCAB - 1, 0)
    while first < last:
        middle = (first + last) // 2
        count = _ties_to(index, bits, low, middle, source, CHUNK, SPLITS_2, CANDIDATES)
        last = tl.where(count >= needed, middle, last)
        first = tl.where(count >= needed, first, middle + 1)
    # Rounding can leave no candidates at all: then what lies above the bracket is kept.
    cut = tl.where(most > 0, low, bits_of(start))
    last = tl.where(most > 0, tl.where(needed < ties, last, VOCAB), -1)
    return cut, last, tl.where(most > 0, above + needed * weight, before)


@jit
def verdict_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    top_p_ptr,
    floats_ptr,
    ints_ptr,
    best_ptr,
    tokens_ptr,
    listed_ptr,
    listed_counts_ptr,
    draft_tokens_ptr,
    support_ids_ptr,
    support_probs_ptr,
    uniforms_ptr,
    gamma,
    support,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A position's threshold, and whether its drafted token passes."""
    follow(PDL)
    at = tl.program_id(0)
    row = at // (gamma + 1)
    place = at % (gamma + 1)
    count = tl.load(counts_ptr + row).to(tl.int32)
    if place > count:
        return
    drafted = tl.load(draft_tokens_ptr + row * gamma + place, mask=place < count, other=-1).to(tl.int32)
    scale = scale_of(temperature_ptr, row)
    floats_ptr += at * FLOATS
    ints_ptr += at * INTS
    if scale == 0:
        only = at + tl.arange(0, 1)
        likeliest = tl.sum(likeliest_of(best_ptr, tokens_ptr, only, only >= 0, SPLITS, SPLITS_2), 0)
        tl.store(ints_ptr + layout.LIKELIEST, likeliest)
        tl.store(ints_ptr + layout.PASSED, (likeliest == drafted).to(tl.int32))
    else:
        peak = tl.load(floats_ptr + layout.PEAK)
        if tl.load(top_p_ptr + row).to(tl.float32) < 1:
            splits = tl.arange(0, SPLITS_2)
            row_ptr, lists_ptr = logits_ptr + at.to(tl.int64) * VOCAB, listed_ptr + at.to(tl.int64) * SPLITS * CHUNK
            held = tl.load(listed_counts_ptr + at * SPLITS + splits, mask=splits < SPLITS, other=0)
            wanted = tl.load(floats_ptr + layout.WANTED)
            bracket = (wanted, tl.load(floats_ptr + layout.FROM), tl.load(floats_ptr + layout.BELOW_FROM))
            source = (row_ptr, lists_ptr, held, tl.max(held, 0), peak, scale)
            cut, last, kept = _threshold(source, bracket, VOCAB, CHUNK, SPLITS_2, CANDIDATES)
        else:
            cut, last = 0x7F800000, -1  # all of finite depth
            kept = tl.load(floats_ptr + layout.MASS)
        tl.store(ints_ptr + layout.CUT, cut)
        tl.store(ints_ptr + layout.LAST, last)
        tl.store(floats_ptr + layout.KEPT, kept)
        if place < count:
            draft = row * gamma + place
            q = tl.zeros([SUPPORT], tl.float32)
            for s in tl.range(0, support, SUPPORT):
                entry = s + tl.arange(0, SUPPORT)
                ids = tl.load(support_ids_ptr + draft * support + entry, mask=entry < support, other=-1)
                probs = tl.load(support_probs_ptr + draft * support + entry, mask=entry < support, other=0.0)
                q += tl.where(ids == drafted, probs, 0.0)
            logit = tl.load(logits_ptr + at.to(tl.int64) * VOCAB + drafted).to(tl.float32)
            bits = bits_of(depth_of(logit, peak, scale))
            p = tl.where(is_kept(bits, drafted, cut, last), weight_of(bits) / kept, 0.0)
            u = tl.load(uniforms_ptr + draft).to(tl.float64)
            passed = u * tl.sum(q, 0).to(tl.float64) < p.to(tl.float64)
            tl.store(ints_ptr + layout.PASSED, passed.to(tl.int32))
