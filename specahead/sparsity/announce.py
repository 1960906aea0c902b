"""How a draft announces blocks: a row for each sparse layer and KV head of the target, one budget for all rows.

Both sides derive the rows and the number of blocks from the plan.
"""

import math

import numpy as np
import torch
from torch import Tensor

from specahead.engine.steps.announcing import Announcer, announce_blocks
from specahead.sparsity.plan import Plan
from specahead.sparsity.selection import BlockSelection, row_words

LEAST_WINDOW = 1  # blocks before the committed end that are always read; the scores decide about the others


def announced_rows(plan: Plan) -> int:
    """Return how many rows an announcement has."""
    return len(plan.sparse_layers) * plan.target_kv_heads


def announcer_of(plan: Plan) -> Announcer:
    """Return how the engine announces: each row is a blend of draft heads, times the target head's importance."""
    blends = []
    for layer in plan.sparse_layers:
        for head, importance in enumerate(plan.head_importance[layer]):
            of_head = plan.blends[layer * plan.target_kv_heads + head]
            blends.append([(i * plan.draft_heads + j, weight * importance) for i, j, weight in of_head])
    heads = torch.zeros(len(blends), max(1, *map(len, blends), 1), dtype=torch.int32)
    weights = torch.zeros(heads.shape)
    for row, blend in enumerate(blends):
        for place, (head, weight) in enumerate(blend):
            heads[row, place], weights[row, place] = head, weight
    return Announcer(heads, weights, plan.stickiness)


def announced_limits(plan: Plan, base: int) -> tuple[int, int, int]:
    """Return the first block, the last block + 1 and the number of blocks over all rows that are announced.

    base: committed tokens.
    """
    first, end = plan.middle(plan.num_blocks(base), LEAST_WINDOW)
    return first, end, math.floor(plan.announced_share * shared_room(plan, base, plan.num_blocks(base)))


def announce(evidence: Tensor, plan: Plan, base: int, last: BlockSelection | None = None) -> BlockSelection:
    """Return the announcement of one round, by what a draft's round runs on the device of the evidence.

    evidence: [draft_layers, draft_heads, blocks or more], the draft's weights on the blocks of `base` tokens
    last: the announcement of the round before, if it is known
    """
    blocks, announcer = plan.num_blocks(base), announcer_of(plan)
    before = torch.zeros(1, len(announcer.heads), row_words(blocks), dtype=torch.int64)
    if last is not None:
        before[0] = torch.from_numpy(last.resized(blocks).words.view(np.int64).copy())
    limits = torch.tensor(announced_limits(plan, base), dtype=torch.int32)[:, None]
    device = evidence.device
    weights = evidence[None, ..., :blocks].float().contiguous()
    bitmaps = announce_blocks(announcer.to(device), weights, before.to(device), limits.to(device))
    words = bitmaps[0].cpu().numpy().view(np.uint64)
    return BlockSelection(len(words), blocks, words)


def shared_room(plan: Plan, base: int, blocks: int) -> int:
    """Return how many blocks over all sparse heads the budget leaves beside mandatory ones and summaries."""
    first, last = plan.middle(plan.num_blocks(base), LEAST_WINDOW)
    summaries = summary_tokens(plan, base) / plan.block_size
    return math.ceil(announced_rows(plan) * (plan.share(blocks) * blocks - summaries - (blocks - (last - first))))


def summary_tokens(plan: Plan, base: int) -> float:
    """Return the cost of reading all group means of a head in tokens of KV: a group has three vectors, a token two."""
    return 1.5 * ((base - 1) // plan.group_size) if plan.uses_means else 0.0
