"""Paged attention in plain torch, one sequence at a time: the reference for the Triton kernel."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.kv_scales import as_bytes, keys_of_pages, values_by_token, values_of_pages
from specahead.kernels.paged_attention.inputs import Batch, BlockLists, GroupMeans


def attend_in_torch(
    batch: Batch, blocks: BlockLists | None = None, means: GroupMeans | None = None, emit: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the output [tokens, heads, dim] and, if `emit`, each listed block's weight [sequences, kv_heads, width].

    The weights of blocks are as `specahead.kernels.paged_attention.paged_attention_with_read_weights` describes them.
    """
    queries, scale = batch.queries, batch.scale
    out = torch.empty_like(queries)
    weights = None if blocks is None or not emit else torch.zeros_like(blocks.lists, dtype=torch.float32)
    starts, lengths = batch.query_starts.tolist(), batch.kv_lengths.tolist()
    for i, length in enumerate(lengths):
        own = slice(starts[i], starts[i + 1])
        rows = queries[own]
        if not len(rows):
            continue
        if blocks is None:
            keys, values, positions = _all_pages(batch, i, length)
            out[own] = _attend(rows, keys, values, _visible(batch, i, positions), scale)
            continue
        listed = _entries_that_count(blocks, i)
        keys, values, positions = _listed(batch, i, length, blocks, listed)
        mask = _visible(batch, i, positions)
        if means is None and not emit:
            out[own] = _attend(rows, keys, values, mask, scale)
            continue
        groups = None if means is None else _stand_ins(batch, means, i, blocks, listed)
        probs = _probabilities(pack_heads(rows, batch.kv_heads), keys, mask, scale, groups)
        if groups is not None:
            values = torch.cat([values, groups.v.to(values.dtype)], 1)
        out[own] = _unpack((probs.to(values.dtype) @ values).to(queries.dtype), len(rows))
        if weights is not None:
            of_blocks = pool_blocks(probs[..., : keys.shape[1]], blocks.block_size)
            weights[i] = of_blocks.unflatten(1, (-1, len(rows))).sum(1).mean(1)
    return out, weights


