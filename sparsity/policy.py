"""Policies: from the draft's block weights to the blocks that it announces, and on to the target's pages."""

import numpy as np
import torch
from torch import Tensor

from kernels.selection import select_top_k
from sparsity.plan import Plan
from sparsity.selection import BlockSelection


def select_top_k_blocks(weights: list[Tensor], plan: Plan) -> list[BlockSelection]:
    """STS: for each announced draft head its heaviest blocks, as many as the budget leaves room for.

    weights: for each sequence [draft_layers, draft_heads, blocks], softmax mass per block. The mandatory blocks
    (sinks, window) are not announced: the target adds them itself.
    """
    heads = plan.announced_heads
    counts = [w.shape[2] for w in weights]
    middles = [plan.middle(blocks) for blocks in counts]
    sizes = [last - first for first, last in middles]
    room = [max(0, plan.budget_blocks(n) - (n - size)) for n, size in zip(counts, sizes, strict=True)]
    layer = torch.tensor([pair[0] for pair in heads], dtype=torch.long)
    head = torch.tensor([pair[1] for pair in heads], dtype=torch.long)
    rows = weights[0].new_zeros(len(weights), len(heads), max(sizes, default=0))
    for i, (w, (first, last)) in enumerate(zip(weights, middles, strict=True)):
        rows[i, :, : last - first] = w[layer, head, first:last]

    def per_row(values: list[int]) -> Tensor:
        return torch.tensor(values, device=rows.device).repeat_interleave(len(heads))

    lists, chosen = select_top_k(rows.flatten(0, 1), per_row(sizes), per_row(room))
    shape = (len(weights), len(heads), lists.shape[1])
    listed = (torch.arange(shape[2], device=rows.device) < chosen[:, None]).view(shape).cpu().numpy()
    blocks_of = lists.view(shape).cpu().numpy()
    offsets = np.arange(len(heads))[:, None]
    return [
        BlockSelection(len(heads), n, (offsets * n + first + blocks_of[i]).astype(np.int64)[listed[i]])
        for i, (n, (first, _)) in enumerate(zip(counts, middles, strict=True))
    ]


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
