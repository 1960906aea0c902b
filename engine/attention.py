"""The attention function that transformers models call, over paged KV.

Registered as `specahead` with AttentionInterface and, under the same name, with AttentionMaskInterface:
causality is enforced by positions in the kernel, so no mask is ever built.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from engine.batch import Batch, BatchPart, SequenceKeys
from kernels.block_weights import paged_attention_with_block_weights
from kernels.kv_write import write_kv
from kernels.paged_attention import BlockLists, paged_attention, paged_attention_with_read_weights
from kernels.selection import compact

NAME = "specahead"

# Keywords that change nothing here (position ids are applied already) or that we honour by other means.
_HARMLESS = {"position_ids", "cache_position", "use_cache", "is_causal", "output_attentions"}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    batch: Batch | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, dim]; key, value [1, kv_heads, tokens, dim] -> [1, tokens, heads, dim], None"""
    if batch is None:
        raise RuntimeError("the 'specahead' attention needs batch=…; call the model through engine.runner")
    unsupported = [k for k, v in keywords.items() if v is not None and v is not False and k not in _HARMLESS]
    if unsupported or attention_mask is not None or dropout:
        raise NotImplementedError(
            f"{type(module).__name__} asks attention for {unsupported or 'a mask or dropout'}, which is not built"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    queries, keys, values = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    k_pages, v_pages = batch.k_pages[layer], batch.v_pages[layer]
    write_kv(k_pages, v_pages, batch.slots, keys, values)
    parts = [_attend_part(layer, part, queries, k_pages, v_pages, scale) for part in batch.parts]
    return torch.cat(parts)[None] if len(parts) > 1 else parts[0][None], None


def _attend_part(
    layer: int, part: BatchPart, queries: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float
) -> Tensor:
    rows = queries[part.first_row : part.last_row].contiguous()
    arguments = (rows, k_pages, v_pages, part.block_tables, part.kv_lengths, part.query_starts, scale)
    if part.emitting:
        out, weights = paged_attention_with_block_weights(*arguments, part.block_size, part.emitting)
        part.block_weights.append(weights)
        return out
    if part.lists is not None:
        blocks = part.lists[layer]
    elif part.selector is not None:
        keys = SequenceKeys(k_pages, part.block_tables[0].long(), int(part.kv_lengths[0]))
        chosen = part.selector.choose(layer, rows, keys, scale)
        if chosen is not None and chosen.dim() == 3:
            if part.means is not None or part.emit_read:
                raise ValueError(
                    "queries that each choose their own blocks have neither group means nor read weights"
                )
            return _attend_each_query(part, arguments, chosen)
        blocks = None if chosen is None else _to_lists(chosen[None], part.block_size)
    else:
        blocks = None
    if blocks is None:
        if part.emit_read:
            part.read_weights.append(None)
        return paged_attention(*arguments)
    means = None if part.means is None else part.means[layer]
    if not part.emit_read:
        return paged_attention(*arguments, blocks, means)
    out, weights = paged_attention_with_read_weights(*arguments, blocks, means)
    part.read_weights.append((blocks, weights))
    return out


def _attend_each_query(part: BatchPart, arguments: tuple[Any, ...], chosen: Tensor) -> Tensor:
    """One sequence whose queries read different blocks: each query becomes a sequence of its own."""
    rows, k_pages, v_pages, tables, lengths, _, scale = arguments
    count = len(rows)
    places = torch.arange(count, dtype=torch.int32, device=rows.device)
    each = (
        tables.expand(count, -1),
        lengths - count + 1 + places,
        torch.arange(count + 1, device=rows.device),
    )
    return paged_attention(rows, k_pages, v_pages, *each, scale, _to_lists(chosen, part.block_size))


def _to_lists(chosen: Tensor, block_size: int) -> BlockLists:
    """bool [sequences, kv_heads, blocks] to lists"""
    lists, counts = compact(chosen.flatten(0, 1))
    shape = chosen.shape[:2]
    return BlockLists(lists.view(*shape, -1), counts.view(shape), block_size)


def _no_mask(*_args: Any, **_keywords: Any) -> None:
    return None


def register() -> None:
    """Make `attn_implementation="specahead"` known to transformers. Harmless when repeated."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)
