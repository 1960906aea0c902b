"""One budget for all rows at once: a plain reference of `specahead.kernels.selection.select_over_rows`."""

import torch
from torch import Tensor


def choose_over_all(scores: Tensor, count: int) -> Tensor:
    """Return the `count` highest of all scores [..., blocks], as bool of their shape. Only positive scores count."""
    flat = scores.flatten()
    best = flat.topk(min(max(0, count), len(flat)), sorted=False)
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[best.indices[best.values > 0]] = True
    return chosen.view(scores.shape)
