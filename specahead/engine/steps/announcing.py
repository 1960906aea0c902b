"""How a round announces blocks: each row's weights are predicted from the draft's evidence, and blocks chosen by them.

The same functions run inside a round's CUDA graph and, by the torch references, on a CPU.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specahead.kernels.backends import default_backend
from specahead.kernels.selection import mark_over_rows, score_announced


@dataclass(frozen=True)
class Announcer:
    """What the rows of an announcement are made of."""

    heads: Tensor
    """[rows, width] int32, the draft heads (layer * heads of a layer + head) whose weighted sum each row is."""
    weights: Tensor
    """[rows, width] float32, their weights; 0 after a row's last head."""
    stickiness: float = 1.0
    """How many times its weight a block counts that was announced in the round before."""

    def to(self, device: torch.device) -> "Announcer":
        """Return the same announcer with its tensors on a device."""
        return replace(self, heads=self.heads.to(device), weights=self.weights.to(device))


def announce_blocks(announcer: Announcer, evidence: Tensor, before: Tensor, limits: Tensor) -> Tensor:
    """Choose the blocks of an announcement, under one budget for all rows: [sequences, rows, words] int64, a bit each.

    evidence: [sequences, layers, heads, blocks] float32, the draft's weights on blocks, from which each row's weights
    are predicted. before: [sequences, rows, words] int64, a bit for each block that was announced in the round before.
    limits: [3, sequences] int32: blocks are chosen from the first number up to, but not including, the second one; the
    third is how many.
    """
    blends, backend = (announcer.heads, announcer.weights), default_backend(evidence.device)
    scores = score_announced(evidence.flatten(1, 2), *blends, before, limits, announcer.stickiness, backend)
    return mark_over_rows(scores, limits[2], backend)
