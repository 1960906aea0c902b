"""The launches of a pass, the same for all passes of a shape."""

import torch
from torch import Tensor

from engine.decoder import Attend, Decoder
from engine.judging import judge
from engine.kv.cache import KVCache
from engine.kv.fetch import FetchPlan
from engine.kv.pages import PAGE_SIZE
from engine.layer_attention import (
    BlockWeights,
    Heads,
    LayerAttention,
    LayerPages,
    ListedReads,
    ReadWeights,
    Rows,
    plan_dense,
    plan_listed,
)
from engine.modules import ModulesDecoder
from engine.passes.buffers import BudgetBuffers, PassBuffers
from engine.passes.shape import PassShape
from kernels.backends import Backend, default_backend
from kernels.flashinfer_attention import Planned
from kernels.paged_attention import BlockLists, GroupMeans, Tuning, pinned_tuning
from kernels.shared_budget import remember_weights, score_blocks
from kernels.shared_top_k import select_top_k_over_all


def heads_of(decoder: Decoder | ModulesDecoder, kv: KVCache) -> Heads:
    """Return what attention needs to know of a model's heads."""
    return Heads(kv.kv_heads, decoder.heads // kv.kv_heads, kv.k_pages[0].shape[3], decoder.attention_scale)


def run_pass(
    decoder: Decoder | ModulesDecoder,
    kv: KVCache,
    shape: PassShape,
    buffers: PassBuffers,
    attention: Backend,
    layer_pages: LayerPages | None = None,
    prompt: Planned | None = None,
    overlap: bool = True,
    attend: Attend | None = None,
) -> None:
    """Run what the buffers hold: launches only, the same for all passes of a shape.

    layer_pages: where a layer's keys and values lie; the KV's own pages if None. prompt: FlashInfer's plan of the
    dense layers. overlap: False fetches a layer's pages only when the layer wants them (to compare with).
    attend: how the layers attend instead of what the shape says.
    """
    if buffers.budget is not None:
        _share_out(buffers, buffers.budget, shape, kv.kv_heads)
    fetched = None
    if shape.fetches:
        assert buffers.lists is not None and buffers.counts is not None and buffers.round is not None
        listed = buffers.lists, buffers.counts, shape.block_size, buffers.block_tables
        fetched = kv.fetch_plan(*listed, buffers.round, overlap)
    if attend is None:
        attend = own = _attention_of(heads_of(decoder, kv), kv, shape, buffers, attention, fetched)
        own.prompt = prompt
        if layer_pages is not None:
            own.pages = layer_pages
    slots: Tensor | list[Tensor] = buffers.slots
    if buffers.kept_slots is not None:
        kept = [layer in kv.kept_layers for layer in range(kv.num_layers)]
        slots = [buffers.kept_slots if of_layer else buffers.slots for of_layer in kept]
    tokens = buffers.token_ids, buffers.positions, slots
    buffers.logits = decoder.run(*tokens, kv.k_pages, kv.v_pages, attend, buffers.logits_rows)
    _leave_results(shape, buffers, fetched)


def _share_out(buffers: PassBuffers, budget: BudgetBuffers, shape: PassShape, kv_heads: int) -> None:
    """Make lists of what is read in any case and of what has the highest remembered weights."""
    backend = default_backend(budget.memory.device)
    memory = budget.memory[:, :, : shape.blocks]
    limits = budget.first, budget.last, budget.blocks
    forced, scores = score_blocks(budget.bitmaps, memory, budget.indices, budget.importance, *limits, backend)
    buffers.lists, buffers.counts = select_top_k_over_all(scores, budget.room, forced, backend, kv_heads)


def _attention_of(
    heads: Heads, kv: KVCache, shape: PassShape, buffers: PassBuffers, attention: Backend, fetched: FetchPlan | None
) -> LayerAttention:
    """Return how the layers of a pass attend."""
    rows = Rows(buffers.query_starts, buffers.lengths, buffers.block_tables, shape.queries)
    tuning = pinned_tuning(heads.dim) if shape.pinned else None
    attend = LayerAttention(heads, rows, kv.layer_pages, attention)
    if not shape.width or shape.dense_layers:
        attend.dense_work = plan_dense(heads, rows, PAGE_SIZE, attention, tuning)
    if buffers.kept_tables is not None:
        kept_tables, kept_layers = buffers.kept_tables, kv.kept_layers
        attend.tables_of = lambda layer: kept_tables if layer in kept_layers else rows.tables
    if shape.emitting:
        attend.weights = buffers.block_weights = BlockWeights(shape.block_size, shape.emitting, shape.blocks)
    if shape.width:
        attend.listed = _listed_reads(heads, rows, kv, shape, buffers, attention, fetched, tuning)
    if shape.read_weights:
        assert buffers.lists is not None
        buffers.read_weights = torch.empty(buffers.lists.shape, dtype=torch.float32, device=rows.starts.device)
        attend.weights = ReadWeights(buffers.read_weights)
    return attend


def _listed_reads(
    heads: Heads,
    rows: Rows,
    kv: KVCache,
    shape: PassShape,
    buffers: PassBuffers,
    attention: Backend,
    fetched: FetchPlan | None,
    tuning: Tuning | None,
) -> ListedReads:
    assert buffers.lists is not None and buffers.counts is not None
    means: list[GroupMeans] | None = None
    if shape.groups:
        assert kv.means is not None and buffers.group_tables is not None and buffers.group_counts is not None
        means = kv.means.over(buffers.group_tables, buffers.group_counts)
    lines = None if fetched is None else fetched.lines
    blocks = BlockLists(buffers.lists, buffers.counts, shape.block_size, lines)
    work = plan_listed(heads, rows, PAGE_SIZE, attention, blocks, means, tuning)
    sparse = [layer for layer in range(kv.num_layers) if layer not in shape.dense_layers]
    index = {layer: i for i, layer in enumerate(sparse)}
    return ListedReads(blocks, index, work, means, None if fetched is None else fetched.wait)


def _leave_results(shape: PassShape, buffers: PassBuffers, fetched: FetchPlan | None) -> None:
    """Leave what the host is to know, and remember the weights that were read."""
    assert buffers.logits is not None
    results, backend = buffers.results.device, default_backend(buffers.token_ids.device)
    if fetched is not None:
        assert buffers.counts is not None
        results["listed"].copy_(buffers.counts.sum())
        results["overflow"].copy_(fetched.overflow)
        results["fetched"].copy_(fetched.transfers.counts.sum())
        results["missed"].copy_(fetched.missed)
    if shape.judged:
        by_sequence = buffers.logits.view(shape.sequences, shape.queries, -1)
        accepted, following = judge(by_sequence, buffers.verdicts, backend)
        results["accepted"].copy_(accepted)
        results["following"].copy_(following)
    if buffers.budget is None:
        return
    assert shape.decay is not None and buffers.read_weights is not None
    assert buffers.lists is not None and buffers.counts is not None
    results["blocks_read"].copy_(buffers.counts.sum((0, 2)))
    budget, indices = buffers.budget, buffers.budget.indices
    if fetched is not None:  # a void pass will run again
        indices = indices.masked_fill(fetched.overflow > 0, -1)
    read = buffers.lists, buffers.counts, buffers.read_weights
    remember_weights(budget.memory, indices, *read, budget.blocks, shape.decay, backend)
