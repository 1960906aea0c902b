"""One pass over short inputs of several sequences, as a CUDA graph holds it: shapes, buffers, launches.

Lengths, tables, lists and what is to be judged are read on the device, so one graph serves all steps of a shape.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import SequenceInput
from engine.decoder import Decoder, run_decoder
from engine.judging import judge, lay_out_verdicts, verdict_layout
from engine.kv.cache import KVCache
from engine.kv.fetch import FetchPlan
from engine.kv.pages import PAGE_SIZE, SequenceKV
from engine.staging import Layout, Staging
from kernels.backends import Backend, default_backend
from kernels.block_weights import paged_attention_with_block_weights
from kernels.flashinfer_attention import Planned, dense_requests, plan
from kernels.paged_attention import (
    BlockLists,
    GroupMeans,
    paged_attention,
    paged_attention_with_read_weights,
    pinned_tuning,
    plan_work,
)
from kernels.shared_budget import WORD, remember_weights, score_blocks
from kernels.shared_top_k import select_top_k_over_all

# The keys and values that a layer attends over, once its new ones are written: layer -> [pages, kv_heads, page, dim].
LayerPages = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class StepShape:
    """All that a graph's kernels are specialised for.

    sequences, queries: room for so many sequences of so many tokens. pages: of a sequence, at most. emitting: queries
    of each sequence that give weights over blocks of `block_size`. width: blocks of a list, at most; 0: dense.
    groups: group means of a sequence, at most; 0: none stand in. dense_layers: that have no lists. judged: whether
    the pass ends in verdicts, each sequence having drafted all its tokens but the first; support: entries of a
    distribution that they were drawn from, at most; 0: all are greedy. pinned: splits of attention do not depend on
    the batch. apart: some layers' pages lie at their numbers, others in GPU pages (KVCache.kept_layers). tiered: block
    tables name pages of a backing store; what is listed, in every layer that lies in tiers, is fetched first.
    """

    sequences: int
    queries: int
    pages: int
    block_size: int = 0
    emitting: int = 0
    width: int = 0
    groups: int = 0
    read_weights: bool = False
    dense_layers: tuple[int, ...] = ()
    decay: float | None = None  # of what is remembered, where a budget is shared out in the pass
    judged: bool = False
    support: int = 0
    pinned: bool = False
    apart: bool = False
    tiered: bool = False

    @property
    def blocks(self) -> int:
        """That a sequence has at most."""
        return self.pages * PAGE_SIZE // self.block_size


@dataclass
class BudgetBuffers:
    """What decides over the blocks of a shared budget; rows are (sparse layer, KV head)."""

    memory: Tensor  # [places, rows, blocks] float32, of many sequences
    places: Tensor  # [sequences] int32, where each sequence's is; -1: no sequence
    words: Tensor  # [sequences, rows, words] int64
    importance: Tensor  # [rows] float32
    first: Tensor  # [sequences] int32
    last: Tensor  # [sequences] int32
    blocks: Tensor  # [sequences] int32
    room: Tensor  # [sequences] int32


@dataclass
class StepBuffers:
    """Inputs of one shape on the device, all parts of `inputs`, and what its graph leaves."""

    inputs: Staging
    results: (
        Staging  # accepted, following [sequences] of judged steps; blocks_read [sequences] of shared budgets
    )
    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64, -1 where no sequence is
    query_starts: Tensor  # [sequences + 1] int32
    lengths: Tensor  # [sequences] int32
    block_tables: Tensor  # [sequences, pages] int32
    lists: Tensor | None = None  # [sparse layers, sequences, kv_heads, width] int32
    counts: Tensor | None = None  # [sparse layers, sequences, kv_heads] int32
    budget: BudgetBuffers | None = None
    group_tables: Tensor | None = None  # [sequences, groups] int32
    group_counts: Tensor | None = None  # [sequences] int32
    judged_rows: Tensor | None = None  # [sequences * queries] int64: row of each sequence's each query
    verdicts: dict[str, Tensor] = field(default_factory=dict)  # engine.judging.verdict_layout
    round: Tensor | None = None  # [1] int32, of the residency tables, where KV lies in tiers
    # Of layers whose pages lie at their numbers, where others' do not.
    kept_slots: Tensor | None = None  # [rows] int64
    kept_tables: Tensor | None = None  # [sequences, pages] int32
    logits: Tensor | None = None  # [rows, vocab]; of judged steps [sequences * queries, vocab]
    weights: list[Tensor | None] = field(default_factory=list)  # a layer each: emitted, or of what was read


def rows_layout(sequences: int, queries: int, pages: int, apart: bool = False) -> Layout:
    """Where the tokens of a pass come from and go to; the same for steps and rounds. apart: as in StepShape."""
    rows = sequences * queries
    kept: Layout = {"kept_slots": ((rows,), torch.int64), "kept_tables": ((sequences, pages), torch.int32)}
    return {
        **(kept if apart else {}),
        "token_ids": ((rows,), torch.int64),
        "positions": ((rows,), torch.int64),
        "slots": ((rows,), torch.int64),
        "query_starts": ((sequences + 1,), torch.int32),
        "lengths": ((sequences,), torch.int32),
        "block_tables": ((sequences, pages), torch.int32),
    }


def make_buffers(
    shape: StepShape, layers: int, kv_heads: int, device: torch.device, memory: Tensor | None = None
) -> StepBuffers:
    """memory: [places, rows, blocks] float32, for a shape that shares budgets out."""
    count = shape.sequences
    rows = rows_layout(count, shape.queries, shape.pages, shape.apart)
    sparse = layers - len(shape.dense_layers)
    lists: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    budget: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    groups: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    verdicts: Layout = {}
    judged_rows: Layout = {}
    results: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if shape.decay is not None:
        budget = dict.fromkeys(("places", "first", "last", "blocks", "room"), ((count,), torch.int32))
        budget["words"] = (count, sparse * kv_heads, -(-shape.blocks // WORD)), torch.int64
        budget["importance"] = (sparse * kv_heads,), torch.float32
        results["blocks_read"] = (count,), torch.int32
    elif shape.width:
        lists = {
            "lists": ((sparse, count, kv_heads, shape.width), torch.int32),
            "counts": ((sparse, count, kv_heads), torch.int32),
        }
    if shape.groups:
        groups = {
            "group_tables": ((count, shape.groups), torch.int32),
            "group_counts": ((count,), torch.int32),
        }
    tiers: Layout = {}
    if shape.tiered:
        tiers = {"round": ((1,), torch.int32)}
        results |= dict.fromkeys(("listed", "fetched", "overflow"), ((1,), torch.int32))
        results["missed"] = (count,), torch.int32
    if shape.judged:
        judged_rows = {"judged_rows": ((count * shape.queries,), torch.int64)}
        verdicts = verdict_layout(count, shape.queries - 1, shape.support)
        results |= dict.fromkeys(("accepted", "following"), ((count,), torch.int32))
    inputs = Staging({**rows, **lists, **budget, **groups, **tiers, **judged_rows, **verdicts}, device)

    def parts(layout: Layout) -> dict[str, Any]:
        return {name: inputs.device[name] for name in layout}

    buffers = StepBuffers(
        inputs,
        Staging(results, device),
        **parts(rows),
        **parts(lists),
        **parts(groups),
        **parts(judged_rows),
        **parts(tiers),
        verdicts=parts(verdicts),
    )
    if budget:
        assert memory is not None
        buffers.budget = BudgetBuffers(memory, **parts(budget))
    lay_out_rows(inputs.host, [])
    if budget:
        inputs.host["places"][:] = -1
    inputs.send()
    return buffers


def run_step(
    decoder: Decoder,
    kv: KVCache,
    shape: StepShape,
    buffers: StepBuffers,
    attention: Backend | None = None,
    layer_pages: LayerPages | None = None,
    overlap: bool = True,
) -> None:
    """One pass over what the buffers hold: launches only, the same for all steps of a shape.

    attention: what attends; the device's default if None.
    layer_pages: what the block tables are of; the KV's own pages if None.
    overlap: False: a tiered pass fetches a layer's pages only when the layer wants them (to compare with).
    """
    device = buffers.token_ids.device
    backend = default_backend(device)
    attention = attention or backend
    group, dim = decoder.heads // decoder.kv_heads, kv.k_pages[0].shape[3]
    scale = decoder.attention_scale
    sparse = [layer for layer in range(len(decoder.layers)) if layer not in shape.dense_layers]
    place = {layer: i for i, layer in enumerate(sparse)} if shape.width else {}
    tables, lengths = buffers.block_tables, buffers.lengths
    if buffers.budget is not None:
        _share_out(buffers, buffers.budget, decoder.kv_heads)
    fetched: FetchPlan | None = None
    if shape.tiered:
        assert buffers.round is not None
        assert buffers.lists is not None and buffers.counts is not None
        listed = buffers.lists, buffers.counts, shape.block_size
        fetched = kv.fetch_plan(*listed, tables, buffers.round, overlap)
    common = (decoder.kv_heads, group, dim, shape.queries, tables, lengths, PAGE_SIZE)
    dense_work = sparse_work = None
    means: list[GroupMeans] | None = None
    if shape.groups:
        assert kv.means is not None and buffers.group_tables is not None and buffers.group_counts is not None
        means = kv.means.over(buffers.group_tables, buffers.group_counts)
    if attention == "triton":
        tuning = pinned_tuning(dim) if shape.pinned else None
        if len(place) < len(decoder.layers):
            dense_work = plan_work(*common, tuning=tuning)
        if shape.width:
            assert buffers.lists is not None and buffers.counts is not None
            found = None if fetched is None else fetched.lines
            blocks = BlockLists(buffers.lists, buffers.counts, shape.block_size, found)
            sparse_work = plan_work(*common, blocks, None if means is None else means[0], tuning)
    kept = kv.kept_layers
    kept_tables, kept_slots = buffers.kept_tables, buffers.kept_slots
    slots: Tensor | list[Tensor] = buffers.slots
    if kept_slots is not None:
        slots = [kept_slots if layer in kept else buffers.slots for layer in range(len(decoder.layers))]
    buffers.weights = [None] * len(decoder.layers)
    read_weights: Tensor | None = None
    if buffers.budget is not None:
        assert buffers.lists is not None
        read_weights = torch.empty(buffers.lists.shape, dtype=torch.float32, device=device)

    def attend(layer: int, queries: Tensor) -> Tensor:
        pages = (kv.k_pages[layer], kv.v_pages[layer]) if layer_pages is None else layer_pages(layer)
        table = kept_tables if layer in kept and kept_tables is not None else tables
        arguments = (queries, *pages, table, lengths, buffers.query_starts, scale)
        at = place.get(layer)
        if at is None:
            if not shape.emitting:
                return paged_attention(
                    *arguments, backend=attention, max_queries=shape.queries, work=dense_work
                )
            out, buffers.weights[layer] = paged_attention_with_block_weights(
                *arguments,
                shape.block_size,
                shape.emitting,
                backend=attention,
                max_queries=shape.queries,
                width=shape.blocks,
                work=dense_work,
            )
            return out
        assert buffers.lists is not None and buffers.counts is not None
        places = None
        if fetched is not None:
            fetched.wait(at)
            places = fetched.lines[at]
        blocks = BlockLists(buffers.lists[at], buffers.counts[at], shape.block_size, places)
        work = None if sparse_work is None else sparse_work.layer(at)
        stand_ins = None if means is None else means[layer]
        if not shape.read_weights:
            return paged_attention(*arguments, blocks, stand_ins, attention, shape.queries, work)
        out, buffers.weights[layer] = paged_attention_with_read_weights(
            *arguments,
            blocks,
            stand_ins,
            attention,
            shape.queries,
            work,
            None if read_weights is None else read_weights[at],
        )
        return out

    logits = run_decoder(
        decoder,
        buffers.token_ids,
        buffers.positions,
        slots,
        kv.k_pages,
        kv.v_pages,
        attend,
        backend,
        buffers.judged_rows,
    )
    buffers.logits = logits
    results = buffers.results.device
    if fetched is not None:
        assert buffers.counts is not None
        results["listed"].copy_(buffers.counts.sum())
        results["overflow"].copy_(fetched.overflow)
        results["fetched"].copy_(fetched.transfers.counts.sum())
        results["missed"].copy_(fetched.missed)
    if shape.judged:
        by_sequence = logits.view(shape.sequences, shape.queries, -1)
        accepted, following = judge(by_sequence, buffers.verdicts, backend)
        results["accepted"].copy_(accepted)
        results["following"].copy_(following)
    if buffers.budget is not None:
        assert shape.decay is not None
        assert buffers.lists is not None and buffers.counts is not None and read_weights is not None
        results["blocks_read"].copy_(buffers.counts.sum((0, 2)))
        places = buffers.budget.places
        if fetched is not None:  # a void pass will run again
            places = places.masked_fill(fetched.overflow > 0, -1)
        remember_weights(
            buffers.budget.memory,
            places,
            buffers.lists,
            buffers.counts,
            read_weights,
            buffers.budget.blocks,
            shape.decay,
            backend,
        )


def plan_rows(planned: Planned, host: dict[str, np.ndarray], decoder: Decoder, kv: KVCache) -> None:
    """Plan FlashInfer's dense attention over sequences that were laid out by `lay_out_rows`."""
    layout = (torch.from_numpy(host[name]) for name in ("block_tables", "lengths", "query_starts"))
    pages = kv.k_pages[0]
    dim = pages.shape[3]
    requests = dense_requests(*layout, PAGE_SIZE)
    plan(
        planned,
        requests,
        decoder.heads,
        decoder.kv_heads,
        dim,
        PAGE_SIZE,
        decoder.attention_scale,
        pages.dtype,
    )


