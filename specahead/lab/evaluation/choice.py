"""Plain choices of blocks by their scores: what rivals read, and references for `specahead.kernels.selection`.

Scores are float [..., blocks], not negative; choices are bool of the same shape.
"""

import math

import torch
from torch import Tensor

from specahead.kernels.selection import top_k_mask
from specahead.sparsity.plan import Plan


def choose(scores: Tensor, plan: Plan, base: int) -> Tensor:
    """Return the heaviest blocks of each row that fit the plan's budget, mandatory blocks left out.

    It chooses from the blocks between sinks and window, and leaves room for these. base: committed tokens.
    """
    flat, blocks = scores.flatten(0, -2), scores.shape[-1]
    first, last = plan.middle(plan.num_blocks(base))
    count = torch.full((len(flat),), last - first, device=scores.device)
    room = max(0, budget_blocks(plan, blocks) - (blocks - (last - first)))
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[:, first:last] = top_k_mask(flat[:, first:last], count, torch.full_like(count, room))
    return chosen.view(scores.shape)


def choose_nucleus(scores: Tensor, mass: float = 0.95) -> Tensor:
    """Return the fewest of each row's heaviest blocks whose scores add up to `mass` of the row's sum."""
    ranked, order = scores.double().sort(stable=True, dim=-1, descending=True)
    heavier = ranked.cumsum(-1) - ranked  # the sum of what stands before
    inside = heavier < mass * ranked.sum(-1, keepdim=True)
    return torch.zeros_like(inside).scatter_(-1, order, inside)


def budget_blocks(plan: Plan, blocks: int) -> int:
    """Return how many of a head's blocks the budget has room for, mandatory ones included."""
    return min(blocks, max(1, math.ceil(plan.share(blocks) * blocks)))


def mandatory(plan: Plan, base: int, blocks: int, window: int | None = None) -> Tensor:
    """Return the sinks, the recent window before `base` and all blocks after it, bool [blocks]."""
    first, last = plan.middle(plan.num_blocks(base), window)
    always = torch.ones(blocks, dtype=torch.bool)
    always[first:last] = False
    return always


def choose_over_all(scores: Tensor, count: int) -> Tensor:
    """Return the `count` highest of all scores [..., blocks], as bool of their shape. Only positive scores count."""
    flat = scores.flatten()
    best = flat.topk(min(max(0, count), len(flat)), sorted=False)
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[best.indices[best.values > 0]] = True
    return chosen.view(scores.shape)
