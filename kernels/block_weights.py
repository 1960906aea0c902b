"""How much softmax weight each KV block gets from the last query of a sequence, per query head."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backends import check_backend
from kernels.paged_attention import paged_attention


def paged_attention_with_block_weights(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    block_size: int,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Dense paged attention, and the weight that the last query of each sequence puts on each block.

    Arguments as for `paged_attention`; every sequence has at least one query. `block_size`: tokens.
    Returns the output and weights [sequences, heads, ceil(max kv_length / block_size)] float32, which sum
    to 1 over a sequence's blocks and are 0 beyond them.
    """
    check_backend("paged_attention_with_block_weights", backend)
    out = paged_attention(
        queries, k_pages, v_pages, block_tables, kv_lengths, query_starts, scale, backend=backend
    )
    last = queries[query_starts[1:].long() - 1]
    return out, _torch_block_weights(last, k_pages, block_tables, kv_lengths, scale, block_size)


def _torch_block_weights(
    queries: Tensor, k_pages: Tensor, block_tables: Tensor, kv_lengths: Tensor, scale: float, block_size: int
) -> Tensor:
    """queries [sequences, heads, dim] at the last position of each -> [sequences, heads, blocks]"""
    lengths = kv_lengths.tolist()
    kv_heads, page_size = k_pages.shape[1:3]
    heads = queries.shape[1]
    out = queries.new_zeros(len(lengths), heads, -(-max(lengths) // block_size), dtype=torch.float32)
    for i, length in enumerate(lengths):
        keys = k_pages[block_tables[i, : -(-length // page_size)].long()].transpose(0, 1).flatten(1, 2)
        grouped = queries[i].view(kv_heads, heads // kv_heads, -1)
        scores = (grouped @ keys[:, :length].mT).float() * scale  # [kv_heads, group, length]
        blocks = pool_blocks(scores.softmax(-1).view(heads, length), block_size)
        out[i, :, : blocks.shape[1]] = blocks
    return out


def pool_blocks(weights: Tensor, block_size: int) -> Tensor:
    """Sum [..., tokens] over blocks of `block_size` tokens; the last block may be partial."""
    pad = -weights.shape[-1] % block_size
    return F.pad(weights, (0, pad)).unflatten(-1, (-1, block_size)).sum(-1)
