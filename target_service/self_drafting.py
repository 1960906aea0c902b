"""Drafting by the target itself (`--draft self`): what the drafting passes read.

The model drafts γ tokens one by one over a small share of the KV, and then runs them all over the whole of it, in one
step (specahead.engine.steps). Sessions draft as many together or none, since all take part in each pass of a step.
"""

from dataclasses import dataclass, replace

from specahead.engine.steps.inputs import ReadMemory, SparseRead
from specahead.sparsity.budgets import new_memory, shared_budget
from specahead.sparsity.plan import Plan

DECAY = 0.9  # of remembered weights, a round


@dataclass(frozen=True)
class SelfDrafting:
    """What a target reads to draft for itself."""

    plan: Plan
    """Its budget is the share of the KV that drafting passes read."""
    gamma: int
    """Tokens that a round drafts, at most."""

    @staticmethod
    def over(plan: Plan, share: float, gamma: int) -> "SelfDrafting | None":
        """Return how a target drafts over a share of its KV; None if none of its layers reads sparsely."""
        return SelfDrafting(replace(plan, budget=share, least_tokens=0), gamma) if plan.sparse_layers else None

    def new_memory(self) -> ReadMemory:
        """Return what a session that drafts for itself begins with, where nothing was weighed."""
        return new_memory(self.plan, DECAY)

    def can_draft(self, weighed: int, base: int) -> bool:
        """Return whether a round after `base` committed tokens can draft: its KV was weighed in the last round, which
        `weighed` tokens had been committed before; 0: never.
        """
        return weighed > 0 and base - weighed <= self.gamma + 1

    def read(self, memory: ReadMemory, base: int, drafted: int) -> SparseRead:
        """Return what the passes read that draft `drafted` tokens after `base` committed ones: the sinks, the newest
        tokens, and the blocks that were weighed most, under one budget for all heads. Group means stand in for the
        rest.
        """
        plan, budget = self.plan, shared_budget(self.plan, memory, base, base + drafted)
        return SparseRead(plan.block_size, budget, group_means=plan.group_size > 0, drafts=True)
