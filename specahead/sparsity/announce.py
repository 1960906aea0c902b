"""How a draft announces blocks: the rows of an announcement, how they follow from the draft's heads, and how many
blocks are chosen. Both sides derive the rows from the plan.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specahead.engine.steps.announcing import Announcer, choose_blocks, predict_weights
from specahead.sparsity.plan import Blend, Plan, Rule
from specahead.sparsity.selection import BlockSelection, row_words

LEAST_WINDOW = 1  # blocks; methods with a shared budget leave the window's size to the scores


@dataclass(frozen=True)
class Announcing:
    """How a method announces."""

    # From a plan to the draft heads and weights whose sum each KV head of each sparse layer listens to, in order.
    blends: Callable[[Plan], list[Blend]]
    # Whether all rows share one budget. Then each target head has a row; else those that listen to the same share one.
    over_all: bool = False

    def rows(self, plan: Plan) -> int:
        """Return how many rows an announcement has."""
        return len(plan.sparse_layers) * plan.target_kv_heads if self.over_all else len(set(self.blends(plan)))

    def blends_of_rows(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Return the draft heads whose sum each row is, and their weights, as an `Announcer` has them."""
        blends = self.blends(plan)
        rows = blends if self.over_all else sorted(set(blends))
        heads = torch.zeros(len(rows), max(1, *map(len, rows), 1), dtype=torch.int32)
        weights = torch.zeros(heads.shape)
        for row, blend in enumerate(rows):
            for place, (layer, head, weight) in enumerate(blend):
                heads[row, place], weights[row, place] = layer * plan.draft_heads + head, weight
        return heads, weights

    def expand(self, plan: Plan) -> Tensor:
        """Return the row that each target head listens to: [sparse layers, kv_heads] int64."""
        if self.over_all:
            return torch.arange(self.rows(plan)).view(-1, plan.target_kv_heads)
        blends = self.blends(plan)
        rows = {blend: row for row, blend in enumerate(sorted(set(blends)))}
        return torch.tensor([rows[blend] for blend in blends], dtype=torch.long).view(-1, plan.target_kv_heads)

    def announcer(self, plan: Plan, rule: Rule) -> Announcer:
        """Return how the engine announces by this method."""
        blends = self.blends_of_rows(plan)
        if self.over_all:
            return Announcer(*blends, "over_all", stickiness=plan.stickiness)
        return Announcer(*blends, "nucleus" if rule == "top_p" else "by_row", plan.mass)

    def limits(self, plan: Plan, rule: Rule, base: int) -> tuple[int, int, int]:
        """Return the first block, the last block + 1 and the number of blocks that a round on `base` tokens chooses.

        A nucleus is taken of a whole row, mandatory blocks included; other choices leave room for these.
        """
        blocks = plan.num_blocks(base)
        if self.over_all:
            return shared_limits(plan, base)
        if rule == "top_p":
            return 0, blocks, 0
        first, last = plan.middle(blocks)
        return first, last, max(0, plan.budget_blocks(blocks) - (blocks - (last - first)))


def announce(
    method: Announcing, evidence: Tensor, plan: Plan, rule: Rule, base: int, last: BlockSelection | None = None
) -> BlockSelection:
    """Return the announcement of one round, by the torch references of the kernels that a draft's round runs.

    evidence: [draft_layers, draft_heads, blocks or more], the draft's weights on the blocks of `base` tokens
    last: the announcement of the round before, if it is known
    """
    blocks = plan.num_blocks(base)
    announcer = method.announcer(plan, rule)
    before = torch.zeros(1, len(announcer.heads), row_words(blocks), dtype=torch.int64)
    if last is not None:
        before[0] = torch.from_numpy(last.resized(blocks).words.view(np.int64).copy())
    limits = torch.tensor(method.limits(plan, rule, base), dtype=torch.int32)[:, None]
    scores = predict_weights(announcer, evidence[None, ..., :blocks].float().cpu(), before, limits)
    words = choose_blocks(announcer, scores, limits, "torch")[0].numpy().view(np.uint64)
    return BlockSelection(len(words), blocks, words)


def _most_alike_heads(plan: Plan) -> list[Blend]:
    """Return the rows of STS, section 4.2: each is one draft head."""
    head_map = plan.head_map
    return [((*pair, 1.0),) for layer in plan.sparse_layers for pair in head_map[layer]]


def _most_alike_layers(plan: Plan) -> list[Blend]:
    """Return the rows of SpecAttn, section 3.4: each is the mean of a draft layer's heads."""
    layers, heads = [plan.layer_map[layer] for layer in plan.sparse_layers], plan.draft_heads
    means = [tuple((layer, head, 1 / heads) for head in range(heads)) for layer in layers]
    return [mean for mean in means for _ in range(plan.target_kv_heads)]


def _weighty_heads(plan: Plan) -> list[Blend]:
    """Return the rows of `ahead`: each target head, predicted by a blend of draft heads, times its importance."""
    return [
        tuple((i, j, weight * importance) for i, j, weight in plan.blends[layer * plan.target_kv_heads + head])
        for layer in plan.sparse_layers
        for head, importance in enumerate(plan.head_importance[layer])
    ]


def shared_limits(plan: Plan, base: int) -> tuple[int, int, int]:
    """Return the first block, the last block + 1 and the number of blocks over all rows that `ahead` announces."""
    first, end = plan.middle(plan.num_blocks(base), LEAST_WINDOW)
    return first, end, math.floor(plan.announced_share * shared_room(plan, base, plan.num_blocks(base)))


def shared_room(plan: Plan, base: int, blocks: int) -> int:
    """Return how many blocks over all sparse heads the budget leaves beside mandatory ones and summaries."""
    first, last = plan.middle(plan.num_blocks(base), LEAST_WINDOW)
    heads = len(plan.sparse_layers) * plan.target_kv_heads
    summaries = summary_tokens(plan, base) / plan.block_size
    return math.ceil(heads * (plan.share(blocks) * blocks - summaries - (blocks - (last - first))))


def summary_tokens(plan: Plan, base: int) -> float:
    """Return the cost of reading all group means of a head in tokens of KV: a group has three vectors, a token two."""
    stood_in = plan.group_size > 0 and plan.budget < 1
    return 1.5 * ((base - 1) // plan.group_size) if stood_in else 0.0


BY_DRAFT_HEAD = Announcing(_most_alike_heads)
BY_DRAFT_LAYER = Announcing(_most_alike_layers)
BY_TARGET_HEAD = Announcing(_weighty_heads, over_all=True)
