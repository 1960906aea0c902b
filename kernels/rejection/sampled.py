"""Verdicts of sampled rows by Triton: from logits without the host and without a row of probabilities in memory.

The smallest set of mass top_p is that of all entries up to some depth, and among those of just this depth of the lower
indices. It is found without sorting: `bracket` narrows down where this depth lies, `threshold` finds it, and `drawing`
draws; where the target draws its own tokens whatever is drafted, `race` does.
"""

import torch
from torch import Tensor

from specahead.kernels.backends import power_of_two
from specahead.kernels.rejection.bracket import coarse_kernel, fine_kernel, list_kernel
from specahead.kernels.rejection.drawing import draw_kernel, weights_kernel
from specahead.kernels.rejection.greedy import best_kernel
from specahead.kernels.rejection.layout import EDGES, FLOATS, INTS, split_vocabulary
from specahead.kernels.rejection.race import race_kernel, winner_kernel
from specahead.kernels.rejection.reference import DraftedRows
from specahead.kernels.rejection.threshold import verdict_kernel

CANDIDATES = 64  # of each chunk, that the bisecting program holds in registers; more are read again each time


def judge_sampled_in_triton(logits: Tensor, drafted: DraftedRows) -> tuple[Tensor, Tensor]:
    """Judge as `specahead.kernels.rejection.judge_sampled` describes it."""
    (rows, gamma), device = drafted.draft_tokens.shape, logits.device
    cut = split_vocabulary(logits, gamma)
    splits, chunk = cut["SPLITS"], cut["CHUNK"]
    accepted, following = torch.empty(2, rows, dtype=torch.int32, device=device)
    if not rows:
        return accepted, following
    weights = torch.empty(rows, splits, chunk, device=device, dtype=torch.float32)
    chunk_sums = torch.empty(rows, 2, splits, device=device, dtype=torch.float32)
    common = (logits, drafted.draft_counts, drafted.temperature)
    support, width = (drafted.support_ids, drafted.support_probs), drafted.support_ids.shape[2]
    floats, ints = _judge_positions(logits, drafted, cut)
    weights_kernel[(splits, rows)](
        *(*common, floats, ints, *support, weights, chunk_sums, accepted, following, gamma, width),
        **cut,
        PLACES=power_of_two(gamma + 1),
    )
    draw_kernel[(rows,)](
        *(*common, floats, ints, weights, chunk_sums, drafted.draw_uniforms, accepted, following, gamma),
        **cut,
        num_warps=8,
    )
    return accepted, following


def draw_own_in_triton(logits: Tensor, temperature: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """Draw as `specahead.kernels.rejection.draw_own` describes it."""
    rows = len(logits)
    drawn = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return drawn
    alone, cut = _nothing_drafted(temperature, top_p, uniforms), split_vocabulary(logits[:, None], 0)
    floats, ints = _judge_positions(logits[:, None], alone, cut)
    best = torch.empty(rows, cut["SPLITS"], dtype=torch.float32, device=logits.device)
    tokens = torch.empty_like(best, dtype=torch.int32)
    race_kernel[(cut["SPLITS"], rows)](logits, temperature, floats, ints, uniforms, best, tokens, **cut)
    winner_kernel[(rows,)](temperature, ints, best, tokens, drawn, **cut)
    return drawn


def _nothing_drafted(temperature: Tensor, top_p: Tensor, uniforms: Tensor) -> DraftedRows:
    rows, nothing = len(temperature), temperature.new_empty(len(temperature), 0)
    counts = torch.zeros(rows, dtype=torch.int32, device=temperature.device)
    of_draft = nothing.int(), counts, nothing.int()[..., None], nothing[..., None]
    return DraftedRows(*of_draft, temperature, top_p, nothing.to(uniforms.dtype), uniforms[:, None])


def _judge_positions(logits: Tensor, drafted: DraftedRows, cut: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Find each position's threshold, and whether its drafted token passes; return floats and ints of
    specahead.kernels.rejection.layout.
    """
    rows, gamma = drafted.draft_tokens.shape
    common = (logits, drafted.draft_counts, drafted.temperature)
    support, width = (drafted.support_ids, drafted.support_probs), drafted.support_ids.shape[2]
    ints = torch.empty(rows * (gamma + 1), INTS, dtype=torch.int32, device=logits.device)
    floats, *candidates = _list_candidates(common, drafted.top_p, gamma, cut)
    verdict_kernel[(rows * (gamma + 1),)](
        *(*common, drafted.top_p, floats, ints, *candidates, drafted.draft_tokens, *support),
        *(drafted.accept_uniforms, gamma, width),
        **cut,
        CANDIDATES=min(CANDIDATES, cut["CHUNK"]),
        num_warps=8,
    )
    return floats, ints


def _list_candidates(
    common: tuple[Tensor, Tensor, Tensor], top_p: Tensor, gamma: int, cut: dict[str, int]
) -> tuple[Tensor, ...]:
    """Find the likeliest tokens, and by two rounds of narrowing the candidates for the threshold.

    positions: rows * (γ + 1); splits: chunks of the vocabulary. Returns floats [positions, FLOATS]
    (kernels.rejection.layout); the largest logit of each chunk [positions, splits] float32 and its lowest index, int32;
    the candidates of each chunk [positions, splits, CHUNK] int16 and their counts [positions, splits] int32.
    """
    splits, every, device = cut["SPLITS"], len(top_p) * (gamma + 1), top_p.device
    best, sums = (torch.empty(every, splits, dtype=torch.float32, device=device) for _ in range(2))
    tokens, counts = (torch.empty(every, splits, dtype=torch.int32, device=device) for _ in range(2))
    floats = torch.empty(every, FLOATS, dtype=torch.float32, device=device)
    listed = torch.empty(every, splits, cut["CHUNK"], dtype=torch.int16, device=device)
    coarse, fine = torch.empty(2, every, EDGES, dtype=torch.float32, device=device)
    coarse_sums, fine_sums = torch.empty(2, every, splits, EDGES, dtype=torch.float32, device=device)
    grid = splits, every
    best_kernel[grid](*common, best, tokens, sums, gamma, **cut, SAMPLED=True)
    coarse_kernel[grid](*common, top_p, best, sums, floats, coarse, coarse_sums, gamma, **cut)
    fine_kernel[grid](*common, top_p, floats, coarse, coarse_sums, fine, fine_sums, gamma, **cut)
    list_kernel[grid](*common, top_p, floats, fine, fine_sums, listed, counts, gamma, **cut)
    return floats, best, tokens, listed, counts
