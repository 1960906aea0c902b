"""Two rounds of sums at EDGES depths: each leaves a narrower bracket of depths around a position's threshold.

The entries in the second bracket, some thousand, are listed as candidates. Every sum has a fixed order, and what one
kernel decides is stored for the next, so that results depend on nothing but the inputs.
"""

import specahead.kernels.rejection.layout as layout
from specahead.kernels.backends import follow, jit, tl
from specahead.kernels.rejection.layout import EDGES, FLOATS, depth_of, logits_at, scale_of


@jit
def _store_sums(edges_ptr, sums_ptr, at, split, depth, edges, CHUNK: tl.constexpr, SPLITS: tl.constexpr):
    """Store a chunk's mass above each of eight edges, and, once for a position, these."""
    weights = tl.exp2(-depth)
    parts = ()
    for k in tl.static_range(EDGES):
        if split == 0:
            tl.store(edges_ptr + at * EDGES + k, edges[k])
        above = tl.where(depth < edges[k], weights, 0.0)
        # Over eight neighbours, which one thread holds; then all eight by one reduction across threads.
        parts = parts + (tl.sum(tl.reshape(above, [CHUNK // 8, 8]), 1),)  # type: ignore[assignment]
    evens = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))  # type: ignore[misc]
    odds = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))  # type: ignore[misc]
    sums = tl.reshape(tl.sum(tl.join(evens, odds), 0), [8])
    tl.store(sums_ptr + (at * SPLITS + split) * EDGES + tl.arange(0, EDGES), sums)


@jit
def coarse_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    top_p_ptr,
    best_ptr,
    chunk_sums_ptr,
    floats_ptr,
    edges_ptr,
    sums_ptr,
    gamma,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    PDL: tl.constexpr,
):
    """A position's peak and mass; a chunk's mass above each of EDGES depths that share out the possible ones."""
    follow(PDL)
    split, at = tl.program_id(0), tl.program_id(1)
    row = at // (gamma + 1)
    scale = scale_of(temperature_ptr, row)
    if (at % (gamma + 1) > tl.load(counts_ptr + row)) | (scale == 0):
        return
    splits = tl.arange(0, SPLITS_2)
    best = tl.load(best_ptr + at * SPLITS + splits, mask=splits < SPLITS, other=-float("inf"))
    sums = tl.load(chunk_sums_ptr + at * SPLITS + splits, mask=splits < SPLITS, other=0.0)
    floats_ptr += at * FLOATS
    peak = tl.max(best, 0)
    mass = tl.sum(sums * tl.exp2(-depth_of(best, peak, scale)), 0)
    top_p = tl.load(top_p_ptr + row).to(tl.float32)
    if split == 0:
        tl.store(floats_ptr + layout.PEAK, peak)
        tl.store(floats_ptr + layout.MASS, mass)
        tl.store(floats_ptr + layout.WANTED, top_p * mass)
    if top_p < 1:
        # The entries at and behind the threshold weigh at least (1 - top_p) of all, and are at most VOCAB: so much
        # over VOCAB is the least that the threshold's own can weigh. The margin is for rounding.
        reach = tl.log2(VOCAB / (mass * (1.0 - top_p))) + 0.01
        index = split * CHUNK + tl.arange(0, CHUNK)
        depth = depth_of(logits_at(logits_ptr, at, index, VOCAB), peak, scale)
        edges = ()
        for k in tl.static_range(EDGES):
            edges = edges + (reach * ((k + 1) / EDGES),)  # type: ignore[assignment]
        _store_sums(edges_ptr, sums_ptr, at, split, depth, edges, CHUNK, SPLITS)


@jit
def _crossing(edges_ptr, sums_ptr, at, wanted, lower, below, SPLITS: tl.constexpr, SPLITS_2: tl.constexpr):
    """Between which of the ascending edges the mass reaches `wanted`: `lower` and the mass `below` it come first.

    Returns the bracket [lower, upper), the mass below it, its share of mass that is wanted still, and the mass in the
    bracket and in its two neighbours.
    """
    k = tl.arange(0, EDGES)
    splits = tl.arange(0, SPLITS_2)
    sums = tl.load(
        sums_ptr + (at * SPLITS + splits[:, None]) * EDGES + k[None, :], mask=splits[:, None] < SPLITS, other=0.0
    )
    mass = tl.sum(sums, 0)
    edges = tl.load(edges_ptr + at * EDGES + k)
    # Rounding can leave all short of it; then the last bracket's entries are all wanted.
    j = tl.minimum(tl.sum((mass < wanted).to(tl.int32), 0), EDGES - 1)
    first = below
    below = tl.max(tl.where(k < j, mass, first), 0)
    upto = tl.sum(tl.where(k == j, mass, 0.0), 0)
    inside = upto - below
    before = below - tl.max(tl.where(k < j - 1, mass, first), 0)
    after = tl.where(j < EDGES - 1, tl.sum(tl.where(k == j + 1, mass, 0.0), 0) - upto, inside)
    upper = tl.sum(tl.where(k == j, edges, 0.0), 0)
    lower = tl.max(tl.where(k < j, edges, lower), 0)
    return lower, upper, below, inside, before, after


