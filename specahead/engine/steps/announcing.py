"""The announcement of a draft's round: each block's weight is predicted for every row, and blocks are chosen by it.

Every method that announces has rows that are weighted sums of a few of the draft's heads, and a rule that chooses
blocks. The same functions run inside a round's CUDA graph and, by the torch references, on a CPU.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, default_backend
from specahead.kernels.selection import WORD, mark_over_rows, score_announced, select_nucleus, select_top_k

# over_all: one budget for all rows at once. by_row: a number of blocks in each row. nucleus: a share of a row's weight.
Choice = Literal["over_all", "by_row", "nucleus"]


@dataclass(frozen=True)
class Announcer:
    """How one method announces.

    heads, weights: [rows, width] int32 and float32, of each row of an announcement the draft's heads (layer * heads of
    a layer + head) whose weighted sum it is, weights of 0 after the last. mass: the share of a row's weight that a
    nucleus holds. stickiness: a block that was announced last round counts this many times.
    """

    heads: Tensor
    weights: Tensor
    choice: Choice
    mass: float = 1.0
    stickiness: float = 1.0

    def to(self, device: torch.device) -> "Announcer":
        return replace(self, heads=self.heads.to(device), weights=self.weights.to(device))


def predict_weights(announcer: Announcer, evidence: Tensor, before: Tensor, limits: Tensor) -> Tensor:
    """Predict the weight of each block in each row, 0 outside the limits: [sequences, rows, blocks] float32.

    evidence: [sequences, layers, heads, blocks] float32, the draft's weights on blocks. before: [sequences, rows,
    words] int64, a bit for each block that was announced last round. limits: [3, sequences] int32: blocks are chosen
    from the first number up to, but not including, the second one; the third is how many.
    """
    blends = announcer.heads, announcer.weights
    return score_announced(
        evidence.flatten(1, 2), *blends, before, limits, announcer.stickiness, default_backend(evidence.device)
    )


def choose_blocks(announcer: Announcer, scores: Tensor, limits: Tensor, backend: Backend) -> Tensor:
    """Choose blocks by `predict_weights`: [sequences, rows, words] int64, a bit for each block."""
    if announcer.choice == "over_all":
        return mark_over_rows(scores, limits[2], backend)
    sequences, rows, blocks = scores.shape
    first, last, count = (each[:, None].expand(-1, rows).flatten().contiguous() for each in limits)
    flat = scores.flatten(0, 1)
    if announcer.choice == "nucleus":
        lists, counts = select_nucleus(flat, last, announcer.mass, backend=backend, width=blocks)
    else:
        # Blocks without weight are chosen, too, where the budget reaches to them, but never one below `first`.
        inside = torch.arange(blocks, device=flat.device) >= first[:, None]
        raised = flat.clamp(min=torch.finfo(torch.float32).tiny).where(inside, 0.0)
        lists, counts = select_top_k(raised, last, count, backend, blocks)
    return _bits_of_lists(lists, counts, blocks).view(sequences, rows, -(-blocks // WORD))


def _bits_of_lists(lists: Tensor, counts: Tensor, blocks: int) -> Tensor:
    """Return lists [rows, width] int32, of which `counts` [rows] entries are valid, as bitmaps [rows, words] int64."""
    width = -(-blocks // WORD)
    valid = torch.arange(lists.shape[1], device=lists.device) < counts[:, None]
    chosen = torch.zeros(len(lists), width * WORD + 1, dtype=torch.int64, device=lists.device)
    chosen.scatter_(1, lists.long().where(valid, width * WORD), 1)
    bits = chosen[:, :-1].view(len(lists), width, WORD)
    return (bits << torch.arange(WORD, device=lists.device)).sum(2)
