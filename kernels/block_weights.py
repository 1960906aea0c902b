"""How much softmax weight each KV block gets from the last queries of a sequence, per query head."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backends import check_backend
from kernels.paged_attention import Batch, BlockLists, Work, gather_pages, pack_heads, paged_attention
from kernels.paged_attention.launch import attend_emitting
from kernels.paged_attention.weights import add_weights_of_listed, weights_of_last_queries


def paged_attention_with_block_weights(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    block_size: int,
    emitting: int = 1,
    backend: str = "torch",
    max_queries: int = 0,
    width: int | None = None,
    work: Work | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend densely, and weigh how much the last queries of each sequence look at each block.

    Arguments as for `paged_attention`; every sequence has at least `emitting` queries. block_size: tokens; width:
    blocks of the result, which Triton needs, as it does max_queries; by default ceil(max kv_length / block_size).
    Returns the output [tokens, heads, head_dim] and weights [sequences, emitting, heads, width] float32, which sum to 1
    over a sequence's blocks and are 0 beyond them. Raises ValueError for Triton without width.
    """
    check_backend("paged_attention_with_block_weights", backend, ("torch", "triton"))
    if backend == "triton":
        if width is None:
            raise ValueError("paged_attention_with_block_weights: the Triton backend needs width and max_queries")
        batch = Batch(queries, k_pages, v_pages, block_tables, kv_lengths, query_starts, scale)
        out, sums = attend_emitting(batch, None, None, max_queries, work, block_size)
        return out, weights_of_last_queries(batch, sums, block_size, emitting, width)
    out = paged_attention(queries, k_pages, v_pages, block_tables, kv_lengths, query_starts, scale, backend=backend)
    last = query_starts[1:, None].long() + torch.arange(-emitting, 0, device=queries.device)
    weights = _torch_block_weights(queries[last], k_pages, block_tables, kv_lengths, scale, block_size)
    return out, weights if width is None else F.pad(weights, (0, width - weights.shape[-1]))


def _torch_block_weights(
    queries: Tensor, k_pages: Tensor, block_tables: Tensor, kv_lengths: Tensor, scale: float, block_size: int
) -> Tensor:
    """Return [sequences, emitting, heads, blocks]; queries: [sequences, emitting, heads, dim], the last of each."""
    lengths = kv_lengths.tolist()
    kv_heads, page_size = k_pages.shape[1:3]
    sequences, emitting, heads, _ = queries.shape
    out = queries.new_zeros(sequences, emitting, heads, -(-max(lengths) // block_size), dtype=torch.float32)
    for i, length in enumerate(lengths):
        if not length:  # an empty place of a batch
            continue
        keys = gather_pages(k_pages, block_tables[i, None, : -(-length // page_size)].long())[:, :length]
        scores = (pack_heads(queries[i], kv_heads) @ keys.mT).float() * scale
        scores = scores.unflatten(1, (-1, emitting))  # [kv_heads, group, emitting, length]
        later = torch.ones(emitting, emitting, dtype=torch.bool, device=keys.device).triu(1)
        scores[..., length - emitting :].masked_fill_(later, -torch.inf)
        blocks = pool_blocks(scores.softmax(-1), block_size).permute(2, 0, 1, 3).flatten(1, 2)
        out[i, :, :, : blocks.shape[-1]] = blocks
    return out


def add_listed_weights(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    blocks: BlockLists,
    sums: Tensor,
    share: float,
    backend: str = "torch",
    max_queries: int = 0,
    work: Work | None = None,
) -> Tensor:
    """Attend over lists, and add `share` of the last query's weight on each listed block to `sums`, in place.

    Arguments as for `paged_attention`; sums: [sequences, heads, n] float32, its last dimension contiguous.
    Returns the output [tokens, heads, head_dim].
    """
    check_backend("add_listed_weights", backend, ("torch", "triton"))
    arguments = (queries, k_pages, v_pages, block_tables, kv_lengths, query_starts, scale)
    if backend == "triton":
        batch = Batch(*arguments)
        out, block_sums = attend_emitting(batch, blocks, None, max_queries, work, blocks.block_size)
        add_weights_of_listed(batch, block_sums, blocks, sums, share)
        return out
    _add_in_torch(Batch(*arguments), blocks, sums, share)
    return paged_attention(*arguments, blocks)


def _add_in_torch(batch: Batch, blocks: BlockLists, sums: Tensor, share: float) -> None:
    for i, length in enumerate(batch.kv_lengths.tolist()):
        last = int(batch.query_starts[i + 1]) - 1
        if not length or not blocks.lists.shape[2]:
            continue
        for head in range(batch.heads):
            kv_head = head // batch.group
            listed = blocks.lists[i, kv_head, : blocks.counts[i, kv_head]].long()
            within = torch.arange(blocks.block_size, device=listed.device)
            at = (listed[:, None] * blocks.block_size + within).flatten()
            there = at < length
            at = at.where(there, 0)
            pages = batch.block_tables[i, at // batch.page_size].long()
            keys = batch.k_pages[pages, kv_head, at % batch.page_size]
            scores = (keys @ batch.queries[last, head]).float() * batch.scale
            weights = scores.masked_fill(~there, -torch.inf).softmax(-1)
            sums[i, head, listed] += share * weights.view(-1, blocks.block_size).sum(-1)


def pool_blocks(weights: Tensor, block_size: int) -> Tensor:
    """Return the sums of [..., tokens] over blocks of `block_size` tokens; the last block may be partial."""
    pad = -weights.shape[-1] % block_size
    return F.pad(weights, (0, pad)).unflatten(-1, (-1, block_size)).sum(-1)
