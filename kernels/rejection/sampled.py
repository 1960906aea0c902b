"""Verdicts of sampled rows by Triton: from logits without the host and without a row of probabilities in memory.

The smallest set of mass top_p is that of all entries up to some depth, and among those of just this depth of the lower
indices. It is found without sorting: `bracket` narrows down where this depth lies, `threshold` finds it, and `drawing`
draws.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backends import overlapping_launch, power_of_two
from kernels.rejection.bracket import EDGES, coarse_kernel, fine_kernel, list_kernel
from kernels.rejection.drawing import draw_kernel, weights_kernel
from kernels.rejection.greedy import best_kernel
from kernels.rejection.layout import FLOATS, INTS, split_vocabulary
from kernels.rejection.reference import DraftedRows
from kernels.rejection.threshold import verdict_kernel

CANDIDATES = 64  # of each chunk, that the bisecting program holds in registers; more are read again each time
SUPPORT = 128  # support entries taken at once


@dataclass(frozen=True)
class _Scratch:
    """What the kernels hand on. positions: rows * (γ + 1); splits: chunks of the vocabulary."""

    best: Tensor  # [positions, splits] float32, the largest logit of each chunk
    tokens: Tensor  # [positions, splits] int32, its lowest index
    sums: Tensor  # [positions, splits] float32, the sum of weights relative to it
    floats: Tensor  # [FLOATS, positions] float32 (kernels.rejection.layout)
    ints: Tensor  # [INTS, positions] int32
    listed: Tensor  # [positions, splits, CHUNK] int16, the candidates of each chunk
    listed_counts: Tensor  # [positions, splits] int32


def _make_scratch(positions: int, splits: int, chunk: int, device: torch.device) -> _Scratch:
    best, sums = (torch.empty(positions, splits, dtype=torch.float32, device=device) for _ in range(2))
    tokens, counts = (torch.empty(positions, splits, dtype=torch.int32, device=device) for _ in range(2))
    floats = torch.empty(FLOATS, positions, dtype=torch.float32, device=device)
    ints = torch.empty(INTS, positions, dtype=torch.int32, device=device)
    listed = torch.empty(positions, splits, chunk, dtype=torch.int16, device=device)
    return _Scratch(best, tokens, sums, floats, ints, listed, counts)


def judge_sampled_in_triton(logits: Tensor, drafted: DraftedRows) -> tuple[Tensor, Tensor]:
    """Judge as `kernels.rejection.judge_sampled` describes it."""
    (rows, gamma), device = drafted.draft_tokens.shape, logits.device
    cut = split_vocabulary(logits, gamma)
    splits, every, overlap = cut["SPLITS"], rows * (gamma + 1), overlapping_launch(device)
    accepted, following = torch.empty(2, rows, dtype=torch.int32, device=device)
    if not rows:
        return accepted, following
    scratch = _make_scratch(every, splits, cut["CHUNK"], device)
    weights = torch.empty(rows, splits, cut["CHUNK"], device=device, dtype=torch.float32)
    chunk_sums = torch.empty(2, rows, splits, device=device, dtype=torch.float32)
    common = (logits, drafted.draft_counts, drafted.temperature)
    support = (drafted.support_ids, drafted.support_probs)
    state = (scratch.floats, scratch.ints)
    _list_candidates(scratch, common, drafted.top_p, gamma, cut)
    verdict_kernel[(every,)](
        *(*common, drafted.top_p, scratch.best, scratch.tokens, *state, scratch.listed, scratch.listed_counts),
        *(drafted.draft_tokens, *support, drafted.accept_uniforms, gamma, every, drafted.support_ids.shape[2]),
        **cut,
        CANDIDATES=min(CANDIDATES, cut["CHUNK"]),
        SUPPORT=SUPPORT,
        num_warps=8,
        **overlap,
    )
    weights_kernel[(splits, rows)](
        *(*common, *state, *support, weights, chunk_sums, accepted, following),
        *(gamma, every, rows, drafted.support_ids.shape[2]),
        **cut,
        PLACES=power_of_two(gamma + 1),
        SUPPORT=SUPPORT,
        **overlap,
    )
    draw_kernel[(rows,)](
        *(*common, *state, weights, chunk_sums, drafted.draw_uniforms, accepted, following, gamma, every, rows),
        **cut,
        num_warps=8,
        **overlap,
    )
    return accepted, following


def _list_candidates(
    scratch: _Scratch, common: tuple[Tensor, Tensor, Tensor], top_p: Tensor, gamma: int, cut: dict[str, int]
) -> None:
    """Fill all of `scratch` but its integers: the likeliest tokens, two rounds of narrowing, the candidates."""
    every, splits = scratch.best.shape
    device, grid = scratch.best.device, (splits, every)
    coarse, fine = torch.empty(2, every, EDGES, dtype=torch.float32, device=device)
    coarse_sums, fine_sums = torch.empty(2, every, splits, EDGES, dtype=torch.float32, device=device)
    of_positions, overlap = (gamma, every), overlapping_launch(device)
    best, floats = scratch.best, scratch.floats
    best_kernel[grid](*common, best, scratch.tokens, scratch.sums, gamma, **cut, SAMPLED=True, **overlap)
    coarse_kernel[grid](
        *(*common, top_p, best, scratch.sums, floats, coarse, coarse_sums, *of_positions), **cut, EDGES=EDGES, **overlap
    )
    fine_kernel[grid](
        *(*common, top_p, floats, coarse, coarse_sums, fine, fine_sums, *of_positions), **cut, EDGES=EDGES, **overlap
    )
    list_kernel[grid](
        *(*common, top_p, floats, fine, fine_sums, scratch.listed, scratch.listed_counts, *of_positions),
        **cut,
        EDGES=EDGES,
        **overlap,
    )
