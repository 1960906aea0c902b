"""From scores of blocks to a choice of blocks, by top-k and top-p budgets.

Scores are float [..., blocks], not negative; choices are bool of the same shape. Knows no models and no methods.
"""

import torch
from torch import Tensor

from specahead.kernels.selection import nucleus_mask, top_k_mask
from specahead.sparsity.plan import Plan, Rule


def choose(scores: Tensor, plan: Plan, rule: Rule, base: int, shares: Tensor | None = None) -> Tensor:
    """Return, for each row, its heaviest blocks that fit the budget (top_k) or its nucleus of plan.mass (top_p).

    top_k chooses from the blocks between sinks and window and leaves room for these; top_p weighs whole rows. Neither
    adds the mandatory blocks.
    base: committed tokens. shares: [rows], each row's part of the budget, 1 on average; rows are the dimension before
        blocks
    """
    flat, blocks = scores.flatten(0, -2), scores.shape[-1]
    count = torch.full((len(flat),), blocks, device=scores.device)
    if rule == "top_p":
        return nucleus_mask(flat, count, plan.mass).view(scores.shape)
    first, last = plan.middle(plan.num_blocks(base))
    mandatory_blocks = blocks - (last - first)
    room = torch.full_like(count, max(0, plan.budget_blocks(blocks) - mandatory_blocks))
    if shares is not None:
        each = (shares * plan.share(blocks) * blocks).round().long().to(scores.device) - mandatory_blocks
        room = each.clamp(min=0).expand(scores.shape[:-1]).flatten()
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    valid = torch.full_like(count, last - first)
    chosen[:, first:last] = top_k_mask(flat[:, first:last], valid, room)
    return chosen.view(scores.shape)


def shares_of(plan: Plan, layers: list[int]) -> Tensor | None:
    """Return the calibrated parts of the budget [layers, kv_heads], or None where every head gets the same."""
    return torch.tensor([plan.head_budgets[n] for n in layers]) if plan.allocation == "calibrated" else None


def mandatory(plan: Plan, base: int, blocks: int, window: int | None = None) -> Tensor:
    """Return the sinks, the recent window before `base` and all blocks after it, bool [blocks]."""
    first, last = plan.middle(plan.num_blocks(base), window)
    always = torch.ones(blocks, dtype=torch.bool)
    always[first:last] = False
    return always
