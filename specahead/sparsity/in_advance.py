"""Methods that choose before the target runs: each is one function from what is known to the blocks that are read.

The caller adds the mandatory blocks to every choice.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.sparsity.choice import choose, mandatory, shares_of
from specahead.sparsity.plan import Plan, Rule


@dataclass(frozen=True)
class RoundView:
    """One round before it runs. Tensors are [sparse layers, kv_heads, blocks]."""

    plan: Plan
    rule: Rule
    base: int  # committed tokens
    blocks: int  # up to the round's end
    announced: Tensor | None  # bool, expanded to target heads; None if the method announces nothing
    memory: Tensor | None  # float32, the target's own faded weights of blocks it read; None before its first round

    def everywhere(self, blocks: Tensor) -> Tensor:
        """Return the same blocks [blocks] for every sparse layer and head."""
        return blocks.expand(len(self.plan.sparse_layers), self.plan.target_kv_heads, -1)


InAdvance = Callable[[RoundView], Tensor]


def streaming(view: RoundView) -> Tensor:
    """Choose as StreamingLLM (Xiao et al. 2023): the sinks, and a window that fills the budget."""
    new = view.blocks - view.plan.num_blocks(view.base)
    window = view.plan.budget_blocks(view.blocks) - view.plan.sink_blocks - new
    return view.everywhere(mandatory(view.plan, view.base, view.blocks, max(1, window)))


def announced(view: RoundView) -> Tensor:
    """Choose as STS and SpecAttn: the blocks that the draft announced."""
    assert view.announced is not None
    return view.announced


def pillar(view: RoundView) -> Tensor:
    """Choose as PillarAttn (SparseSpec): the blocks that the last verification weighed most; all in the first round."""
    if view.memory is None:
        return view.everywhere(torch.ones(view.blocks, dtype=torch.bool))
    shares = shares_of(view.plan, view.plan.sparse_layers)
    flat = None if shares is None else shares.flatten()
    chosen = choose(view.memory.flatten(0, 1), view.plan, view.rule, view.base, flat)
    return chosen.view(view.memory.shape)
