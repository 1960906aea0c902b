"""The draft's side of the methods that announce: from the draft's attention weights to what it says.

Evidence is the draft's block weights [queries, draft_layers, draft_heads, blocks] of a round's queries so far.
A row of an announcement is what the method says it is; both sides derive the rows from the plan.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsity.choice import choose_over_all, share
from sparsity.plan import Plan, Rule
from sparsity.selection import BlockSelection

LEAST_WINDOW = 1  # blocks; methods with a shared budget leave the window's size to the scores


@dataclass(frozen=True)
class Announcing:
    """rows: rows of an announcement. choose: evidence, plan, rule, base, what was announced last round (bool
    [rows, blocks] or None) -> bool [rows, blocks], or [queries, rows, blocks] where each query has its own. expand:
    row of each head [sparse layers, kv_heads]."""

    rows: Callable[[Plan], int]
    choose: Callable[[Tensor, Plan, Rule, int, Tensor | None], Tensor]
    expand: Callable[[Plan], Tensor]


def announce(
    method: Announcing,
    evidence: Tensor,
    plan: Plan,
    rule: Rule,
    base: int,
    last: BlockSelection | None = None,
) -> list[BlockSelection]:
    """One selection, or one for each query where plan.sharing is per_query. Blocks are those of `base` tokens.

    last: what was announced for the round before, if it is known.
    """
    blocks = plan.num_blocks(base)
    before = None if last is None else torch.from_numpy(last.resized(blocks).matrix())
    chosen = method.choose(evidence[..., :blocks].cpu(), plan, rule, base, before)
    return [
        BlockSelection.from_matrix(rows.numpy()) for rows in (chosen if chosen.dim() == 3 else chosen[None])
    ]


def draft_heads(plan: Plan) -> list[tuple[int, int]]:
    """The draft heads that sparse layers listen to (STS), in the order of an announcement's rows."""
    return sorted({pair for layer in plan.sparse_layers for pair in plan.head_map[layer]})


def _choose_draft_heads(evidence: Tensor, plan: Plan, rule: Rule, base: int, last: Tensor | None) -> Tensor:
    """STS, section 4.2: each draft head's own heaviest blocks."""
    layer, head = torch.tensor(draft_heads(plan), dtype=torch.long).view(-1, 2).T
    return share(evidence[:, layer, head], plan, rule, base)


def _expand_draft_heads(plan: Plan) -> Tensor:
    rows = {pair: row for row, pair in enumerate(draft_heads(plan))}
    index = [[rows[pair] for pair in plan.head_map[layer]] for layer in plan.sparse_layers]
    return torch.tensor(index, dtype=torch.long).view(-1, plan.target_kv_heads)


def draft_layers(plan: Plan) -> list[int]:
    """The draft layers that sparse layers listen to (SpecAttn)."""
    return sorted({plan.layer_map[layer] for layer in plan.sparse_layers})


def _choose_draft_layers(evidence: Tensor, plan: Plan, rule: Rule, base: int, last: Tensor | None) -> Tensor:
    """SpecAttn, section 3.4: the nucleus of each draft layer's mean weights."""
    return share(evidence[:, draft_layers(plan)].mean(2), plan, rule, base)


def _expand_draft_layers(plan: Plan) -> Tensor:
    rows = {layer: row for row, layer in enumerate(draft_layers(plan))}
    index = torch.tensor([rows[plan.layer_map[layer]] for layer in plan.sparse_layers], dtype=torch.long)
    return index[:, None].expand(-1, plan.target_kv_heads)


def _choose_target_heads(evidence: Tensor, plan: Plan, rule: Rule, base: int, last: Tensor | None) -> Tensor:
    """`ahead`: blends of draft heads predict each target head's weights; one budget over all of them.

    What was announced last round counts somewhat more (plan.stickiness): a choice between near equals that stays as
    it was is cheaper to announce and to fetch.
    """
    if rule != "top_k" or plan.sharing not in ("pooled", "first"):
        raise NotImplementedError(
            f"'ahead' shares one top_k budget by pooled or first, not {rule} by {plan.sharing}"
        )
    *_, count = shared_limits(plan, base)
    return choose_over_all(_score_target_heads(evidence, plan, base, last), count)


def _score_target_heads(evidence: Tensor, plan: Plan, base: int, last: Tensor | None) -> Tensor:
    weights = evidence.mean(0) if plan.sharing == "pooled" else evidence[0]
    predicted = torch.einsum("tlh,lhb->tb", blend_matrix(plan), weights.float())
    if last is not None:
        predicted *= 1 + (plan.stickiness - 1) * last
    first, end, _ = shared_limits(plan, base)
    return _between(predicted, first, end)


def _between(scores: Tensor, first: int, end: int) -> Tensor:
    """0 outside blocks first … end - 1."""
    block = torch.arange(scores.shape[1])
    return scores.masked_fill((block < first) | (block >= end), 0)


def shared_limits(plan: Plan, base: int) -> tuple[int, int, int]:
    """Between which blocks (first, last + 1) an announcement of `ahead` chooses, and how many over all rows."""
    blocks = plan.num_blocks(base)
    first, end = plan.middle(blocks, LEAST_WINDOW)
    return first, end, math.floor(plan.announced_share * shared_room(plan, base, blocks))


def shared_room(plan: Plan, base: int, blocks: int) -> int:
    """Blocks over all sparse layers and heads that the budget leaves after mandatory blocks and summaries."""
    first, last = plan.middle(plan.num_blocks(base), LEAST_WINDOW)
    heads = len(plan.sparse_layers) * plan.target_kv_heads
    summaries = summary_tokens(plan, base) / plan.block_size
    return math.ceil(heads * (plan.budget * blocks - summaries - (blocks - (last - first))))


def summary_tokens(plan: Plan, base: int) -> float:
    """What reading all group means of a head costs, in tokens of KV: three vectors a group, a token has two."""
    stood_in = plan.group_size > 0 and plan.budget < 1
    return 1.5 * ((base - 1) // plan.group_size) if stood_in else 0.0


def blend_matrix(plan: Plan) -> Tensor:
    """[sparse heads, draft_layers, draft_heads] float32, each row times its head's importance."""
    heads = [(layer, head) for layer in plan.sparse_layers for head in range(plan.target_kv_heads)]
    matrix = torch.zeros(len(heads), plan.draft_layers, plan.draft_heads)
    for row, (layer, head) in enumerate(heads):
        for draft_layer, draft_head, weight in plan.blends[layer * plan.target_kv_heads + head]:
            matrix[row, draft_layer, draft_head] = weight * plan.head_importance[layer][head]
    return matrix


def _expand_target_heads(plan: Plan) -> Tensor:
    return torch.arange(len(plan.sparse_layers) * plan.target_kv_heads).view(-1, plan.target_kv_heads)


BY_DRAFT_HEAD = Announcing(lambda plan: len(draft_heads(plan)), _choose_draft_heads, _expand_draft_heads)
BY_DRAFT_LAYER = Announcing(lambda plan: len(draft_layers(plan)), _choose_draft_layers, _expand_draft_layers)
BY_TARGET_HEAD = Announcing(
    lambda plan: len(plan.sparse_layers) * plan.target_kv_heads,
    _choose_target_heads,
    _expand_target_heads,
)
