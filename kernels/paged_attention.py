"""Causal attention of ragged queries over paged KV, dense or over a page list per (sequence, KV head)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backends import check_backend


def paged_attention(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    page_lists: Tensor | None = None,
    page_counts: Tensor | None = None,
    backend: str = "torch",
) -> Tensor:
    """Attend; the last queries of a sequence stand at its last KV positions.

    queries: [tokens, heads, head_dim], the sequences one after another
    k_pages, v_pages: [pages, kv_heads, page_size, head_dim]
    block_tables: [sequences, max_pages] int32, page of each logical page
    kv_lengths: [sequences] int32, tokens with KV, the queries' own included
    query_starts: [sequences + 1] int32, first query row of each sequence
    page_lists: [sequences, kv_heads, width] int32 logical pages to read, each at most once; all if None
    page_counts: [sequences, kv_heads] int32, valid entries of `page_lists`
    Returns [tokens, heads, head_dim]; a query that may see no listed key gets zeros.
    """
    check_backend("paged_attention", backend)
    heads, kv_heads = queries.shape[1], k_pages.shape[1]
    if heads % kv_heads:
        raise ValueError(f"paged_attention: {heads} query heads are no multiple of {kv_heads} KV heads")
    if (page_lists is None) != (page_counts is None):
        raise ValueError("paged_attention: page_lists and page_counts go together")
    return _torch_paged_attention(
        queries, k_pages, v_pages, block_tables, kv_lengths, query_starts, scale, page_lists, page_counts
    )


def _torch_paged_attention(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    page_lists: Tensor | None,
    page_counts: Tensor | None,
) -> Tensor:
    out = torch.empty_like(queries)
    starts, lengths = query_starts.tolist(), kv_lengths.tolist()
    page_size = k_pages.shape[2]
    for i, length in enumerate(lengths):
        first, last = starts[i], starts[i + 1]
        if first == last:
            continue
        if page_lists is None or page_counts is None:
            physical = block_tables[i : i + 1, : -(-length // page_size)].long()
            positions = torch.arange(physical.shape[1] * page_size, device=queries.device)[None]
        else:
            counts = page_counts[i]
            logical = page_lists[i, :, : int(counts.max())].long()
            listed = torch.arange(logical.shape[1], device=queries.device) < counts[:, None]
            physical = block_tables[i].long()[logical.where(listed, 0)]
            offsets = torch.arange(page_size, device=queries.device)
            positions = logical.where(listed, length)[..., None] * page_size + offsets
            positions = positions.flatten(1)
        keys, values = _gather(k_pages, physical), _gather(v_pages, physical)
        out[first:last] = _attend(queries[first:last], keys, values, positions, length, scale)
    return out


def _gather(pages: Tensor, physical: Tensor) -> Tensor:
    """The pages listed as [kv_heads, width] (or [1, width] for all heads) -> [kv_heads, width * page_size, dim]"""
    kv_heads, page_size, dim = pages.shape[1:]
    rows = physical * kv_heads + torch.arange(kv_heads, device=pages.device)[:, None]
    # One row per (page, head): index_select copies each with one memcpy, several times faster than indexing.
    return pages.view(-1, page_size * dim).index_select(0, rows.flatten()).view(kv_heads, -1, dim)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, length: int, scale: float
) -> Tensor:
    """One sequence, its GQA groups packed into the query axis.

    queries [rows, heads, dim]; keys, values [kv_heads, n, dim]; positions [1 or kv_heads, n] -> [rows, heads, dim]
    """
    rows, heads, dim = queries.shape
    kv_heads, n = keys.shape[:2]
    if n == 0:
        return torch.zeros_like(queries)
    group = heads // kv_heads
    packed = queries.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * rows, dim)
    query_positions = torch.arange(length - rows, length, device=queries.device)
    visible = positions[:, None, :] <= query_positions[:, None]  # [1 or kv_heads, rows, n]
    mask = visible[:, None].expand(-1, group, -1, -1).reshape(-1, group * rows, n)
    out = F.scaled_dot_product_attention(
        packed[None], keys[None], values[None], attn_mask=mask[None], scale=scale
    )[0]
    out = out.where(mask.any(-1, keepdim=True), 0)
    return out.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
