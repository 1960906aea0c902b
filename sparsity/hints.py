"""Which blocks a round is likely to select, ranked, before its selection is known. Knows nothing of the wire.

The first: what the last round's evidence put right behind its selection. The second: what the evidence of the round's
first query alone would select.
"""

import numpy as np
import torch
from torch import Tensor

from engine.draft_rounds import Ranked, ranked_blocks
from kernels.shared_top_k import rank_over_all
from sparsity.announce import Announcing, announce
from sparsity.plan import Plan, Rule
from sparsity.selection import BlockSelection


def runners_up(
    method: Announcing,
    evidence: Tensor,
    plan: Plan,
    base: int,
    selection: BlockSelection,
    last: BlockSelection | None,
    held: BlockSelection | None,
    most: int,
) -> Ranked:
    """The heaviest blocks that a round did not select and that are not `held`, from what was selected of late.

    The other arguments are those of `announce`, and what it gave.
    """
    if not selection.words.any():
        return ranked_blocks(np.empty(0, np.int32), 1)
    taken = selection if held is None else selection.joined(held.resized(selection.num_blocks))
    taken_rows = torch.from_numpy(taken.matrix().copy())
    return _rank(_scores(method, evidence, plan, base, last).masked_fill(taken_rows, 0), most)


def first_choice(
    method: Announcing,
    evidence: Tensor,
    plan: Plan,
    rule: Rule,
    base: int,
    last: BlockSelection | None,
    held: BlockSelection | None,
    most: int,
) -> Ranked:
    """The heaviest blocks that `announce` would select by this evidence, of the first query, and are not `held`."""
    (selection,) = announce(method, evidence, plan, rule, base, last)
    chosen = selection.matrix()
    if held is not None:
        chosen = chosen & ~held.resized(selection.num_blocks).matrix()
    scores = _scores(method, evidence, plan, base, last)
    return _rank(scores.masked_fill(~torch.from_numpy(chosen.copy()), 0), most)


def _scores(
    method: Announcing, evidence: Tensor, plan: Plan, base: int, last: BlockSelection | None
) -> Tensor:
    blocks = plan.num_blocks(base)
    before = None if last is None else torch.from_numpy(last.resized(blocks).matrix())
    return method.scores(evidence[..., :blocks].cpu().float(), plan, base, before)


def _rank(scores: Tensor, most: int) -> Ranked:
    (keys,) = rank_over_all(scores[None], most)
    return ranked_blocks(keys.numpy(), scores.shape[1])
