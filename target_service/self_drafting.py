"""Drafting by the target itself (`--draft self`): whether it pays in a step, and what the drafting passes read.

The model drafts γ tokens one by one over a small share of the KV, and then runs them all over the whole of it, in one
step (engine.passes.drafting). Sessions draft together or not at all, since all take part in each pass of a step.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from config import TargetSettings
from engine.inputs import ReadMemory, SharedBudget, SparseRead
from sparsity.announce import LEAST_WINDOW, shared_room
from sparsity.plan import Plan
from sparsity.selection import row_words

DECAY = 0.9  # of remembered weights, a round
EXPECTED = 0.7  # of the drafted tokens, that must pay for a round before any is tried
LINK = 60  # tokens of KV that a GPU reads from its own memory while one comes from the host's


@dataclass(frozen=True)
class SelfDrafting:
    """How a target drafts for itself.

    plan: its budget is the share that drafting passes read. weight_tokens: tokens of KV that take as long to read as
    the weights do. least_tokens: tokens of the sessions of a step from which on they draft; negative: where it pays.
    """

    plan: Plan
    gamma: int
    weight_tokens: float
    least_tokens: int

    def cost(self, tokens: int, away: int = 0) -> float:
        """Return what drafting adds to a step over so many tokens of KV, in plain steps: so many tokens of each session
        have to be accepted. A step takes the time of reading weights and KV.

        away: those of sessions whose KV has partly left the GPU. A plain step brings it from the host as well, and the
        drafting passes find most of what they read still on the GPU, so that they add little to such a step.
        """
        pass_tokens = self.weight_tokens + self.plan.budget * tokens
        return self.gamma * pass_tokens / (self.weight_tokens + tokens + LINK * away)

    def pays(self, tokens: int, away: int = 0) -> bool:
        """Return whether a step over so many tokens of KV is to draft."""
        if self.least_tokens >= 0:
            return tokens >= self.least_tokens
        return self.cost(tokens, away) < EXPECTED * self.gamma

    def new_memory(self) -> ReadMemory:
        """Return what a session that drafts for itself begins with, where nothing was weighed."""
        importance = [self.plan.head_importance[layer] for layer in self.plan.sparse_layers]
        return ReadMemory(torch.tensor(importance).flatten(), DECAY)

    def drafted(self, weighed: int, base: int) -> int:
        """Return how many tokens a round behind `base` committed tokens drafts: none if its KV was not weighed in the
        last round, which `weighed` tokens had been committed before; 0: never.
        """
        return self.gamma if weighed and base - weighed <= self.gamma + 1 else 0

    def read(self, memory: ReadMemory, base: int, drafted: int) -> SparseRead:
        """Return what the passes read that draft so many tokens behind `base` committed ones: the sinks, the newest
        tokens, and the blocks that were weighed most, under one budget for all heads. Group means stand in for the
        rest.
        """
        plan, blocks = self.plan, self.plan.num_blocks(base + drafted)
        first, last = plan.middle(plan.num_blocks(base), LEAST_WINDOW)
        bitmap = np.zeros((len(memory.importance), row_words(blocks)), np.uint64)
        dense = tuple(sorted(set(plan.dense_layers)))
        budget = SharedBudget(bitmap, first, last, shared_room(plan, base, blocks), memory, dense)
        return SparseRead(plan.block_size, budget=budget, group_means=plan.group_size > 0, drafts=True)


def self_drafting(settings: TargetSettings, plan: Plan, weight_tokens: float) -> SelfDrafting | None:
    """Return how a target drafts for itself; None if it does not."""
    if settings.draft not in ("self", "auto") or not plan.sparse_layers:
        return None
    plan = replace(plan, budget=settings.self_read_share)
    return SelfDrafting(plan, settings.most_drafted, weight_tokens, settings.self_from)
