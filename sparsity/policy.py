"""Policies: from the draft's block weights to the blocks that it announces, and on to the target's pages."""

import numpy as np
import torch
from torch import Tensor

from kernels.selection import select_top_k
from sparsity.plan import Plan
from sparsity.selection import BlockSelection


def select_top_k_blocks(weights: Tensor, plan: Plan) -> BlockSelection:
    """STS: for each announced draft head its heaviest blocks, as many as the budget leaves room for.

    weights: [draft_layers, draft_heads, blocks] softmax mass per block. The mandatory blocks (sinks, window)
    are not announced: the target adds them itself.
    """
    blocks = weights.shape[2]
    first, last = plan.middle(blocks)
    heads = plan.announced_heads
    room = max(0, plan.budget_blocks(blocks) - (blocks - (last - first)))
    layer = torch.tensor([pair[0] for pair in heads], dtype=torch.long)
    head = torch.tensor([pair[1] for pair in heads], dtype=torch.long)
    rows = weights[layer, head, first:last]
    size = torch.full((len(heads),), last - first, dtype=torch.long)
    lists, counts = select_top_k(rows, size, torch.full_like(size, room))
    chosen = torch.arange(lists.shape[1]) < counts[:, None]
    keys = torch.arange(len(heads))[:, None] * blocks + first + lists
    return BlockSelection(len(heads), blocks, keys[chosen].numpy().astype(np.int64))


def expand_to_target(selection: BlockSelection | None, plan: Plan, base: int, length: int) -> np.ndarray:
    """The blocks that each target head reads: its draft head's selection and the mandatory set.

    selection: over plan.announced_heads, or None to read every block. base: committed tokens at the
    selection; length: tokens with KV once the round's own are written. Returns bool [layers, kv_heads, blocks].
    """
    blocks = plan.num_blocks(length)
    wanted = np.zeros((plan.target_layers, plan.target_kv_heads, blocks), dtype=bool)
    if selection is None:
        wanted[:] = True
        return wanted
    rows = {pair: row for row, pair in enumerate(plan.announced_heads)}
    if selection.num_heads != len(rows):
        raise ValueError(f"selection over {selection.num_heads} heads, the plan announces {len(rows)}")
    index = np.array([[rows.get(pair, -1) for pair in row] for row in plan.head_map])
    sparse = [layer for layer in range(plan.target_layers) if layer not in plan.dense_layers]
    if sparse:
        wanted[sparse] = selection.resized(blocks).matrix()[index[sparse]]
    wanted[list(plan.dense_layers)] = True
    first, last = plan.middle(plan.num_blocks(base))
    wanted[:, :, :first] = True
    wanted[:, :, last:] = True
    return wanted


def blocks_to_pages(wanted: np.ndarray, block_size: int, page_size: int, length: int) -> np.ndarray:
    """bool [..., blocks] to bool [..., pages] over `length` tokens; a block is a whole number of pages."""
    pages = np.repeat(wanted, block_size // page_size, axis=-1)
    return pages[..., : -(-length // page_size)]