def _all_pages(batch: Batch, sequence: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values [kv_heads, n, dim] and positions [1, n] of the first `length` tokens, in whole pages."""
    physical, positions = _pages_of(batch, sequence, length)
    pools = batch.k_pages, values_by_token(batch.v_pages)
    keys, values = _in_full(batch, *(gather_pages(pages, physical) for pages in pools))
    return keys, values, positions


def _all_keys(batch: Batch, sequence: int, length: int) -> tuple[Tensor, Tensor]:
    """Return what `_all_pages` does but for the values, which are not copied."""
    physical, positions = _pages_of(batch, sequence, length)
    keys = gather_pages(batch.k_pages, physical)
    return keys if batch.scales is None else keys_of_pages(keys, batch.scales, batch.queries.dtype), positions


def _pages_of(batch: Batch, sequence: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the pages [1, pages] of the first `length` tokens, and the positions [1, n] of all tokens in them."""
    table = batch.block_tables[sequence].long()
    physical = table[None, : -(-length // batch.page_size)]
    return physical, torch.arange(physical.shape[1] * batch.page_size, device=table.device)[None]


def _in_full(batch: Batch, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values out of pages [kv_heads, n, dim] in the queries' dtype."""
    if batch.scales is None:
        return keys, values
    dtype = batch.queries.dtype
    return keys_of_pages(keys, batch.scales, dtype), values_of_pages(values, batch.scales, dtype)


def _entries_that_count(blocks: BlockLists, sequence: int) -> Tensor:
    """Return which entries of a sequence's lists count: [kv_heads, width] bool."""
    return torch.arange(blocks.lists.shape[2], device=blocks.lists.device) < blocks.counts[sequence, :, None]


def _listed(
    batch: Batch, sequence: int, length: int, blocks: BlockLists, listed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values [kv_heads, width * block_size, dim] of listed blocks; positions [kv_heads, the same].

    listed: [kv_heads, width] bool, which entries of the lists count; the others' positions are `length`. KV is copied
    in pieces of a block or a page, whichever is smaller.
    """
    page_size, block_size, kv_heads = batch.page_size, blocks.block_size, batch.kv_heads
    piece, table = min(page_size, block_size), batch.block_tables[sequence].long()
    offsets = torch.arange(block_size, device=table.device)
    positions = blocks.lists[sequence].long().where(listed, 0)[..., None] * block_size + offsets
    if blocks.slots is not None:
        rows = blocks.slots[sequence].where(listed.repeat_interleave(block_size // page_size, 1), 0).long()
    else:
        begins = positions[..., ::piece].flatten(1)
        pages = table[(begins // page_size).clamp(max=len(table) - 1)]  # a last block may reach beyond the table
        rows = pages * kv_heads + torch.arange(kv_heads, device=table.device)[:, None]
        rows = rows * (page_size // piece) + begins % page_size // piece
    pools = batch.k_pages, values_by_token(batch.v_pages)
    keys, values = _in_full(batch, *(_gather_pieces(pages, rows, piece) for pages in pools))
    return keys, values, positions.where(listed[..., None], length).flatten(1)


@dataclass(frozen=True)
class StandIns:
    """Stand-ins of one sequence: means and variances [kv_heads, groups, dim], unread tokens [kv_heads, groups]; the
    limit is that of `GroupMeans`.
    """

    k: Tensor
    v: Tensor
    k_variance: Tensor
    unread: Tensor
    variance_limit: float


def _stand_ins(batch: Batch, means: GroupMeans, sequence: int, blocks: BlockLists, listed: Tensor) -> StandIns:
    chosen, block_size = blocks.lists[sequence].long(), blocks.block_size
    count = int(means.counts[sequence])
    slots = means.tables[sequence, :count].long()
    per_group = means.group_size // block_size
    group = (chosen // per_group).where(listed, count).clamp(max=count)
    read = torch.zeros(len(chosen), count + 1, device=chosen.device).scatter_add_(
        1, group, torch.ones_like(group, dtype=torch.float32)
    )
    unread = means.group_size - block_size * read[:, :count]
    k, v, variance = (x[slots].transpose(0, 1).float() for x in (means.k, means.v, means.k_variance))
    if batch.scales is not None:
        of_keys, of_values = batch.scales.scales[..., None, None]
        k, variance = k * of_keys, variance * of_keys**2
        v = v * of_values + batch.scales.centers[1, :, None]
    return StandIns(k, v, variance, unread, means.variance_limit)


def gather_pages(pages: Tensor, physical: Tensor) -> Tensor:
    """Return the pages listed in `physical` [kv_heads, width], or [1, width] for all heads, laid end to end.

    pages: [pages, kv_heads, page_size, dim]. Returns [kv_heads, width * page_size, dim].
    """
    kv_heads, page_size = pages.shape[1:3]
    rows = physical * kv_heads + torch.arange(kv_heads, device=pages.device)[:, None]
    return _gather_pieces(pages, rows, page_size)


def _gather_pieces(pages: Tensor, rows: Tensor, piece: int) -> Tensor:
    """Return pieces of `piece` tokens of pages [pages, kv_heads, page_size, dim]: [kv_heads, n * piece, dim].

    rows: [kv_heads, n], as the pieces of all pages follow one another.
    """
    page_size, dim = pages.shape[2:]
    if pages.is_contiguous():
        # One row per piece: index_select copies each with one memcpy, several times faster than indexing.
        gathered = as_bytes(pages).view(-1, piece * dim).index_select(0, rows.flatten())
    else:
        tokens = rows[..., None] * piece + torch.arange(piece, device=rows.device)
        gathered = as_bytes(pages).flatten(0, 1)[tokens // page_size, tokens % page_size]
    return gathered.view(pages.dtype).reshape(len(rows), -1, dim)


def pack_heads(queries: Tensor, kv_heads: int) -> Tensor:
    """Return queries [rows, heads, dim] as [kv_heads, group * rows, dim]: a KV head's query heads side by side."""
    rows, _, dim = queries.shape
    return queries.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)


def _unpack(out: Tensor, rows: int) -> Tensor:
    """The reverse of `pack_heads`."""
    kv_heads, _, dim = out.shape
    return out.view(kv_heads, -1, rows, dim).permute(2, 0, 1, 3).reshape(rows, -1, dim)


def _visible(batch: Batch, sequence: int, positions: Tensor, last: int | None = None) -> Tensor:
    """Return which of `positions` [1 or kv_heads, n] a sequence's queries may see: bool [1 or kv_heads, queries, n].

    last: the number of last queries that are meant; None: all.
    """
    end, length = int(batch.query_starts[sequence + 1]), int(batch.kv_lengths[sequence])
    count = end - int(batch.query_starts[sequence]) if last is None else last
    at = positions[:, None, :]
    if batch.visible is None:
        return at <= torch.arange(length - count, length, device=positions.device)[:, None]
    before, first, stop = batch.visible[end - count : end].T[..., None]
    return (at < before) | ((at >= first) & (at < stop))


def _attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attend once. queries [rows, heads, dim]; keys, values [kv_heads, n, dim]; visible [1 or kv_heads, rows, n]."""
    rows, heads, _ = queries.shape
    kv_heads, n = keys.shape[:2]
    if n == 0:
        return torch.zeros_like(queries)
    mask = visible.repeat(1, heads // kv_heads, 1)
    out = F.scaled_dot_product_attention(
        pack_heads(queries, kv_heads)[None], keys[None], values[None], attn_mask=mask[None], scale=scale
    )[0]
    return _unpack(out.where(mask.any(-1, keepdim=True), 0), rows)


def _probabilities(
    packed: Tensor, keys: Tensor, visible: Tensor, scale: float, groups: StandIns | None = None
) -> Tensor:
    """Return the softmax weights of keys and stand-ins, float32 [kv_heads, group * rows, n + groups].

    packed: queries as `pack_heads` gives them, group * rows; the others as for `_attend`. A row that sees nothing has
    zeros.
    """
    mask = visible.repeat(1, packed.shape[1] // visible.shape[1], 1).expand(len(keys), -1, -1)
    scores = (packed @ keys.mT).float() * scale
    if groups is not None:
        q = packed.float() * scale
        spread = ((q * q) @ groups.k_variance.mT / 2).clamp(max=groups.variance_limit)
        mean_scores = q @ groups.k.mT + spread + groups.unread.clamp(min=1).log()[:, None]
        scores = torch.cat([scores, mean_scores], -1)
        mask = torch.cat([mask, (groups.unread > 0)[:, None].expand(-1, mask.shape[1], -1)], -1)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).where(mask, 0)


def weights_of_last_queries(batch: Batch, block_size: int, emitting: int) -> Tensor:
    """Return the softmax weights that each sequence's last queries give all blocks.

    Every sequence has at least `emitting` queries. block_size: tokens. Returns [sequences, emitting, heads, blocks]
    float32, where the longest sequence has all blocks; they sum to 1 over a sequence's blocks and are 0 beyond them.
    """
    lengths, ends = batch.kv_lengths.tolist(), batch.query_starts[1:].tolist()
    out = batch.queries.new_zeros(
        len(lengths), emitting, batch.heads, -(-max(lengths) // block_size), dtype=torch.float32
    )
    for i, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        if length:  # else an empty place of a batch
            packed = pack_heads(batch.queries[end - emitting : end], batch.kv_heads)
            keys, positions = _all_keys(batch, i, length)
            probs = _probabilities(packed, keys, _visible(batch, i, positions, emitting), batch.scale)
            blocks = pool_blocks(probs[..., :length], block_size)
            out[i, :, :, : blocks.shape[-1]] = _unpack(blocks, emitting)
    return out


def remember_weights_of_all_in_torch(
    batch: Batch, block_size: int, memory: Tensor, places: Tensor, decay: float
) -> None:
    """Remember the weights of all blocks, as `kernels.paged_attention.paged_attention_remembering` describes it."""
    starts = batch.query_starts.tolist()
    for i, (length, place) in enumerate(zip(batch.kv_lengths.tolist(), places.tolist(), strict=True)):
        if place < 0:
            continue
        queries = batch.queries[starts[i] : starts[i + 1]]
        keys, positions = _all_keys(batch, i, length)
        probs = _probabilities(pack_heads(queries, batch.kv_heads), keys, _visible(batch, i, positions), batch.scale)
        weights = pool_blocks(probs[..., :length], block_size).unflatten(1, (-1, len(queries))).sum(1).mean(1)
        faded = memory[place, :, : weights.shape[-1]] * decay
        memory[place] = F.pad(torch.maximum(faded, weights), (0, memory.shape[2] - weights.shape[-1]))


def add_weights_of_last_queries(
    batch: Batch, blocks: BlockLists | None, block_size: int, sums: Tensor, share: float, emitting: int
) -> None:
    """Add `share` of the last queries' mean weight on each block, or on each listed one, to `sums`, in place.

    sums: [sequences, heads, n].
    """
    if blocks is None:
        weights = weights_of_last_queries(batch, block_size, emitting).mean(1)
        sums[..., : weights.shape[-1]].add_(weights, alpha=share)
        return
    for i, length in enumerate(batch.kv_lengths.tolist()):
        if not length or not blocks.lists.shape[2]:
            continue
        end = batch.query_starts[i + 1]
        last = pack_heads(batch.queries[end - emitting : end], batch.kv_heads)
        listed = _entries_that_count(blocks, i)
        keys, _, positions = _listed(batch, i, length, blocks, listed)
        probs = _probabilities(last, keys, _visible(batch, i, positions, emitting), batch.scale)
        weights = pool_blocks(probs, block_size).unflatten(1, (batch.group, emitting)).mean(2)
        at = blocks.lists[i].long().where(listed, 0).repeat_interleave(batch.group, 0)
        sums[i].scatter_add_(1, at, share * weights.flatten(0, 1))


def pool_blocks(weights: Tensor, block_size: int) -> Tensor:
    """Return the sums of [..., tokens] over blocks of `block_size` tokens; the last block may be partial."""
    pad = -weights.shape[-1] % block_size
    return F.pad(weights, (0, pad)).unflatten(-1, (-1, block_size)).sum(-1)
