"""The attention function that transformers models call, over paged KV.

Registered as `specahead` with AttentionInterface and, under the same name, with AttentionMaskInterface:
causality is enforced by positions in the kernel, so no mask is ever built.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from engine.batch import Batch
from kernels.block_weights import paged_attention_with_block_weights
from kernels.kv_write import write_kv
from kernels.paged_attention import paged_attention

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
    parts = []
    for part in batch.parts:
        rows = queries[part.first_row : part.last_row].contiguous()
        arguments = (rows, k_pages, v_pages, part.block_tables, part.kv_lengths, part.query_starts, scale)
        if part.block_size:
            out, weights = paged_attention_with_block_weights(*arguments, part.block_size)
            part.block_weights.append(weights)
        elif part.page_lists is not None and part.page_lists[layer] is not None:
            out = paged_attention(*arguments, *part.page_lists[layer])  # type: ignore[misc]
        else:
            out = paged_attention(*arguments)
        parts.append(out)
    return torch.cat(parts)[None] if len(parts) > 1 else parts[0][None], None


def _no_mask(*_args: Any, **_keywords: Any) -> None:
    return None


def register() -> None:
    """Make `attn_implementation="specahead"` known to transformers. Harmless when repeated."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)