def _share_out(buffers: StepBuffers, budget: BudgetBuffers, kv_heads: int) -> None:
    """Lists from what is read anyway (`score_blocks`) and from the highest remembered weights."""
    backend = default_backend(budget.memory.device)
    forced, scores = score_blocks(
        budget.words,
        budget.memory,
        budget.places,
        budget.importance,
        budget.first,
        budget.last,
        budget.blocks,
        backend,
    )
    buffers.lists, buffers.counts = select_top_k_over_all(scores, budget.room, forced, backend, kv_heads)


# From inputs to buffers.


def lay_out_step(
    buffers: StepBuffers,
    shape: StepShape,
    inputs: list[SequenceInput],
    places: list[int],
    kv: KVCache,
    tables: list[np.ndarray] | None = None,
) -> None:
    """Bring a step's inputs to the device. places: where each sequence's memory is, where budgets are shared out.

    tables: block tables, where they do not name what the pages of `kv` lie in.
    """
    buffers.inputs.begin()
    host = buffers.inputs.host
    gpu_pages = [kv.gpu_pages(item.kv) for item in inputs]
    lay_out_rows(host, [(item.kv, item.tokens) for item in inputs], gpu_pages, tables)
    if shape.tiered:
        host["round"][0] = kv.next_round()
        for i, item in enumerate(inputs):  # a last block may reach beyond the pages that there are
            host["block_tables"][i, len(item.kv.pages) :] = -1
    if shape.decay is not None:
        _lay_out_budget(host, shape, inputs, places)
    elif shape.width:
        _lay_out_lists(host, inputs)
    if shape.groups:
        _lay_out_groups(host, [item.kv for item in inputs])
    if shape.judged:
        lay_out_verdicts(host, [item.drafted for item in inputs if item.drafted is not None])
        rows = host["judged_rows"].reshape(shape.sequences, shape.queries)
        starts = host["query_starts"]
        # Rows behind a sequence's last one are not looked at: any will do.
        rows[:] = np.minimum(starts[:-1, None] + np.arange(shape.queries), max(0, int(starts[-1]) - 1))
    buffers.inputs.send()


