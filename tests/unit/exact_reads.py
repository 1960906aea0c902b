"""Reads of exactly the blocks that a test names."""

import torch
from torch import Tensor

from specahead.engine.steps.inputs import ReadMemory, SharedBudget, SparseRead
from specahead.sparsity.selection import BlockSelection


def read_exactly(chosen: list[Tensor] | list[Tensor | None], block_size: int, **options: bool) -> SparseRead:
    """Return a budget without room for more than these blocks.

    chosen: bool [kv_heads, blocks] for each layer; None: the layer reads everything. options: of SparseRead.
    """
    present = torch.cat([mask for mask in chosen if mask is not None])
    dense = tuple(layer for layer, mask in enumerate(chosen) if mask is None)
    words, blocks = BlockSelection.from_matrix(present.numpy()).words, present.shape[1]
    memory = ReadMemory(torch.ones(len(present)), 0.8)
    return SparseRead(block_size, SharedBudget(words, 0, blocks, 0, memory, dense), **options)
