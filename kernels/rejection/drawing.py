"""Drawing tokens in Triton: a row's next token after its verdict, and the tokens that a target draws by a race.

A row's verdict follows from those of its positions. Its next token is drawn by the inverse of a cumulative
distribution. `race` explains the other way to draw.
"""

import torch
from torch import Tensor

from specahead.kernels.backends import follow, jit, power_of_two, tl
from specahead.kernels.rejection.positions import (
    Largest,
    Logits,
    bits_of,
    depth_of,
    is_kept,
    likeliest_of,
    logits_at,
    scale_of,
    split_vocabulary,
    weight_of,
)
from specahead.kernels.rejection.race import arrivals_of_row
from specahead.kernels.rejection.reference import DraftedRows
from specahead.kernels.rejection.verdicts import SUPPORT, Drafted, judge_positions


def judge_sampled_in_triton(logits: Tensor, rows: DraftedRows) -> tuple[Tensor, Tensor]:
    """Judge as `specahead.kernels.rejection.judge_sampled` describes it, without a row of probabilities in memory."""
    (count, gamma), device = rows.draft_tokens.shape, logits.device
    split = split_vocabulary(logits, gamma)
    accepted, following = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    if not count:
        return accepted, following
    _, chunk, splits, _ = split["SPLIT"]
    weights = torch.empty(count, splits, chunk, device=device, dtype=torch.float32)
    sums = torch.empty(count, 2, splits, device=device, dtype=torch.float32)
    given, found = Logits(logits, rows.temperature, None), judge_positions(logits, rows, split)
    drafted, support = Drafted(None, rows.support_ids, rows.support_probs), rows.support_ids.shape[2]
    places, counts, uniforms = power_of_two(gamma + 1), rows.draft_counts, rows.draw_uniforms
    _weights_kernel[(splits, count)](
        given, counts, found, drafted, weights, sums, accepted, following, gamma, support, PLACES=places, **split
    )
    _draw_kernel[(count,)](given, found, weights, sums, uniforms, accepted, following, gamma, num_warps=8, **split)
    return accepted, following


