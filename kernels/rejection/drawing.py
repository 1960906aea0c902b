"""A row's verdict from those of its positions, and the draw of its next token."""

import specahead.kernels.rejection.layout as layout
from specahead.kernels.backends import follow, jit, tl
from specahead.kernels.rejection.layout import (
    FLOATS,
    INTS,
    SUPPORT,
    bits_of,
    depth_of,
    is_kept,
    logits_at,
    scale_of,
    weight_of,
)


@jit
def _target_probs(logits_ptr, floats_ptr, ints_ptr, at, scale, index, VOCAB: tl.constexpr):
    """The target's truncated distribution at a position, of these entries of the vocabulary."""
    peak = tl.load(floats_ptr + at * FLOATS + layout.PEAK)
    kept = tl.load(floats_ptr + at * FLOATS + layout.KEPT)
    cut = tl.load(ints_ptr + at * INTS + layout.CUT)
    last = tl.load(ints_ptr + at * INTS + layout.LAST)
    bits = bits_of(depth_of(logits_at(logits_ptr, at, index, VOCAB), peak, scale))
    inside = is_kept(bits, index, cut, last) & (index < VOCAB)
    return tl.where(inside, weight_of(bits) / kept, 0.0)


@jit
def weights_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    floats_ptr,
    ints_ptr,
    support_ids_ptr,
    support_probs_ptr,
    weights_ptr,
    chunk_sums_ptr,
    accepted_ptr,
    following_ptr,
    gamma,
    support,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's verdict, and of one chunk the weights that its next token is drawn with; their sum, and that of p."""
    follow(PDL)
    split, row = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts_ptr + row).to(tl.int32)
    places = tl.arange(0, PLACES)
    proposed = places < count
    passed_ptr = ints_ptr + row * (gamma + 1) * INTS + layout.PASSED
    passed = tl.load(passed_ptr + places * INTS, mask=proposed, other=0)
    accepted = tl.min(tl.where(proposed & (passed != 0), PLACES, places), 0)
    at = row * (gamma + 1) + accepted
    scale = scale_of(temperature_ptr, row)
    if split == 0:
        tl.store(accepted_ptr + row, accepted)
        if scale == 0:
            tl.store(following_ptr + row, tl.load(ints_ptr + at * INTS + layout.LIKELIEST))
    if scale == 0:
        return
    inner = tl.arange(0, CHUNK)
    probs = _target_probs(logits_ptr, floats_ptr, ints_ptr, at, scale, split * CHUNK + inner, VOCAB)
    chunk_ptr = weights_ptr + (row.to(tl.int64) * SPLITS + split) * CHUNK
    tl.store(chunk_ptr + inner, probs)
    total = tl.sum(probs, 0)
    tl.store(chunk_sums_ptr + (row * 2 + 1) * SPLITS + split, total)
    if accepted < count:
        # The draft's few entries are taken off in memory, by other threads than wrote them.
        tl.debug_barrier()
        draft = (row * gamma + accepted) * support
        for s in tl.range(0, support, SUPPORT):
            entry = s + tl.arange(0, SUPPORT)
            q = tl.load(support_probs_ptr + draft + entry, mask=entry < support, other=0.0)
            near = tl.load(support_ids_ptr + draft + entry, mask=entry < support, other=-1) - split * CHUNK
            ours = (q > 0) & (near >= 0) & (near < CHUNK)
            p = tl.load(chunk_ptr + near, mask=ours, other=0.0)
            tl.store(chunk_ptr + near, tl.maximum(p - q, 0.0), mask=ours)
        tl.debug_barrier()
        total = tl.sum(tl.load(chunk_ptr + inner), 0)
    tl.store(chunk_sums_ptr + row * 2 * SPLITS + split, total)


@jit
def _drawn(weights, threshold, N: tl.constexpr):
    """The first of N entries up to which the weight is more than `threshold`."""
    index = tl.arange(0, N)
    past = tl.where((tl.cumsum(weights, 0) > threshold) & (weights > 0), index, N)
    # u close to 1 may round up to the total: then the last of positive weight is meant.
    return tl.minimum(tl.min(past, 0), tl.max(tl.where(weights > 0, index, 0), 0))


@jit
def draw_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    floats_ptr,
    ints_ptr,
    weights_ptr,
    chunk_sums_ptr,
    uniforms_ptr,
    accepted_ptr,
    following_ptr,
    gamma,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    PDL: tl.constexpr,
):
    """The inverse of the cumulative distribution: first over chunks, then inside one."""
    follow(PDL)
    row = tl.program_id(0)
    scale = scale_of(temperature_ptr, row)
    if scale == 0:
        return
    at = row * (gamma + 1) + tl.load(accepted_ptr + row)
    splits = tl.arange(0, SPLITS_2)
    there = splits < SPLITS
    sums = tl.load(chunk_sums_ptr + row * 2 * SPLITS + splits, mask=there, other=0.0)
    # Rounding can leave an empty residual where p and q are equal; then p itself is the right draw.
    empty = tl.sum(sums, 0) == 0
    if empty:
        sums = tl.load(chunk_sums_ptr + (row * 2 + 1) * SPLITS + splits, mask=there, other=0.0)
    wide = sums.to(tl.float64)
    threshold = tl.load(uniforms_ptr + at).to(tl.float64) * tl.sum(wide, 0)
    chunk = _drawn(wide, threshold, SPLITS_2)
    rest = (threshold - tl.sum(tl.where(splits < chunk, wide, 0.0), 0)).to(tl.float32)
    inner = tl.arange(0, CHUNK)
    if empty:
        weights = _target_probs(logits_ptr, floats_ptr, ints_ptr, at, scale, chunk * CHUNK + inner, VOCAB)
    else:
        weights = tl.load(weights_ptr + (row.to(tl.int64) * SPLITS + chunk) * CHUNK + inner)
    token = _drawn(weights, rest, CHUNK)
    tl.store(following_ptr + row, chunk * CHUNK + token)
