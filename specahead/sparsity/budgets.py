"""One budget over all layers and heads: what is read in any case, and what the target's own memory weighs most."""

import torch

from specahead.engine.steps.inputs import ReadMemory, SharedBudget
from specahead.sparsity.announce import LEAST_WINDOW, shared_room
from specahead.sparsity.plan import Plan
from specahead.sparsity.selection import BlockSelection


def new_memory(plan: Plan, decay: float) -> ReadMemory:
    """Return the memory of a sequence of which nothing has been weighed. decay: of its weights, a pass."""
    importance = torch.tensor([plan.head_importance[layer] for layer in plan.sparse_layers])
    return ReadMemory(importance.flatten(), decay)


def dense_layers(plan: Plan) -> tuple[int, ...]:
    """Return the layers that read everything, in order."""
    sparse = set(plan.sparse_layers)
    return tuple(layer for layer in range(plan.target_layers) if layer not in sparse)


def shared_budget(
    plan: Plan, memory: ReadMemory, base: int, length: int, announced: BlockSelection | None = None
) -> SharedBudget:
    """Return the budget of a round that builds on `base` tokens and ends at `length`: the sinks, the newest blocks and
    what is announced, and with the rest of one budget the blocks that `memory` holds the highest weights for.

    What a draft insists on is read even if it was light last round: the target asks for a hidden fact only when it
    comes to it, and the draft sees that first. announced: a row for each sparse layer and KV head.
    """
    blocks = plan.num_blocks(length)
    first, last = plan.middle(plan.num_blocks(base), LEAST_WINDOW)
    said = BlockSelection.of_nothing(len(memory.importance), blocks) if announced is None else announced.resized(blocks)
    return SharedBudget(said.words, first, last, shared_room(plan, base, blocks), memory, dense_layers(plan))
