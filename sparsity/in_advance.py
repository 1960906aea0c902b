"""Methods whose choice is known before the target runs: each is one function from what is known to what is read.

The mandatory blocks are added to every choice by the caller.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsity.announce import LEAST_WINDOW, shared_room
from sparsity.choice import choose, choose_over_all, mandatory, shares_of
from sparsity.plan import Plan, Rule


@dataclass(frozen=True)
class RoundView:
    """One round before it runs. Tensors are [sparse layers, kv_heads, blocks]; `blocks` reach to the round's end.

    announced: bool, expanded to target heads; None if the method announces nothing. memory: float32, the target's own
    decayed weights of what it read, None before its first round.
    """

    plan: Plan
    rule: Rule
    base: int
    blocks: int
    announced: Tensor | None
    memory: Tensor | None

    def everywhere(self, blocks: Tensor) -> Tensor:
        """The same blocks [blocks] in every sparse layer and head."""
        return blocks.expand(len(self.plan.sparse_layers), self.plan.target_kv_heads, -1)


InAdvance = Callable[[RoundView], Tensor]


def streaming(view: RoundView) -> Tensor:
    """StreamingLLM (Xiao et al. 2023): the sinks, and a window that fills the budget."""
    new = view.blocks - view.plan.num_blocks(view.base)
    window = view.plan.budget_blocks(view.blocks) - view.plan.sink_blocks - new
    return view.everywhere(mandatory(view.plan, view.base, view.blocks, max(1, window)))


def announced(view: RoundView) -> Tensor:
    """STS and SpecAttn: what the draft announced."""
    assert view.announced is not None
    return view.announced


def pillar(view: RoundView) -> Tensor:
    """PillarAttn (SparseSpec): the blocks that the last verification weighed most; the first one reads everything."""
    if view.memory is None:
        return view.everywhere(torch.ones(view.blocks, dtype=torch.bool))
    shares = shares_of(view.plan, view.plan.sparse_layers)
    flat = None if shares is None else shares.flatten()
    chosen = choose(view.memory.flatten(0, 1), view.plan, view.rule, view.base, flat)
    return chosen.view(view.memory.shape)


def ahead(view: RoundView) -> Tensor:
    """What the draft announced, and with the rest of the budget the target's own heaviest blocks.

    One budget over all layers and heads. What the draft insists on is read even if it was light last round: the
    target asks for a hidden fact only when it comes to it, and the draft sees that first.
    """
    assert view.announced is not None
    if view.plan.budget == 1:
        return torch.ones_like(view.announced)
    if view.memory is None:
        return view.announced
    always = mandatory(view.plan, view.base, view.blocks, LEAST_WINDOW)
    importance = torch.tensor([view.plan.head_importance[layer] for layer in view.plan.sparse_layers])
    own = (view.memory * importance[..., None]).masked_fill(always | view.announced, 0)
    room = shared_room(view.plan, view.base, view.blocks) - int((view.announced & ~always).sum())
    return view.announced | choose_over_all(own, room)
