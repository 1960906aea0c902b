"""One pass of a model over several sequences: its shape, its buffers, what goes into them, and the launches.

Lengths, tables, lists and what is to be judged are tensors that the launches read, so one CUDA graph serves all passes
of a shape. The same launches run without a graph, on a CPU too, in buffers of the exact size.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.decoder import Attend, Decoder
from engine.inputs import SequenceInput
from engine.judging import judge, lay_out_verdicts, verdict_layout
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
from engine.paged_kv import PAGE_SIZE, PagedKV, SequenceKV
from engine.staging import Layout, Staging
from engine.tier_reads import Fetched, fetch_listed
from kernels.backends import Backend, default_backend
from kernels.flashinfer_attention import Planned
from kernels.paged_attention import BlockLists, GroupMeans, Tuning, pinned_tuning
from kernels.shared_budget import WORD, remember_weights, score_blocks
from kernels.shared_top_k import select_top_k_over_all


@dataclass(frozen=True)
class PassShape:
    """All that the launches of a pass are specialised for.

    sequences: how many there is room for. rows: of all their tokens together. queries: of one sequence, at most. pages:
    of one sequence, at most. block_size: tokens of a block, where blocks are read or weighed. emitting: queries of
    each sequence that give their weights on blocks. width: blocks of a list, at most; 0: all layers are dense. groups:
    group means of a sequence, at most; 0: none stand in. read_weights: whether listed blocks give their weights.
    dense_layers: the layers without lists. decay: of what is remembered, where a budget is shared out in the pass. judged: whether
    the pass ends in verdicts, each sequence having drafted all its tokens but the first. support: entries of a
    distribution that they were drawn from, at most; 0: all are greedy. pinned: whether splits of attention are
    independent of the batch. kept: whether some layers' pages lie at their own numbers, others' where the KV put them.
    fetches: whether block tables name pages of the backing store, and listed ones are fetched first.
    """

    sequences: int
    rows: int
    queries: int
    pages: int
    block_size: int = 0
    emitting: int = 0
    width: int = 0
    groups: int = 0
    read_weights: bool = False
    dense_layers: tuple[int, ...] = ()
    decay: float | None = None
    judged: bool = False
    support: int = 0
    pinned: bool = False
    kept: bool = False
    fetches: bool = False

    @property
    def blocks(self) -> int:
        """How many blocks a sequence has, at most."""
        return -(-self.pages * PAGE_SIZE // self.block_size)


@dataclass
class BudgetBuffers:
    """What decides over the blocks of a shared budget; rows are (sparse layer, KV head).

    memory: [places, rows, blocks] float32, of many sequences. indices: [sequences] int32, where each sequence's is; -1:
    no sequence. bitmaps: [sequences, rows, words] int64. importance: [rows] float32. first, last, blocks, room:
    [sequences] int32.
    """

    memory: Tensor
    indices: Tensor
    bitmaps: Tensor
    importance: Tensor
    first: Tensor
    last: Tensor
    blocks: Tensor
    room: Tensor


@dataclass
class PassBuffers:
    """The inputs of one shape on the device, all parts of `inputs`, and what a pass leaves.

    results: what leaves by one copy: accepted, following [sequences] int32 of judged passes; blocks_read [sequences]
    int32 of shared budgets; of fetching passes listed, fetched, overflow [1] and missed [sequences] int32. token_ids,
    positions, slots: [rows] int64, slots -1 where no token is. query_starts: [sequences + 1] int32. lengths:
    [sequences] int32. block_tables: [sequences, pages] int32. logits_rows: int64, the rows that give logits; in judged
    passes sequences * queries of them; None: all. lists: [sparse layers, sequences, kv_heads, width] int32. counts:
    [sparse layers, sequences, kv_heads] int32. group_tables: [sequences, groups] int32. group_counts: [sequences]
    int32. kept_slots, kept_tables: as slots and block_tables, of the layers that are kept on the GPU. round: [1] int32,
    of the residency tables. logits: [logits rows, vocab]. block_weights: of dense layers that emit. read_weights:
    [sparse layers, sequences, kv_heads, width] float32.
    """

    inputs: Staging
    results: Staging
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    lengths: Tensor
    block_tables: Tensor
    logits_rows: Tensor | None = None
    lists: Tensor | None = None
    counts: Tensor | None = None
    group_tables: Tensor | None = None
    group_counts: Tensor | None = None
    budget: BudgetBuffers | None = None
    verdicts: dict[str, Tensor] = field(default_factory=dict)
    kept_slots: Tensor | None = None
    kept_tables: Tensor | None = None
    round: Tensor | None = None
    logits: Tensor | None = None
    block_weights: BlockWeights | None = None
    read_weights: Tensor | None = None


def rows_layout(sequences: int, rows: int, pages: int, kept: bool = False) -> Layout:
    """Lay out where the tokens of a pass come from and go to; the same for passes and rounds."""
    kept_layout: Layout = {
        "kept_slots": ((rows,), torch.int64),
        "kept_tables": ((sequences, pages), torch.int32),
    }
    return {
        **(kept_layout if kept else {}),
        "token_ids": ((rows,), torch.int64),
        "positions": ((rows,), torch.int64),
        "slots": ((rows,), torch.int64),
        "query_starts": ((sequences + 1,), torch.int32),
        "lengths": ((sequences,), torch.int32),
        "block_tables": ((sequences, pages), torch.int32),
    }


def make_buffers(
    shape: PassShape,
    kv: PagedKV,
    device: torch.device,
    memory: Tensor | None = None,
    logits_rows: int | None = None,
) -> PassBuffers:
    """Make the buffers of a shape, filled as for a pass without sequences.

    memory: [places, rows, blocks] float32, for a shape that shares budgets out. logits_rows: how many rows give logits,
    where the pass is not judged; None: all.
    """
    layouts = {
        "rows": rows_layout(shape.sequences, shape.rows, shape.pages, shape.kept),
        "lists": _lists_layout(shape, kv),
        "groups": _groups_layout(shape),
        "budget": _budget_layout(shape, kv),
        "round": {"round": ((1,), torch.int32)} if shape.fetches else {},
        "logits": _logits_layout(shape, logits_rows),
        "verdicts": verdict_layout(shape.sequences, shape.queries - 1, shape.support) if shape.judged else {},
    }
    inputs = Staging({name: size for layout in layouts.values() for name, size in layout.items()}, device)

    def parts(*names: str) -> dict[str, Any]:
        return {key: inputs.device[key] for name in names for key in layouts[name]}

    buffers = PassBuffers(
        inputs,
        Staging(_results_layout(shape), device),
        **parts("rows", "logits", "lists", "groups", "round"),
        verdicts=parts("verdicts"),
    )
    if shape.decay is not None:
        assert memory is not None
        buffers.budget = BudgetBuffers(memory, **parts("budget"))
        inputs.host["indices"][:] = -1
    lay_out_rows(inputs.host, [])
    inputs.send()
    return buffers


def _lists_layout(shape: PassShape, kv: PagedKV) -> Layout:
    if not shape.width or shape.decay is not None:
        return {}
    heads = kv.num_layers - len(shape.dense_layers), shape.sequences, kv.kv_heads
    return {"lists": ((*heads, shape.width), torch.int32), "counts": (heads, torch.int32)}


def _groups_layout(shape: PassShape) -> Layout:
    if not shape.groups:
        return {}
    return {
        "group_tables": ((shape.sequences, shape.groups), torch.int32),
        "group_counts": ((shape.sequences,), torch.int32),
    }


def _budget_layout(shape: PassShape, kv: PagedKV) -> Layout:
    if shape.decay is None:
        return {}
    rows = (kv.num_layers - len(shape.dense_layers)) * kv.kv_heads
    numbers = dict.fromkeys(("indices", "first", "last", "blocks", "room"), ((shape.sequences,), torch.int32))
    return {
        **numbers,
        "bitmaps": ((shape.sequences, rows, -(-shape.blocks // WORD)), torch.int64),
        "importance": ((rows,), torch.float32),
    }


def _logits_layout(shape: PassShape, logits_rows: int | None) -> Layout:
    rows = shape.sequences * shape.queries if shape.judged else logits_rows
    return {} if rows is None else {"logits_rows": ((rows,), torch.int64)}


def _results_layout(shape: PassShape) -> Layout:
    of_sequence = (shape.sequences,), torch.int32
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if shape.decay is not None:
        layout["blocks_read"] = of_sequence
    if shape.judged:
        layout |= {"accepted": of_sequence, "following": of_sequence}
    if shape.fetches:
        layout |= dict.fromkeys(("listed", "fetched", "overflow"), ((1,), torch.int32))
        layout["missed"] = of_sequence
    return layout


# The launches of a pass.


def heads_of(decoder: Decoder | ModulesDecoder, kv: PagedKV) -> Heads:
    """Return what attention needs to know of a model's heads."""
    return Heads(kv.kv_heads, decoder.heads // kv.kv_heads, kv.k_pages[0].shape[3], decoder.attention_scale)


def run_pass(
    decoder: Decoder | ModulesDecoder,
    kv: PagedKV,
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
        fetched = fetch_listed(kv, *listed, buffers.round, overlap)
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
    heads: Heads,
    kv: PagedKV,
    shape: PassShape,
    buffers: PassBuffers,
    attention: Backend,
    fetched: Fetched | None,
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
        buffers.read_weights = torch.empty(
            buffers.lists.shape, dtype=torch.float32, device=rows.starts.device
        )
        attend.weights = ReadWeights(buffers.read_weights)
    return attend


def _listed_reads(
    heads: Heads,
    rows: Rows,
    kv: PagedKV,
    shape: PassShape,
    buffers: PassBuffers,
    attention: Backend,
    fetched: Fetched | None,
    tuning: Tuning | None,
) -> ListedReads:
    assert buffers.lists is not None and buffers.counts is not None
    means: list[GroupMeans] | None = None
    if shape.groups:
        assert kv.means is not None and buffers.group_tables is not None and buffers.group_counts is not None
        means = kv.means.over(buffers.group_tables, buffers.group_counts)
    lines = None if fetched is None else fetched.slots
    blocks = BlockLists(buffers.lists, buffers.counts, shape.block_size, lines)
    work = plan_listed(heads, rows, PAGE_SIZE, attention, blocks, means, tuning)
    sparse = [layer for layer in range(kv.num_layers) if layer not in shape.dense_layers]
    index = {layer: i for i, layer in enumerate(sparse)}
    return ListedReads(blocks, index, work, means, None if fetched is None else fetched.wait)


def _leave_results(shape: PassShape, buffers: PassBuffers, fetched: Fetched | None) -> None:
    """Leave what the host is to know, and remember the weights that were read."""
    assert buffers.logits is not None
    results, backend = buffers.results.device, default_backend(buffers.token_ids.device)
    if fetched is not None:
        assert buffers.counts is not None
        results["listed"].copy_(buffers.counts.sum())
        results["overflow"].copy_(fetched.refused)
        results["fetched"].copy_(fetched.transfers.counts.sum())
        results["missed"].copy_(fetched.cold)
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
        indices = indices.masked_fill(fetched.refused > 0, -1)
    read = buffers.lists, buffers.counts, buffers.read_weights
    remember_weights(budget.memory, indices, *read, budget.blocks, shape.decay, backend)


# From inputs to buffers.


def lay_out_pass(
    buffers: PassBuffers,
    shape: PassShape,
    inputs: list[SequenceInput],
    indices: list[int],
    kv: PagedKV,
    tables: list[np.ndarray] | None = None,
) -> None:
    """Bring the inputs of a pass to the device.

    indices: the index of each sequence's memory, where budgets are shared out. tables: block tables, where they do not
    name where the pages lie in the KV's tensors.
    """
    buffers.inputs.begin()
    host = buffers.inputs.host
    gpu_pages = [kv.frames(item.kv) for item in inputs]
    lay_out_rows(host, [(item.kv, item.tokens) for item in inputs], gpu_pages, tables)
    if shape.fetches:
        host["round"][0] = kv.next_round()
        for i, item in enumerate(inputs):  # a last block may reach beyond the pages that there are
            host["block_tables"][i, len(item.kv.pages) :] = -1
    if shape.decay is not None:
        _lay_out_budget(host, shape, inputs, indices)
    elif shape.width:
        _lay_out_lists(host, inputs)
    if shape.groups:
        _lay_out_groups(host, [item.kv for item in inputs])
    if shape.judged:
        lay_out_verdicts(host, [item.drafted for item in inputs if item.drafted is not None])
        rows = host["logits_rows"].reshape(shape.sequences, shape.queries)
        starts = host["query_starts"]
        # Rows behind a sequence's last one are not looked at: any will do.
        rows[:] = np.minimum(starts[:-1, None] + np.arange(shape.queries), max(0, int(starts[-1]) - 1))
    elif "logits_rows" in host:
        host["logits_rows"][:] = logits_rows_of(inputs)
    buffers.inputs.send()


def logits_rows_of(inputs: list[SequenceInput]) -> np.ndarray:
    """Return the rows of a pass that give logits, int64 [rows], in the order of the inputs."""
    ends = np.cumsum([len(item.tokens) for item in inputs])
    counts = {"none": 0, "last": 1}
    rows = [
        np.arange(end - counts.get(item.logits, len(item.tokens)), end)
        for item, end in zip(inputs, ends, strict=True)
    ]
    return np.concatenate(rows).astype(np.int64)


def lay_out_rows(
    host: dict[str, np.ndarray],
    items: list[tuple[SequenceKV, list[int]]],
    gpu_pages: list[np.ndarray] | None = None,
    tables: list[np.ndarray] | None = None,
) -> None:
    """Write sequences and the tokens that each is to run next into arrays of `rows_layout`; rows behind are empty.

    gpu_pages: where the pages of each sequence lie in the KV's tensors; None: at their numbers. tables: the block
    tables; None: `gpu_pages`.
    """
    for name in ("slots", "kept_slots"):
        if name in host:
            host[name][:] = -1
    host["token_ids"][:] = 0
    host["lengths"][:] = 0
    row = 0
    for i, (kv, tokens) in enumerate(items):
        at = np.arange(kv.length, kv.length + len(tokens))
        pages = kv.table() if gpu_pages is None else gpu_pages[i]
        here = slice(row, row + len(tokens))
        host["token_ids"][here], host["positions"][here] = tokens, at
        host["slots"][here] = _slots_of(pages, at)
        host["block_tables"][i, : len(pages)] = pages if tables is None else tables[i]
        if "kept_slots" in host:
            host["kept_slots"][here] = _slots_of(kv.table(), at)
            host["kept_tables"][i, : len(kv.pages)] = kv.table()
        host["lengths"][i] = kv.length + len(tokens)
        host["query_starts"][i] = row
        row += len(tokens)
    host["query_starts"][len(items) :] = row


def _slots_of(pages: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return where positions lie in pages, int64: page * PAGE_SIZE + offset."""
    slots: np.ndarray = pages[positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
    return slots


def _lay_out_lists(host: dict[str, np.ndarray], inputs: list[SequenceInput]) -> None:
    host["counts"][:] = 0
    for i, item in enumerate(inputs):
        assert item.read is not None and item.read.lists is not None
        present = [entry for entry in item.read.lists if entry is not None]
        for at, (blocks, count) in enumerate(present):
            host["lists"][at, i, :, : blocks.shape[1]] = blocks
            host["counts"][at, i] = count


def _lay_out_budget(
    host: dict[str, np.ndarray], shape: PassShape, inputs: list[SequenceInput], indices: list[int]
) -> None:
    host["blocks"][:], host["room"][:], host["indices"][:] = 0, 0, -1
    words = host["bitmaps"].view(np.uint64)
    for i, (item, index) in enumerate(zip(inputs, indices, strict=True)):
        assert item.read is not None and item.read.budget is not None
        budget = item.read.budget
        words[i, :, : budget.bitmap.shape[1]] = budget.bitmap
        host["first"][i], host["last"][i], host["indices"][i] = budget.first, budget.last, index
        host["blocks"][i] = -(-(item.kv.length + len(item.tokens)) // shape.block_size)
        host["room"][i] = max(0, budget.room)
        if not i:  # the same for all inputs of a pass
            host["importance"][:] = budget.memory.importance


def _lay_out_groups(host: dict[str, np.ndarray], sequences: list[SequenceKV]) -> None:
    host["group_counts"][:] = 0
    for i, sequence in enumerate(sequences):
        host["group_tables"][i, : len(sequence.groups)] = sequence.groups
        host["group_counts"][i] = len(sequence.groups)