def draw_own_in_triton(logits: Tensor, temperature: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """Draw as `specahead.kernels.rejection.draw_own` describes it."""
    rows, device = len(logits), logits.device
    drawn = torch.empty(rows, dtype=torch.int32, device=device)
    if not rows:
        return drawn
    nothing, counts = temperature.new_empty(rows, 0), torch.zeros(rows, dtype=torch.int32, device=device)
    alone = DraftedRows(
        nothing.int(),
        counts,
        nothing.int()[..., None],
        nothing[..., None],
        temperature,
        top_p,
        nothing,
        uniforms[:, None],
    )
    split, given = split_vocabulary(logits[:, None], 0), Logits(logits, temperature, None)
    found, shape = judge_positions(logits[:, None], alone, split), (rows, split["SPLIT"].SPLITS)
    soonest = Largest(
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        None,
    )
    _race_kernel[shape[::-1]](given, found, uniforms, soonest, **split)
    _winner_kernel[(rows,)](temperature, found, soonest, drawn, **split)
    return drawn


@jit
def _target_probs(given, found, at, scale, index, SPLIT: tl.constexpr):
    """Return the target's truncated distribution at a position, for these entries of the vocabulary."""
    depth = depth_of(logits_at(given.logits, at, index, SPLIT), tl.load(found.peak + at), scale)
    bits = bits_of(depth)
    inside = is_kept(bits, index, tl.load(found.cut + at), tl.load(found.last + at)) & (index < SPLIT.VOCAB)
    return tl.where(inside, weight_of(bits) / tl.load(found.kept + at), 0.0)


@jit
def _weights_kernel(
    given,
    counts_ptr,
    found,
    drafted,
    weights_ptr,
    sums_ptr,
    accepted_ptr,
    following_ptr,
    gamma,
    support,
    PLACES: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Judge a row, and make the weights of one chunk that its next token is drawn with; their sum, and that of p."""
    follow(PDL)
    split, row = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts_ptr + row).to(tl.int32)
    places = tl.arange(0, PLACES)
    proposed = places < count
    passed = tl.load(found.passed + row * (gamma + 1) + places, mask=proposed, other=0)
    accepted = tl.min(tl.where(proposed & (passed != 0), PLACES, places), 0)
    at = row * (gamma + 1) + accepted
    scale = scale_of(given.temperature, row)
    if split == 0:
        tl.store(accepted_ptr + row, accepted)
        if scale == 0:
            tl.store(following_ptr + row, tl.load(found.likeliest + at))
    if scale == 0:
        return
    inner = tl.arange(0, SPLIT.CHUNK)
    probs = _target_probs(given, found, at, scale, split * SPLIT.CHUNK + inner, SPLIT)
    chunk_ptr = weights_ptr + (row.to(tl.int64) * SPLIT.SPLITS + split) * SPLIT.CHUNK
    tl.store(chunk_ptr + inner, probs)
    total = tl.sum(probs, 0)
    tl.store(sums_ptr + (row * 2 + 1) * SPLIT.SPLITS + split, total)
    if accepted < count:
        # The draft's few entries are taken off in memory, by other threads than wrote them.
        tl.debug_barrier()
        draft = (row * gamma + accepted) * support
        for s in tl.range(0, support, SUPPORT):
            entry = s + tl.arange(0, SUPPORT)
            q = tl.load(drafted.probs + draft + entry, mask=entry < support, other=0.0)
            near = tl.load(drafted.ids + draft + entry, mask=entry < support, other=-1) - split * SPLIT.CHUNK
            ours = (q > 0) & (near >= 0) & (near < SPLIT.CHUNK)
            p = tl.load(chunk_ptr + near, mask=ours, other=0.0)
            tl.store(chunk_ptr + near, tl.maximum(p - q, 0.0), mask=ours)
        tl.debug_barrier()
        total = tl.sum(tl.load(chunk_ptr + inner), 0)
    tl.store(sums_ptr + row * 2 * SPLIT.SPLITS + split, total)


@jit
def _drawn(weights, threshold, N: tl.constexpr):
    """Return the first of N entries up to which the weight is more than `threshold`."""
    index = tl.arange(0, N)
    past = tl.where((tl.cumsum(weights, 0) > threshold) & (weights > 0), index, N)
    # u close to 1 may round up to the total: then the last of positive weight is meant.
    return tl.minimum(tl.min(past, 0), tl.max(tl.where(weights > 0, index, 0), 0))


@jit
def _draw_kernel(
    given,
    found,
    weights_ptr,
    sums_ptr,
    uniforms_ptr,
    accepted_ptr,
    following_ptr,
    gamma,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw by the inverse of the cumulative distribution: first over chunks, then inside one."""
    follow(PDL)
    row = tl.program_id(0)
    scale = scale_of(given.temperature, row)
    if scale == 0:
        return
    at = row * (gamma + 1) + tl.load(accepted_ptr + row)
    splits = tl.arange(0, SPLIT.SPLITS_2)
    there = splits < SPLIT.SPLITS
    sums = tl.load(sums_ptr + row * 2 * SPLIT.SPLITS + splits, mask=there, other=0.0)
    # Rounding can leave an empty residual where p and q are equal; then p itself is the right draw.
    empty = tl.sum(sums, 0) == 0
    if empty:
        sums = tl.load(sums_ptr + (row * 2 + 1) * SPLIT.SPLITS + splits, mask=there, other=0.0)
    wide = sums.to(tl.float64)
    threshold = tl.load(uniforms_ptr + at).to(tl.float64) * tl.sum(wide, 0)
    chunk = _drawn(wide, threshold, SPLIT.SPLITS_2)
    rest = (threshold - tl.sum(tl.where(splits < chunk, wide, 0.0), 0)).to(tl.float32)
    inner = tl.arange(0, SPLIT.CHUNK)
    if empty:
        weights = _target_probs(given, found, at, scale, chunk * SPLIT.CHUNK + inner, SPLIT)
    else:
        weights = tl.load(weights_ptr + (row.to(tl.int64) * SPLIT.SPLITS + chunk) * SPLIT.CHUNK + inner)
    tl.store(following_ptr + row, chunk * SPLIT.CHUNK + _drawn(weights, rest, SPLIT.CHUNK))


@jit
def _race_kernel(given, found, uniforms_ptr, soonest, SPLIT: tl.constexpr, PDL: tl.constexpr):
    """Find the first to arrive among the entries of a chunk that the row's threshold keeps, and when, as -log2."""
    follow(PDL)
    split, row = tl.program_id(0), tl.program_id(1)
    scale = scale_of(given.temperature, row)
    if scale == 0:
        return
    index = split * SPLIT.CHUNK + tl.arange(0, SPLIT.CHUNK)
    depth = depth_of(logits_at(given.logits, row, index, SPLIT), tl.load(found.peak + row), scale)
    cut, last = tl.load(found.cut + row), tl.load(found.last + row)
    inside = is_kept(bits_of(depth), index, cut, last) & (index < SPLIT.VOCAB)
    sooner = -depth - tl.log2(arrivals_of_row(tl.load(uniforms_ptr + row).to(tl.float64), index))
    sooner = tl.where(inside, sooner, -float("inf"))
    best = tl.max(sooner, 0)
    tl.store(soonest.logits + row * SPLIT.SPLITS + split, best)
    first = tl.min(tl.where(sooner == best, index, SPLIT.VOCAB - 1), 0)
    tl.store(soonest.tokens + row * SPLIT.SPLITS + split, first)


@jit
def _winner_kernel(temperature_ptr, found, soonest, drawn_ptr, SPLIT: tl.constexpr, PDL: tl.constexpr):
    """Find the first to arrive in a row; the likeliest token where the row is greedy."""
    follow(PDL)
    row = tl.program_id(0)
    if scale_of(temperature_ptr, row) == 0:
        token = tl.load(found.likeliest + row)
    else:
        only = row + tl.arange(0, 1)
        token = tl.sum(likeliest_of(soonest, only, only >= 0, SPLIT), 0)
    tl.store(drawn_ptr + row, tl.minimum(token, SPLIT.VOCAB - 1))