def lay_out_rows(
    host: dict[str, np.ndarray],
    items: list[tuple[SequenceKV, list[int]]],
    gpu_pages: list[np.ndarray] | None = None,
    tables: list[np.ndarray] | None = None,
) -> None:
    """Sequences and the tokens that each is to run next, into arrays of `rows_layout`; rows behind them are empty.

    gpu_pages: where in the KV tensors the pages of each sequence lie; None: at their numbers. tables: the block tables;
    None: `gpu_pages`.
    """
    host["slots"][:] = -1
    host["lengths"][:] = 0
    if "kept_slots" in host:
        host["kept_slots"][:] = -1
    row = 0
    for i, (kv, tokens) in enumerate(items):
        at = np.arange(kv.length, kv.length + len(tokens))
        pages = kv.table() if gpu_pages is None else gpu_pages[i]
        here = slice(row, row + len(tokens))
        host["token_ids"][here], host["positions"][here] = tokens, at
        host["slots"][here] = pages[at // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + at % PAGE_SIZE
        host["block_tables"][i, : len(pages)] = pages if tables is None else tables[i]
        if "kept_slots" in host:
            numbers = kv.table()
            host["kept_slots"][here] = numbers[at // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + at % PAGE_SIZE
            host["kept_tables"][i, : len(numbers)] = numbers
        host["lengths"][i] = kv.length + len(tokens)
        host["query_starts"][i] = row
        row += len(tokens)
    host["query_starts"][len(items) :] = row


def _lay_out_lists(host: dict[str, np.ndarray], inputs: list[SequenceInput]) -> None:
    host["counts"][:] = 0
    for i, item in enumerate(inputs):
        assert item.read is not None and item.read.lists is not None
        present = [entry for entry in item.read.lists if entry is not None]
        for at, (blocks, count) in enumerate(present):
            host["lists"][at, i, :, : blocks.shape[1]] = blocks
            host["counts"][at, i] = count


def _lay_out_budget(
    host: dict[str, np.ndarray], shape: StepShape, inputs: list[SequenceInput], places: list[int]
) -> None:
    host["blocks"][:], host["room"][:], host["places"][:] = 0, 0, -1
    words = host["words"].view(np.uint64)
    for i, (item, place) in enumerate(zip(inputs, places, strict=True)):
        assert item.read is not None and item.read.budget is not None
        budget = item.read.budget
        words[i, :, : budget.words.shape[1]] = budget.words
        host["first"][i], host["last"][i], host["places"][i] = budget.first, budget.last, place
        host["blocks"][i] = -(-(item.kv.length + len(item.tokens)) // shape.block_size)
        host["room"][i] = max(0, budget.room)
        if not i:  # one plan: the same for all
            host["importance"][:] = budget.memory.importance


def _lay_out_groups(host: dict[str, np.ndarray], sequences: list[SequenceKV]) -> None:
    host["group_counts"][:] = 0
    for i, sequence in enumerate(sequences):
        host["group_tables"][i, : len(sequence.groups)] = sequence.groups
        host["group_counts"][i] = len(sequence.groups)
