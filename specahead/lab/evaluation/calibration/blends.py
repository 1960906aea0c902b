"""Blends of draft heads: not negative least squares from the draft's block weights to the target's."""

import torch
from torch import Tensor

from specahead.sparsity.plan import Blend

ITERATIONS = 3000
LARGEST_HEADS = 8  # of a blend; the rest adds little and costs time every round


def fit_blends(gram: Tensor, cross: Tensor, ridge: float = 1e-4) -> Tensor:
    """Weights W >= 0 that minimise |X W - Y|² + ridge, from XᵀX [heads, heads] and XᵀY [heads, targets].

    Multiplicative updates (Lee and Seung 2001): from a positive start they stay positive and only descend.
    Returns [targets, heads] float64.
    """
    gram, cross = gram.double(), cross.double().clamp(min=0)
    gram = gram + ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    weights = torch.full_like(cross, 0.1)
    for _ in range(ITERATIONS):
        weights = weights * cross / (gram @ weights + 1e-30)
    return weights.T.contiguous()


def to_blend(weights: Tensor, draft_heads: int) -> Blend:
    """One row [draft layers * heads] as its largest entries, to three digits."""
    top = weights.topk(min(LARGEST_HEADS, len(weights)))
    kept = [(int(i), float(w)) for w, i in zip(top.values, top.indices, strict=True) if w >= 0.01 * top.values[0]]
    return tuple(sorted((i // draft_heads, i % draft_heads, float(f"{w:.3g}")) for i, w in kept))
