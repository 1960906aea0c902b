"""Methods whose choice is known before the target runs: each is one function from what is known to what is read.

The mandatory blocks are added to every choice by the caller.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.sparsity.choice import choose, mandatory, shares_of
from specahead.sparsity.plan import Plan, Rule


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
