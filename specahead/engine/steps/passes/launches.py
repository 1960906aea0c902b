"""The launches of a pass, the same for all passes of a shape."""

import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.fetch import FetchPlan
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.layer_attention import (
    BlockMemory,
    Heads,
    LayerAttention,
    LayerPages,
    PromptsOfLayer,
    Rows,
    plan_reads,
)
from specahead.engine.model.modules import ModulesDecoder
from specahead.engine.sampling.judging import judge
from specahead.engine.steps.passes.alternatives import Judged, drafted_logits, go_on_behind_alternatives
from specahead.engine.steps.passes.behind_rounds import take_left_rounds
from specahead.engine.steps.passes.behind_steps import leave_step, take_left_step
from specahead.engine.steps.passes.drafting import draft_tokens
from specahead.engine.steps.passes.reads import heads_of, listed_layers, listed_reads, slots_of_layers, tables_of_layers
from specahead.engine.steps.passes.shape import PassShape
from specahead.engine.steps.staging import Buffers
from specahead.kernels.backends import Backend, default_backend
from specahead.kernels.finite_rows import are_finite
from specahead.kernels.paged_attention import pinned_tuning
from specahead.kernels.selection import Remembered, remember_weights, score_blocks, select_over_rows


def run_pass(
    decoder: Decoder | ModulesDecoder,
    kv: KVCache,
    shape: PassShape,
    buffers: Buffers,
    attention: Backend,
    layer_pages: LayerPages | None = None,
    prompts: PromptsOfLayer | None = None,
    drafting: Decoder | None = None,
) -> None:
    """Run what the buffers hold: launches only, the same for all passes of a shape.

    layer_pages: where a layer's keys and values lie; the KV's own pages if None. prompts: what the sequences of a pass
    without lists read piece by piece, if they do. drafting: what runs the passes that draft, and those
    whose tokens a later pass judges (PassShape.light); None: the decoder.
    """
    given = buffers.tensors
    if shape.turn:
        take_left_step(given, shape)
    if shape.behind:
        take_left_rounds(given)
    if shape.shares_out:
        _share_out(given, shape, kv.kv_heads)
    fetched = None
    if shape.fetches:
        listed = given["lists"], given["counts"], shape.block_size, given["block_tables"]
        fetched = kv.fetch_plan(*listed, given["round"])
    if shape.drafts:
        draft_tokens(drafting or decoder, kv, shape, given, attention, fetched)
        buffers.results.device["drafted"].copy_(given["draft_tokens"][:, : shape.drafts])
    if fetched is not None:
        _leave_fetched(buffers, fetched)
    if shape.drafts_alone:
        return
    attend = _attention_of(heads_of(decoder, kv), kv, shape, given, attention, fetched, prompts)
    attend.pages = layer_pages or kv.layer_pages
    logits_rows = given.get("logits_rows")
    if logits_rows is not None and not len(logits_rows) and attend.weights is None:
        attend.unread = kv.num_layers - 1
    tokens = given["token_ids"], given["positions"], slots_of_layers(shape, kv, given)
    run = drafting.run if shape.light and drafting is not None else decoder.run
    given["logits"] = run(*tokens, kv.k_pages, kv.v_pages, attend, logits_rows)
    _leave_results(shape, buffers, fetched, kv)


def _share_out(given: dict[str, Tensor], shape: PassShape, kv_heads: int) -> None:
    """Make lists of what is read in any case and of what has the highest remembered weights."""
    memory = given["memory"][:, :, : shape.blocks]
    backend = default_backend(memory.device)
    limits = given["first"], given["last"], given["blocks"]
    remembered, importance = Remembered(memory, given["indices"]), given["importance"]
    forced, scores, left = score_blocks(remembered, importance, given["bitmaps"], limits, given["room"], backend)
    given["lists"], given["counts"] = select_over_rows(scores, left, forced, backend, kv_heads)


def _attention_of(
    heads: Heads,
    kv: KVCache,
    shape: PassShape,
    given: dict[str, Tensor],
    attention: Backend,
    fetched: FetchPlan | None,
    prompts: PromptsOfLayer | None,
) -> LayerAttention:
    """Return how the layers of a pass attend."""
    of_sequences = given["query_starts"], given["lengths"], given["block_tables"]
    rows = Rows(*of_sequences, shape.most_rows, given.get("visible"))
    tuning = pinned_tuning(heads.dim, heads.group, shape.most_rows) if shape.pinned else None
    attend = LayerAttention(heads, rows, kv.layer_pages, attention, prompts=prompts)
    if shape.weighs or (prompts is None and (not shape.width or shape.dense_layers)):
        attend.dense_work = plan_reads(heads, rows, attention, tuning)
    attend.tables_of = tables_of_layers(shape, kv, given)
    if shape.weighs:
        assert shape.decay is not None
        memory, index = given["memory"][:, :, : shape.blocks], listed_layers(shape, kv)
        attend.weights = BlockMemory(memory, given["indices"], index, shape.decay, shape.block_size, shape.pinned)
    elif shape.width:
        attend.listed = listed_reads(heads, rows, kv, shape, given, attention, fetched, tuning)
    if shape.read_weights:
        attend.weights = torch.empty(given["lists"].shape, dtype=torch.float32, device=rows.starts.device)
        given["read_weights"] = attend.weights
    return attend


def _leave_fetched(buffers: Buffers, fetched: FetchPlan) -> None:
    """Leave what of the lists was fetched, and whether all of it found room."""
    given, results = buffers.tensors, buffers.results.device
    results["listed"].copy_(given["counts"].sum())
    results["overflow"].copy_(fetched.overflow)
    results["fetched"].copy_(fetched.transfers.counts.sum())
    results["missed"].copy_(fetched.missed)


def _leave_results(shape: PassShape, buffers: Buffers, fetched: FetchPlan | None, kv: KVCache) -> None:
    """Leave what the host is to know, and remember the weights that were read."""
    given, results = buffers.tensors, buffers.results.device
    backend = default_backend(given["logits"].device)
    if shape.judged:
        by_sequence = drafted_logits(given["logits"], shape)
        verdicts = judge(by_sequence, given, backend, whatever_is_drafted=shape.draws_own, cuts=shape.cuts)
        judged = Judged(*verdicts, are_finite(by_sequence, given["draft_counts"], backend))
        if shape.alternatives:
            judged, alternative = go_on_behind_alternatives(judged, given, shape, kv)
            results["alternative"].copy_(alternative)
        for name, tensor in vars(judged).items():
            results[name].copy_(tensor)
        if shape.turn:
            leave_step(given, judged.accepted, judged.following)
    if not shape.shares_out:
        return
    results["blocks_read"].copy_(given["counts"].sum((0, 2)))
    if shape.weighs:  # the memory has what the pass weighed
        return
    indices = given["indices"]
    if fetched is not None:  # a void pass will run again
        indices = indices.masked_fill(fetched.overflow > 0, -1)
    assert shape.decay is not None
    remembered, read = Remembered(given["memory"], indices), given["read_weights"]
    remember_weights(remembered, given["lists"], given["counts"], read, given["blocks"], shape.decay, backend)
