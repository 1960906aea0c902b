"""One budget over all layers and heads: blocks that are always read, and those that the target's memory weighs most."""

import torch

from specahead.engine.steps.inputs import ReadMemory, SharedBudget
from specahead.sparsity.announce import LEAST_WINDOW, shared_room
from specahead.sparsity.plan import Plan
from specahead.sparsity.selection import BlockSelection


def new_memory(plan: Plan, decay: float) -> ReadMemory:
    """Return the memory of a sequence before its first pass. decay: the factor by which weights fade in each pass."""
    importance = torch.tensor([plan.head_importance[layer] for layer in plan.sparse_layers])
    return ReadMemory(importance.flatten(), decay)


def dense_layers(plan: Plan) -> tuple[int, ...]:
    """Return the layers that read everything, in order."""
    return tuple(sorted(set(plan.dense_layers)))


def shared_budget(
    plan: Plan, memory: ReadMemory, base: int, length: int, announced: BlockSelection | None = None
) -> SharedBudget:
    """Return the budget of a round that builds on `base` tokens and ends at `length`.

    It reads the sinks, the newest blocks and the announced ones, and with the rest of one budget the blocks of the
    highest weights in `memory`. Announced blocks are read even if they were light in the last round: the target asks
    for a hidden fact only when it comes to it, and the draft sees that first.
    announced: a row for each sparse layer and KV head
    """
    blocks = plan.num_blocks(length)
    first, last = plan.middle(plan.num_blocks(base), LEAST_WINDOW)
    said = BlockSelection.of_nothing(len(memory.importance), blocks) if announced is None else announced.resized(blocks)
    return SharedBudget(said.words, first, last, shared_room(plan, base, blocks), memory, dense_layers(plan))
