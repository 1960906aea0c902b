"""Drafting by the model itself, before the pass that judges (PillarAttn of SparseSpec).

The drafting passes run one token of each sequence and read lists, which stay the same for all of them: what earlier
passes over everything have weighed most. The KV that they write is written again by the pass that judges. What of the
lists has left the GPU is fetched once for all of them, ahead of the layers of the first.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.fetch import FetchPlan
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.layer_attention import LayerAttention, Rows, plan_reads
from specahead.engine.model.modules import ModulesDecoder
from specahead.engine.sampling.judging import WIDE_SUPPORT
from specahead.engine.sampling.next_tokens import draw_tokens
from specahead.engine.steps.passes.reads import heads_of, listed_reads, slots_of_layers, tables_of_layers
from specahead.engine.steps.passes.shape import PassShape
from specahead.kernels.backends import Backend, default_backend
from specahead.kernels.selection import top_few


def draft_tokens(
    decoder: Decoder | ModulesDecoder,
    kv: KVCache,
    shape: PassShape,
    given: dict[str, Tensor],
    attention: Backend,
    fetched: FetchPlan | None = None,
) -> None:
    """Draft all tokens of a pass but the first of each sequence, and put them where the pass takes them from.

    given: the buffers of the pass, lists among them; what is drafted goes to token_ids, draft_tokens, support_ids and
    support_probs. fetched: what brings the listed pages, if some are not on the GPU. It launches only.
    """
    heads, tables, ends = heads_of(decoder, kv), given["block_tables"], given["lengths"]
    drafted, present = shape.drafts, ends > 0
    sizes = shape.sequences, drafted + 1
    of_tokens = [name for name in ("token_ids", "positions", "slots", "kept_slots") if name in given]
    rows = shape.sequences * (drafted + 1)  # a pinned shape has room for more
    tokens = given["token_ids"][:rows].view(sizes)
    starts = torch.arange(shape.sequences + 1, dtype=torch.int32, device=ends.device)
    listed = listed_reads(heads, Rows(starts, ends, tables, 1), kv, shape, given, attention, fetched)
    tables_of = tables_of_layers(shape, kv, given)
    for index in range(drafted):
        lengths = (ends - drafted + index).where(present, 0)
        each = Rows(starts, lengths, tables, 1)
        attend = LayerAttention(heads, each, kv.layer_pages, attention, listed, tables_of=tables_of)
        if shape.dense_layers:
            attend.dense_work = plan_reads(heads, each, attention)
        row: dict[str, Tensor] = {name: given[name][:rows].view(sizes)[:, index].contiguous() for name in of_tokens}
        slots = slots_of_layers(shape, kv, row)
        logits = decoder.run(row["token_ids"], row["positions"], slots, kv.k_pages, kv.v_pages, attend)
        listed = replace(listed, wait=None)  # the first pass has waited
        drawn = _draw(logits, given, index)
        tokens[:, index + 1] = drawn
        given["draft_tokens"][:, index] = drawn


def _draw(logits: Tensor, given: dict[str, Tensor], index: int) -> Tensor:
    """Draw the drafted token of number `index`, int64 [sequences], and leave what it was drawn from."""
    best = top_few(logits, 1, default_backend(logits.device))[:, 0]
    if "draft_uniforms" not in given:
        return best
    temperature, top_p = given["temperature"], given["top_p"]
    least = temperature.new_zeros(1, 1)
    if "top_k" in given:
        beyond = torch.arange(min(WIDE_SUPPORT, logits.shape[1]), device=logits.device) >= given["top_k"][:, None]
        least = given["min_p"][:, None].where(~beyond | (given["top_k"] == 0)[:, None], 2.0)  # which no token has
    chosen_by = temperature, top_p, least, given["draft_uniforms"][:, index]
    drawn, ids, probs = draw_tokens(logits, best, *chosen_by, WIDE_SUPPORT)
    given["support_ids"][:, index, : ids.shape[1]] = ids
    given["support_probs"][:, index, : ids.shape[1]] = probs
    return drawn
