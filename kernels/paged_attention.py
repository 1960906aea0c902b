"""Causal attention of ragged queries over paged KV: dense, or over block lists per (sequence, KV head).

Blocks that a list leaves out may be stood in for by the mean key and value of the group of tokens that they
belong to, weighted by how many of the group's tokens are not read, in the same softmax. The weight of n keys
k_i under a query q is n · mean(exp(q·k_i)); with the keys' variances that is, to second order,
n · exp(q·k̄ + ½ Σ q_d² var_d).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backends import check_backend

# The second-order term overshoots for keys that are far from normal; beyond this (a factor of e²) it is cut.
MAX_VARIANCE_TERM = 2.0


@dataclass(frozen=True)
class BlockLists:
    """The KV blocks that each (sequence, KV head) reads; `block_size` tokens divide a page or are whole pages.

    lists: [sequences, kv_heads, width] int32 logical blocks, each at most once
    counts: [sequences, kv_heads] int32, valid entries of `lists`
    """

    lists: Tensor
    counts: Tensor
    block_size: int


@dataclass(frozen=True)
class GroupMeans:
    """Means of the keys and values of groups of `group_size` tokens, a whole number of blocks.

    k, v: [slots, kv_heads, head_dim] means; k_variance: the same shape, of each key dimension within the group
    tables: [sequences, max_groups] int32, slot of each group from the first token on
    counts: [sequences] int32, groups that have a mean; they end before the first query
    """

    k: Tensor
    v: Tensor
    k_variance: Tensor
    tables: Tensor
    counts: Tensor
    group_size: int


def paged_attention(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    blocks: BlockLists | None = None,
    means: GroupMeans | None = None,
    backend: str = "torch",
) -> Tensor:
    """Attend; the last queries of a sequence stand at its last KV positions.

    queries: [tokens, heads, head_dim], the sequences one after another
    k_pages, v_pages: [pages, kv_heads, page_size, head_dim]
    block_tables: [sequences, max_pages] int32, page of each logical page
    kv_lengths: [sequences] int32, tokens with KV, the queries' own included
    query_starts: [sequences + 1] int32, first query row of each sequence
    blocks: what is read; everything if None. means: what stands in for the rest; nothing if None
    Returns [tokens, heads, head_dim]; a query that may see nothing gets zeros.
    """
    check_backend("paged_attention", backend)
    _check_arguments(queries, k_pages, blocks, means)
    out, _ = _torch_paged_attention(
        queries, k_pages, v_pages, block_tables, kv_lengths, query_starts, scale, blocks, means, False
    )
    return out


def paged_attention_with_read_weights(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    blocks: BlockLists,
    means: GroupMeans | None = None,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """`paged_attention` over lists, and how much softmax weight each listed block got.

    The weights are [sequences, kv_heads, width] float32, in the order of `blocks.lists`: the sum over the query
    heads of a KV head of the mean over a sequence's queries; 0 past a list's count.
    """
    check_backend("paged_attention_with_read_weights", backend)
    _check_arguments(queries, k_pages, blocks, means)
    out, weights = _torch_paged_attention(
        queries, k_pages, v_pages, block_tables, kv_lengths, query_starts, scale, blocks, means, True
    )
    assert weights is not None
    return out, weights


def _check_arguments(
    queries: Tensor, k_pages: Tensor, blocks: BlockLists | None, means: GroupMeans | None
) -> None:
    heads, (kv_heads, page_size) = queries.shape[1], k_pages.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"paged_attention: {heads} query heads are no multiple of {kv_heads} KV heads")
    if means is not None and blocks is None:
        raise ValueError("paged_attention: group means stand in for blocks that lists leave out; give lists")
    if blocks is None:
        return
    size = blocks.block_size
    if size < 1 or (size % page_size and page_size % size):
        raise ValueError(
            f"paged_attention: blocks of {size} tokens neither divide a page of {page_size} nor fill some"
        )
    if means is not None and means.group_size % size:
        raise ValueError(
            f"paged_attention: groups of {means.group_size} tokens are no whole blocks of {size}"
        )


def _torch_paged_attention(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    blocks: BlockLists | None,
    means: GroupMeans | None,
    emit: bool,
) -> tuple[Tensor, Tensor | None]:
    out = torch.empty_like(queries)
    weights = None if blocks is None or not emit else torch.zeros_like(blocks.lists, dtype=torch.float32)
    starts, lengths = query_starts.tolist(), kv_lengths.tolist()
    for i, length in enumerate(lengths):
        rows = queries[starts[i] : starts[i + 1]]
        if not len(rows):
            continue
        table = block_tables[i].long()
        if blocks is None:
            keys, values, positions = _all_pages(k_pages, v_pages, table, length)
            out[starts[i] : starts[i + 1]] = _attend(rows, keys, values, positions, length, scale)
            continue
        listed = torch.arange(blocks.lists.shape[2], device=queries.device) < blocks.counts[i, :, None]
        chosen = blocks.lists[i].long()
        keys, values, positions = _listed(k_pages, v_pages, table, chosen, listed, blocks.block_size, length)
        if means is None and not emit:
            out[starts[i] : starts[i + 1]] = _attend(rows, keys, values, positions, length, scale)
            continue
        groups = None if means is None else _stand_ins(means, i, chosen, listed, blocks.block_size)
        out[starts[i] : starts[i + 1]], probs = _attend_with_probs(
            rows, keys, values, positions, length, scale, groups
        )
        if weights is not None:  # probs [kv_heads, group, rows, width * block_size]
            weights[i] = probs.unflatten(-1, (-1, blocks.block_size)).sum(-1).sum(1).mean(1)
    return out, weights


def _all_pages(k_pages: Tensor, v_pages: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values [kv_heads, n, dim] and positions [1, n] of a sequence's first `length` tokens, in whole pages."""
    page_size = k_pages.shape[2]
    physical = table[None, : -(-length // page_size)]
    positions = torch.arange(physical.shape[1] * page_size, device=table.device)[None]
    return gather_pages(k_pages, physical), gather_pages(v_pages, physical), positions


def _listed(
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    chosen: Tensor,
    listed: Tensor,
    block_size: int,
    length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values [kv_heads, width * block_size, dim] of listed blocks; positions beyond `length` where none is."""
    page_size = k_pages.shape[2]
    offsets = torch.arange(block_size, device=table.device)
    positions = chosen.where(listed, 0)[..., None] * block_size + offsets
    if block_size < page_size:
        flat = positions.flatten(1)
        keys, values = (
            gather_tokens(pages, table[flat // page_size], flat % page_size) for pages in (k_pages, v_pages)
        )
    else:
        pages = positions[..., ::page_size].flatten(1) // page_size
        physical = table[pages.clamp(max=len(table) - 1)]  # a last block may reach beyond the table
        keys, values = gather_pages(k_pages, physical), gather_pages(v_pages, physical)
    return keys, values, positions.where(listed[..., None], length).flatten(1)


def gather_pages(pages: Tensor, physical: Tensor) -> Tensor:
    """The pages listed as [kv_heads, width] (or [1, width] for all heads) -> [kv_heads, width * page_size, dim]"""
    kv_heads, page_size, dim = pages.shape[1:]
    rows = physical * kv_heads + torch.arange(kv_heads, device=pages.device)[:, None]
    # One row per (page, head): index_select copies each with one memcpy, several times faster than indexing.
    return pages.view(-1, page_size * dim).index_select(0, rows.flatten()).view(kv_heads, -1, dim)


def gather_tokens(pages: Tensor, physical: Tensor, offsets: Tensor) -> Tensor:
    """Single tokens: page and offset [kv_heads, n] -> [kv_heads, n, dim]"""
    kv_heads, page_size, dim = pages.shape[1:]
    rows = (physical * kv_heads + torch.arange(kv_heads, device=pages.device)[:, None]) * page_size + offsets
    return pages.view(-1, dim).index_select(0, rows.flatten()).view(kv_heads, -1, dim)


@dataclass(frozen=True)
class _StandIns:
    """Of one sequence: means and variances [kv_heads, groups, dim], tokens not read [kv_heads, groups]."""

    k: Tensor
    v: Tensor
    k_variance: Tensor
    unread: Tensor


def _stand_ins(
    means: GroupMeans, sequence: int, chosen: Tensor, listed: Tensor, block_size: int
) -> _StandIns:
    count = int(means.counts[sequence])
    slots = means.tables[sequence, :count].long()
    per_group = means.group_size // block_size
    group = (chosen // per_group).where(listed, count).clamp(max=count)
    read = torch.zeros(len(chosen), count + 1, device=chosen.device).scatter_add_(
        1, group, torch.ones_like(group, dtype=torch.float32)
    )
    unread = means.group_size - block_size * read[:, :count]
    k, v, variance = (x[slots].transpose(0, 1).float() for x in (means.k, means.v, means.k_variance))
    return _StandIns(k, v, variance, unread)


def pack_heads(queries: Tensor, kv_heads: int) -> Tensor:
    """[rows, heads, dim] -> [kv_heads, group * rows, dim]: the query heads of a KV head side by side"""
    rows, _, dim = queries.shape
    return queries.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)


def _unpack(out: Tensor, rows: int) -> Tensor:
    """The reverse of `pack_heads`."""
    kv_heads, _, dim = out.shape
    return out.view(kv_heads, -1, rows, dim).permute(2, 0, 1, 3).reshape(rows, -1, dim)


def _visible(positions: Tensor, rows: int, length: int) -> Tensor:
    """bool [1 or kv_heads, rows, n]: which positions each of the last `rows` of `length` tokens may see"""
    return positions[:, None, :] <= torch.arange(length - rows, length, device=positions.device)[:, None]


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, length: int, scale: float
) -> Tensor:
    """One sequence. queries [rows, heads, dim]; keys, values [kv_heads, n, dim]; positions [1 or kv_heads, n]"""
    rows, heads, _ = queries.shape
    kv_heads, n = keys.shape[:2]
    if n == 0:
        return torch.zeros_like(queries)
    mask = _visible(positions, rows, length).repeat(1, heads // kv_heads, 1)
    out = F.scaled_dot_product_attention(
        pack_heads(queries, kv_heads)[None], keys[None], values[None], attn_mask=mask[None], scale=scale
    )[0]
    return _unpack(out.where(mask.any(-1, keepdim=True), 0), rows)


def _attend_with_probs(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    length: int,
    scale: float,
    groups: _StandIns | None = None,
) -> tuple[Tensor, Tensor]:
    """As `_attend`, and the probabilities of the keys, float32 [kv_heads, group, rows, n]."""
    rows, heads, _ = queries.shape
    kv_heads, n = keys.shape[:2]
    packed = pack_heads(queries, kv_heads)
    mask = _visible(positions, rows, length).repeat(1, heads // kv_heads, 1).expand(kv_heads, -1, -1)
    scores = (packed @ keys.mT).float() * scale
    if groups is not None:
        q = packed.float() * scale
        spread = ((q * q) @ groups.k_variance.mT / 2).clamp(max=MAX_VARIANCE_TERM)
        mean_scores = q @ groups.k.mT + spread + groups.unread.clamp(min=1).log()[:, None]
        scores = torch.cat([scores, mean_scores], -1)
        mask = torch.cat([mask, (groups.unread > 0)[:, None].expand(-1, mask.shape[1], -1)], -1)
        values = torch.cat([values, groups.v.to(values.dtype)], 1)
    # A row that sees nothing: its softmax is NaN, its result zeros.
    probs = scores.masked_fill(~mask, -torch.inf).softmax(-1).where(mask, 0)
    out = (probs.to(values.dtype) @ values).to(queries.dtype)
    return _unpack(out, rows), probs[..., :n].unflatten(1, (-1, rows))
