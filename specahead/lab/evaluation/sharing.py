"""How the queries of a round share a selection of blocks, by `plan.sharing`. Services use `pooled` alone."""

import numpy as np
from torch import Tensor

from specahead.sparsity.announce import Announcing, announce
from specahead.sparsity.choice import choose
from specahead.sparsity.plan import Plan, Rule
from specahead.sparsity.selection import BlockSelection


def share(
    scores: Tensor, plan: Plan, rule: Rule, base: int, pool: str = "mean", shares: Tensor | None = None
) -> Tensor:
    """Choose for a round's queries: scores [queries, rows, blocks] -> bool [rows, blocks].

    pooled: from the queries' mean (or maximum) score; first: from the first query's alone; union: what any query would
    choose; per_query: bool [queries, rows, blocks], each query its own (MatX's two cases and the worst one).
    """
    if plan.sharing == "pooled":
        return choose(scores.mean(0) if pool == "mean" else scores.amax(0), plan, rule, base, shares)
    if plan.sharing == "first":
        return choose(scores[0], plan, rule, base, shares)
    each = choose(scores, plan, rule, base, shares)
    return each.any(0) if plan.sharing == "union" else each


def announce_shared(
    method: Announcing, evidence: Tensor, plan: Plan, rule: Rule, base: int, last: BlockSelection | None = None
) -> list[BlockSelection]:
    """Return what a round announces: one selection, or with `per_query` one for each query.

    evidence: [queries, draft_layers, draft_heads, blocks or more]. The rest as for `announce`.
    """
    if plan.sharing == "pooled":
        return [announce(method, evidence.mean(0), plan, rule, base, last)]
    if plan.sharing == "first":
        return [announce(method, evidence[0], plan, rule, base, last)]
    each = [announce(method, weights, plan, rule, base, last) for weights in evidence]
    if plan.sharing == "per_query":
        return each
    words = np.bitwise_or.reduce([selection.words for selection in each])
    return [BlockSelection(each[0].num_heads, each[0].num_blocks, words)]