@jit
def fine_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    top_p_ptr,
    floats_ptr,
    coarse_ptr,
    coarse_sums_ptr,
    edges_ptr,
    sums_ptr,
    gamma,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    PDL: tl.constexpr,
):
    """A chunk's mass above each of EDGES depths in the bracket, ever closer to where the threshold should be."""
    follow(PDL)
    split, at = tl.program_id(0), tl.program_id(1)
    row = at // (gamma + 1)
    scale = scale_of(temperature_ptr, row)
    top_p = tl.load(top_p_ptr + row).to(tl.float32)
    if (at % (gamma + 1) > tl.load(counts_ptr + row)) | (scale == 0) | (top_p >= 1):
        return
    logits = logits_at(logits_ptr, at, split * CHUNK + tl.arange(0, CHUNK), VOCAB)  # while other loads wait
    floats_ptr += at * FLOATS
    peak = tl.load(floats_ptr + layout.PEAK)
    wanted = tl.load(floats_ptr + layout.WANTED)
    lower, upper, below, inside, before, after = _crossing(
        coarse_ptr, coarse_sums_ptr, at, wanted, 0.0, 0.0, SPLITS, SPLITS_2
    )
    if split == 0:
        tl.store(floats_ptr + layout.LOWER, lower)
        tl.store(floats_ptr + layout.BELOW_LOWER, below)
    # Mass per depth taken as a line between the means with the neighbours: where it has reached what is wanted.
    share = tl.minimum(tl.maximum((wanted - below) / tl.maximum(inside, 1e-30), 0.0), 1.0)
    here, there = before + inside, inside + after
    both = share * (here + there)
    guess = both / tl.maximum(here + tl.sqrt(tl.maximum(here * here + (there - here) * both, 0.0)), 1e-30)
    edges = ()
    for k in tl.static_range(EDGES - 1):
        # -1/2, -1/8, … and …, 1/16, 1/4; the last edge is the bracket's own.
        part = guess - 2.0 * 0.25 ** (k + 1) if k < EDGES // 2 else guess + 0.25 ** (EDGES - 1 - k)
        edges = edges + (lower + (upper - lower) * tl.minimum(tl.maximum(part, 0.0), 1.0),)  # type: ignore[assignment]
    depth = depth_of(logits, peak, scale)
    _store_sums(edges_ptr, sums_ptr, at, split, depth, edges + (upper,), CHUNK, SPLITS)


@jit
def list_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    top_p_ptr,
    floats_ptr,
    edges_ptr,
    sums_ptr,
    listed_ptr,
    listed_counts_ptr,
    gamma,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    PDL: tl.constexpr,
):
    """Which entries of a chunk lie in the second round's bracket, ascending."""
    follow(PDL)
    split, at = tl.program_id(0), tl.program_id(1)
    row = at // (gamma + 1)
    scale = scale_of(temperature_ptr, row)
    top_p = tl.load(top_p_ptr + row).to(tl.float32)
    if (at % (gamma + 1) > tl.load(counts_ptr + row)) | (scale == 0) | (top_p >= 1):
        return
    logits = logits_at(logits_ptr, at, split * CHUNK + tl.arange(0, CHUNK), VOCAB)  # while other loads wait
    floats_ptr += at * FLOATS
    peak = tl.load(floats_ptr + layout.PEAK)
    wanted = tl.load(floats_ptr + layout.WANTED)
    lower = tl.load(floats_ptr + layout.LOWER)
    below = tl.load(floats_ptr + layout.BELOW_LOWER)
    lower, upper, below, _, _, _ = _crossing(edges_ptr, sums_ptr, at, wanted, lower, below, SPLITS, SPLITS_2)
    if split == 0:
        tl.store(floats_ptr + layout.FROM, lower)
        tl.store(floats_ptr + layout.BELOW_FROM, below)
    inner = tl.arange(0, CHUNK)
    depth = depth_of(logits, peak, scale)
    inside = (depth >= lower) & (depth < upper)
    order = tl.cumsum(inside.to(tl.int32), 0)
    place = (at.to(tl.int64) * SPLITS + split) * CHUNK + order - 1
    tl.store(listed_ptr + place, inner.to(tl.int16), mask=inside)
    tl.store(listed_counts_ptr + at * SPLITS + split, tl.sum(inside.to(tl.int32), 0))
