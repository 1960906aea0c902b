"""How a draft announces blocks: a row for each sparse layer and KV head of the target, one budget for all rows.

Both sides derive the rows and the number of blocks from the plan.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

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


def announce_rounds(
    evidence: Sequence[Tensor], plan: Plan, bases: Sequence[int], last: BlockSelection | None = None
) -> list[BlockSelection]:
    """Return the announcements of successive rounds, by what a draft's round runs on the device of the evidence.

    The host waits for the device once.
    evidence: for each round [draft_layers, draft_heads, blocks or more], the draft's weights on blocks
    bases: the committed tokens of each round, which do not fall
    last: the announcement of the round before the first one, if it is known
    """
    device, blocks, announcer = evidence[0].device, [plan.num_blocks(base) for base in bases], announcer_of(plan)
    before = torch.zeros(1, len(announcer.heads), row_words(blocks[0]), dtype=torch.int64)
    if last is not None:
        before[0] = torch.from_numpy(last.resized(blocks[0]).words.view(np.int64).copy())
    limits = torch.tensor([announced_limits(plan, base) for base in bases], dtype=torch.int32, device=device)
    before, announcer, bitmaps = before.to(device), announcer.to(device), list[Tensor]()
    for of_round, count, limit in zip(evidence, blocks, limits, strict=True):
        weights = of_round[None, ..., :count].float().contiguous()
        before = pad(before, (0, row_words(count) - before.shape[2]))
        before = announce_blocks(announcer, weights, before, limit[:, None].clone())  # kernels take aligned tensors
        bitmaps.append(before)
    widest = bitmaps[-1].shape[2]
    words = torch.cat([pad(each, (0, widest - each.shape[2])) for each in bitmaps]).cpu().numpy().view(np.uint64)
    rows = len(announcer.heads)
    return [BlockSelection(rows, n, each[:, : row_words(n)].copy()) for n, each in zip(blocks, words, strict=True)]


def shared_room(plan: Plan, base: int, blocks: int) -> int:
    """Return how many blocks over all sparse heads the budget leaves beside mandatory ones and summaries."""
    first, last = plan.middle(plan.num_blocks(base), LEAST_WINDOW)
    summaries = summary_tokens(plan, base) / plan.block_size
    return math.ceil(announced_rows(plan) * (plan.share(blocks) * blocks - summaries - (blocks - (last - first))))


def summary_tokens(plan: Plan, base: int) -> float:
    """Return the cost of reading all group means of a head in tokens of KV: a group has three vectors, a token two."""
    return 1.5 * ((base - 1) // plan.group_size) if plan.uses_means else 0.0
