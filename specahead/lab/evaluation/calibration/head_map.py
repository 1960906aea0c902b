"""STS, Algorithm 1: which draft head predicts best what a target head attends to."""

import torch
from torch import Tensor

from specahead.kernels.selection import top_k_mask


def top_k_overlap(draft: Tensor, target: Tensor, k: int) -> Tensor:
    """How many of the top-k blocks each draft head shares with each target head, for one query.

    draft: [draft_heads, blocks], target: [target_heads, blocks]. Returns [target_heads, draft_heads] float32.
    """
    return _top(target, k) @ _top(draft, k).T


def _top(weights: Tensor, k: int) -> Tensor:
    rows, blocks = weights.shape
    return top_k_mask(weights, torch.full((rows,), blocks), torch.full((rows,), k)).float()


def best_draft_heads(overlap: Tensor) -> tuple[Tensor, Tensor]:
    """overlap [target_heads, draft_heads] -> the best draft head of each target head and its overlap."""
    best = overlap.max(dim=1)
    return best.indices, best.values
