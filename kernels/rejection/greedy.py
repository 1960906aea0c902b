"""The likeliest tokens by Triton, and the verdicts of rows that are all greedy."""

import torch
from torch import Tensor

from specahead.kernels.backends import follow, jit, power_of_two, tl
from specahead.kernels.rejection.layout import depth_of, logits_at, scale_of, split_vocabulary


def judge_greedy_in_triton(logits: Tensor, draft_tokens: Tensor, draft_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Judge as `specahead.kernels.rejection.judge_greedy` describes it."""
    (rows, gamma), device = draft_tokens.shape, logits.device
    cut = split_vocabulary(logits, gamma)
    splits, every = cut["SPLITS"], rows * (gamma + 1)
    accepted, following = torch.empty(2, rows, dtype=torch.int32, device=device)
    if not rows:
        return accepted, following
    best = torch.empty(every, splits, dtype=torch.float32, device=device)
    tokens = torch.empty(every, splits, dtype=torch.int32, device=device)
    best_kernel[(splits, every)](logits, draft_counts, best, best, tokens, best, gamma, **cut, SAMPLED=False)
    _greedy_verdict_kernel[(rows,)](
        best, tokens, draft_tokens, draft_counts, accepted, following, gamma, **cut, PLACES=power_of_two(gamma + 1)
    )
    return accepted, following


@jit
def best_kernel(
    logits_ptr,
    counts_ptr,
    temperature_ptr,
    best_ptr,
    tokens_ptr,
    sums_ptr,
    gamma,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    SAMPLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of each chunk of each position: the largest logit, its lowest index, the sum of weights relative to it."""
    follow(PDL)
    split, at = tl.program_id(0), tl.program_id(1)
    row = at // (gamma + 1)
    if at % (gamma + 1) > tl.load(counts_ptr + row):
        return
    index = split * CHUNK + tl.arange(0, CHUNK)
    logits = logits_at(logits_ptr, at, index, VOCAB)
    best = tl.max(logits, 0)
    tl.store(best_ptr + at * SPLITS + split, best)
    tl.store(tokens_ptr + at * SPLITS + split, tl.min(tl.where(logits == best, index, VOCAB), 0))
    if SAMPLED:
        scale = scale_of(temperature_ptr, row)
        if scale > 0:
            base = tl.where(best == -float("inf"), 0.0, best)
            weights = tl.exp2(-depth_of(logits, base, scale))
            tl.store(sums_ptr + at * SPLITS + split, tl.sum(weights, 0))


@jit
def likeliest_of(best_ptr, tokens_ptr, at, there, SPLITS: tl.constexpr, SPLITS_2: tl.constexpr):
    """The likeliest token of positions `at` [n], the lowest of several; 0 where not `there`."""
    split = tl.arange(0, SPLITS_2)[None, :]
    inside = there[:, None] & (split < SPLITS)
    best = tl.load(best_ptr + at[:, None] * SPLITS + split, mask=inside, other=-float("inf"))
    tokens = tl.load(tokens_ptr + at[:, None] * SPLITS + split, mask=inside, other=0)
    return tl.min(tl.where(inside & (best == tl.max(best, 1)[:, None]), tokens, 2**31 - 1), 1)


@jit
def _greedy_verdict_kernel(
    best_ptr,
    tokens_ptr,
    draft_tokens_ptr,
    counts_ptr,
    accepted_ptr,
    following_ptr,
    gamma,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    row = tl.program_id(0)
    place = tl.arange(0, PLACES)
    count = tl.load(counts_ptr + row).to(tl.int32)
    likeliest = likeliest_of(best_ptr, tokens_ptr, row * (gamma + 1) + place, place <= count, SPLITS, SPLITS_2)
    drafted = tl.load(draft_tokens_ptr + row * gamma + place, mask=place < count, other=-1).to(tl.int32)
    accepted = tl.min(tl.where((place < count) & (drafted == likeliest), PLACES, place), 0)
    tl.store(accepted_ptr + row, accepted)
    tl.store(following_ptr + row, tl.sum(tl.where(place == accepted, likeliest, 0), 0))
