"""Running a model on a GPU: short steps as CUDA graphs, one a shape; prompts eagerly, in large chunks.

A step's tensors are copied into buffers of fixed shape and the graph of that shape is replayed; nothing else
happens between kernels. Lengths, tables and lists are read on the device, so one graph serves all steps of a shape.
Reads that are chosen layer by layer while the pass runs (the just-in-time rivals) go through ModelRunner.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from engine.batch import SequenceInput, SparseRead
from engine.decoder import Decoder, run_decoder
from engine.draft_rounds import (
    RoundBuffers,
    RoundOutput,
    RoundRequest,
    RoundSettings,
    RoundShape,
    make_round_buffers,
    run_round,
)
from engine.paged_kv import PAGE_SIZE, PagedKV, SequenceKV, pages_for
from engine.runner import ModelRunner, Runner, SequenceOutput
from kernels.backends import default_backend
from kernels.block_weights import paged_attention_with_block_weights
from kernels.paged_attention import (
    MAX_ROWS,
    BlockLists,
    GroupMeans,
    paged_attention,
    paged_attention_with_read_weights,
    plan_work,
)
from kernels.shared_budget import WORD, remember_weights, score_blocks
from kernels.shared_top_k import select_top_k_over_all

STEP_QUERIES = 16  # a sequence with more tokens to run, and more than γ + 1, is reading a prompt
ROUND_QUERIES = 2  # tokens that a round begins with: one, or two where the target's own was not foreseen
MAX_OVERHANG = 2 * 65  # tokens beyond the context: two rounds of the largest γ that is served


@dataclass(frozen=True)
class StepShape:
    """All that a graph's kernels are specialised for.

    sequences, queries: room for so many sequences of so many tokens. pages: of a sequence, at most. emitting: queries
    of each sequence that give weights over blocks of `block_size`. width: blocks of a list, at most; 0: dense.
    groups: group means of a sequence, at most; 0: none stand in. dense_layers: that have no lists.
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

    @property
    def blocks(self) -> int:
        """That a sequence has at most."""
        return self.pages * PAGE_SIZE // self.block_size


@dataclass
class BudgetBuffers:
    """What decides over the blocks of a shared budget; rows are (sparse layer, KV head)."""

    words: Tensor  # [sequences, rows, words] int64
    memory: Tensor  # [sequences, rows, blocks] float32
    importance: Tensor  # [rows] float32
    first: Tensor  # [sequences] int32
    last: Tensor  # [sequences] int32
    blocks: Tensor  # [sequences] int32
    room: Tensor  # [sequences] int32


@dataclass
class StepBuffers:
    """Inputs of one shape on the device, and the outputs that its graph leaves."""

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64, -1 where no sequence is
    query_starts: Tensor  # [sequences + 1] int32
    kv_lengths: Tensor  # [sequences] int32
    block_tables: Tensor  # [sequences, pages] int32
    lists: Tensor | None = None  # [sparse layers, sequences, kv_heads, width] int32
    counts: Tensor | None = None  # [sparse layers, sequences, kv_heads] int32
    budget: BudgetBuffers | None = None
    group_tables: Tensor | None = None  # [sequences, groups] int32
    group_counts: Tensor | None = None  # [sequences] int32
    logits: Tensor | None = None  # [rows, vocab]
    weights: list[Tensor | None] = field(default_factory=list)  # a layer each: emitted, or of what was read


def make_buffers(shape: StepShape, layers: int, kv_heads: int, device: torch.device) -> StepBuffers:
    rows = shape.sequences * shape.queries

    def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device)

    buffers = StepBuffers(
        token_ids=zeros(rows, dtype=torch.int64),
        positions=zeros(rows, dtype=torch.int64),
        slots=zeros(rows, dtype=torch.int64) - 1,
        query_starts=zeros(shape.sequences + 1),
        kv_lengths=zeros(shape.sequences),
        block_tables=zeros(shape.sequences, shape.pages),
    )
    sparse = layers - len(shape.dense_layers)
    if shape.decay is not None:
        rows, blocks = sparse * kv_heads, shape.blocks
        buffers.budget = BudgetBuffers(
            words=zeros(shape.sequences, rows, -(-blocks // WORD), dtype=torch.int64),
            memory=zeros(shape.sequences, rows, blocks, dtype=torch.float32),
            importance=zeros(rows, dtype=torch.float32),
            first=zeros(shape.sequences),
            last=zeros(shape.sequences),
            blocks=zeros(shape.sequences),
            room=zeros(shape.sequences),
        )
    elif shape.width:
        buffers.lists = zeros(sparse, shape.sequences, kv_heads, shape.width)
        buffers.counts = zeros(sparse, shape.sequences, kv_heads)
    if shape.groups:
        buffers.group_tables = zeros(shape.sequences, shape.groups)
        buffers.group_counts = zeros(shape.sequences)
    return buffers


def run_step(decoder: Decoder, kv: PagedKV, shape: StepShape, buffers: StepBuffers) -> None:
    """One pass over what the buffers hold: launches only, the same for all steps of a shape."""
    device = buffers.token_ids.device
    backend = default_backend(device)
    group, dim = decoder.heads // decoder.kv_heads, kv.k_pages[0].shape[3]
    scale = dim**-0.5
    sparse = [layer for layer in range(len(decoder.layers)) if layer not in shape.dense_layers]
    place = {layer: i for i, layer in enumerate(sparse)} if shape.width else {}
    tables, lengths = buffers.block_tables, buffers.kv_lengths
    if buffers.budget is not None:
        _share_out(buffers, buffers.budget, decoder.kv_heads)
    common = (decoder.kv_heads, group, dim, shape.queries, tables, lengths, PAGE_SIZE)
    dense_work = sparse_work = None
    means: list[GroupMeans] | None = None
    if shape.groups:
        assert kv.means is not None and buffers.group_tables is not None and buffers.group_counts is not None
        means = kv.means.over(buffers.group_tables, buffers.group_counts)
    if backend == "triton":
        dense_work = plan_work(*common) if len(place) < len(decoder.layers) else None
        if shape.width:
            assert buffers.lists is not None and buffers.counts is not None
            blocks = BlockLists(buffers.lists, buffers.counts, shape.block_size)
            sparse_work = plan_work(*common, blocks, None if means is None else means[0])
    buffers.weights = [None] * len(decoder.layers)
    read_weights: Tensor | None = None
    if buffers.budget is not None:
        assert buffers.lists is not None
        read_weights = torch.empty(buffers.lists.shape, dtype=torch.float32, device=device)

    def attend(layer: int, queries: Tensor) -> Tensor:
        arguments = (
            queries,
            kv.k_pages[layer],
            kv.v_pages[layer],
            tables,
            lengths,
            buffers.query_starts,
            scale,
        )
        at = place.get(layer)
        if at is None:
            if not shape.emitting:
                return paged_attention(
                    *arguments, backend=backend, max_queries=shape.queries, work=dense_work
                )
            out, buffers.weights[layer] = paged_attention_with_block_weights(
                *arguments,
                shape.block_size,
                shape.emitting,
                backend=backend,
                max_queries=shape.queries,
                width=shape.blocks,
                work=dense_work,
            )
            return out
        assert buffers.lists is not None and buffers.counts is not None
        blocks = BlockLists(buffers.lists[at], buffers.counts[at], shape.block_size)
        work = None if sparse_work is None else sparse_work.layer(at)
        stand_ins = None if means is None else means[layer]
        if not shape.read_weights:
            return paged_attention(*arguments, blocks, stand_ins, backend, shape.queries, work)
        out, buffers.weights[layer] = paged_attention_with_read_weights(
            *arguments,
            blocks,
            stand_ins,
            backend,
            shape.queries,
            work,
            None if read_weights is None else read_weights[at],
        )
        return out

    logits = run_decoder(
        decoder,
        buffers.token_ids,
        buffers.positions,
        buffers.slots,
        kv.k_pages,
        kv.v_pages,
        attend,
        backend,
    )
    buffers.logits = logits
    if buffers.budget is not None:
        assert shape.decay is not None
        assert buffers.lists is not None and buffers.counts is not None and read_weights is not None
        remember_weights(
            buffers.budget.memory,
            buffers.lists,
            buffers.counts,
            read_weights,
            buffers.budget.blocks,
            shape.decay,
            backend,
        )


def _share_out(buffers: StepBuffers, budget: BudgetBuffers, kv_heads: int) -> None:
    """Lists from what is read anyway and from the highest remembered weights."""
    backend = default_backend(budget.memory.device)
    forced, scores = score_blocks(
        budget.words,
        budget.memory,
        budget.importance,
        budget.first,
        budget.last,
        budget.blocks,
        backend,
    )
    buffers.lists, buffers.counts = select_top_k_over_all(scores, budget.room, forced, backend, kv_heads)


Buffers = TypeVar("Buffers")


@dataclass
class _Captured(Generic[Buffers]):
    buffers: Buffers
    graph: torch.cuda.CUDAGraph | None  # None: run eagerly


class GraphRunner(Runner):
    """A Runner over the fused decoder. `fallback` runs what is chosen while the pass runs.

    step_queries: tokens of a sequence that most steps have, γ + 1 in a target.
    """

    shares_budgets = True
    drafts_rounds = True

    def __init__(
        self,
        decoder: Decoder,
        fallback: ModelRunner,
        max_context: int,
        enforce_eager: bool = False,
        step_queries: int = 5,
    ) -> None:
        self.decoder = decoder
        self.fallback = fallback
        self.kv = fallback.kv
        self.vocab_size = fallback.vocab_size
        self.device = fallback.device
        self.step_queries = step_queries
        self.max_queries = max(step_queries, STEP_QUERIES)
        self.max_pages = pages_for(max_context + MAX_OVERHANG)
        self.enforce_eager = enforce_eager or self.device.type != "cuda"
        self._steps: dict[StepShape, _Captured[StepBuffers]] = {}
        self._rounds: dict[RoundShape, _Captured[RoundBuffers]] = {}
        self._round_settings: RoundSettings | None = None
        self._pool = None if self.enforce_eager else torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        outputs: list[SequenceOutput | None] = [None] * len(inputs)
        groups: dict[object, list[int]] = {}
        for i, item in enumerate(inputs):
            groups.setdefault(self._kind(item), []).append(i)
        for kind, places in groups.items():
            chosen = [inputs[i] for i in places]
            if kind == "fallback":
                results = self.fallback.forward(chosen)
            elif kind == "prompt":
                results = self._read_prompts(chosen)
            else:
                results = self._step(chosen)
            for i, result in zip(places, results, strict=True):
                outputs[i] = result
        return outputs  # type: ignore[return-value]

    def _kind(self, item: SequenceInput) -> object:
        """Inputs of one kind run in one pass."""
        read = item.read
        if read is not None and read.selector is not None:
            return "fallback"
        if len(item.tokens) > self.max_queries:
            return "fallback" if read is not None or item.emitting else "prompt"
        if read is None:
            return (item.block_size, item.emitting) if item.emitting else ()
        if read.budget is not None:
            # One plan serves all: importance is the same for all sequences.
            budget = read.budget
            return ("budget", read.block_size, read.group_means, budget.dense_layers, budget.memory.decay)
        dense = tuple(layer for layer, entry in enumerate(read.lists or []) if entry is None)
        return (read.block_size, read.group_means, read.emit, dense)

    # Steps.

    def _step(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        for item in inputs:
            self.kv.grow(item.kv, item.kv.length + len(item.tokens))
        shape = self._shape(inputs)
        captured = self._step_of(shape)
        self._fill(captured.buffers, shape, inputs)
        if captured.graph is None:
            run_step(self.decoder, self.kv, shape, captured.buffers)
        else:
            captured.graph.replay()
        for item in inputs:
            item.kv.length += len(item.tokens)
        return self._read(captured.buffers, shape, inputs)

    def _step_of(self, shape: StepShape) -> _Captured[StepBuffers]:
        if shape not in self._steps:
            buffers = make_buffers(shape, self.kv.num_layers, self.kv.kv_heads, self.device)
            self._steps[shape] = self._capture(
                buffers, lambda: run_step(self.decoder, self.kv, shape, buffers)
            )
        return self._steps[shape]

    @torch.inference_mode()
    def warm_up(self, reads: list[SparseRead | None], sequences: int) -> None:
        """Capture the steps that these reads take, in batches of up to `sequences`, before the first request."""
        if self.enforce_eager:
            return
        counts = [(read, 1 << i) for read in reads for i in range(_bucket(sequences).bit_length())]
        for read, count in tqdm(counts, desc="capturing CUDA graphs of steps"):
            for queries in (1, self.step_queries) if read is None else (self.step_queries,):
                item = SequenceInput(SequenceKV(), [0] * queries, "all", read)
                self._step_of(self._shape([item] * count))

    def _shape(self, inputs: list[SequenceInput]) -> StepShape:
        first = inputs[0]
        sequences = _bucket(len(inputs))
        longest = max(len(item.tokens) for item in inputs)
        queries = next(n for n in (1, self.step_queries, self.max_queries) if n >= longest)
        read = first.read
        if read is None:
            return StepShape(sequences, queries, self.max_pages, first.block_size, first.emitting)
        groups = 0
        if read.group_means:
            assert self.kv.means is not None
            groups = max(1, self.max_pages * PAGE_SIZE // self.kv.means.group_size)
        if read.budget is not None:
            return StepShape(
                sequences,
                queries,
                self.max_pages,
                read.block_size,
                width=self.max_pages * PAGE_SIZE // read.block_size,
                groups=groups,
                read_weights=True,
                dense_layers=read.budget.dense_layers,
                decay=read.budget.memory.decay,
            )
        lists = [entry for item in inputs for entry in item.read.lists if entry is not None]  # type: ignore[union-attr]
        width = max((entry[0].shape[1] for entry in lists), default=0)
        dense = tuple(layer for layer, entry in enumerate(read.lists or []) if entry is None)
        return StepShape(
            sequences,
            queries,
            self.max_pages,
            read.block_size,
            width=max(16, _bucket(width)),
            groups=groups,
            read_weights=read.emit,
            dense_layers=dense,
        )

    def _capture(self, buffers: Buffers, work: Callable[[], None]) -> _Captured[Buffers]:
        """Raises what the capture raises: there is no quiet way back to eager steps."""
        if self.enforce_eager:
            return _Captured(buffers, None)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels compile and load, cuBLAS takes its workspace
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return _Captured(buffers, graph)

    def _fill(self, buffers: StepBuffers, shape: StepShape, inputs: list[SequenceInput]) -> None:
        rows = layout([(item.kv, item.tokens) for item in inputs], shape)
        _upload_rows(buffers, rows)
        _upload(buffers.kv_lengths, torch.from_numpy(rows.lengths))
        if buffers.budget is not None:
            self._fill_budget(buffers.budget, shape, inputs)
        elif shape.width:
            self._fill_lists(buffers, shape, inputs)
        if shape.groups:
            self._fill_groups(buffers, shape, [item.kv for item in inputs])

    def _fill_lists(self, buffers: StepBuffers, shape: StepShape, inputs: list[SequenceInput]) -> None:
        assert buffers.lists is not None and buffers.counts is not None
        lists = torch.zeros(buffers.lists.shape, dtype=torch.int32)
        counts = torch.zeros(buffers.counts.shape, dtype=torch.int32)
        for i, item in enumerate(inputs):
            assert item.read is not None and item.read.lists is not None
            present = [entry for entry in item.read.lists if entry is not None]
            for at, (blocks, count) in enumerate(present):
                lists[at, i, :, : blocks.shape[1]] = blocks
                counts[at, i] = count
        _upload(buffers.lists, lists)
        _upload(buffers.counts, counts)

    def _fill_budget(self, buffers: BudgetBuffers, shape: StepShape, inputs: list[SequenceInput]) -> None:
        words = np.zeros(buffers.words.shape, np.uint64)
        limits = np.zeros((4, shape.sequences), np.int32)
        for i, item in enumerate(inputs):
            assert item.read is not None and item.read.budget is not None
            budget = item.read.budget
            blocks = -(-(item.kv.length + len(item.tokens)) // shape.block_size)
            words[i, :, : budget.words.shape[1]] = budget.words
            limits[:, i] = budget.first, budget.last, blocks, max(0, budget.room)
            if budget.memory.weights is None:
                budget.memory.weights = torch.zeros_like(buffers.memory[i])
            buffers.memory[i].copy_(budget.memory.weights)
        first = inputs[0].read
        assert first is not None and first.budget is not None
        _upload(buffers.importance, first.budget.memory.importance)
        _upload(buffers.words, torch.from_numpy(words.view(np.int64)))
        for target, source in zip(
            (buffers.first, buffers.last, buffers.blocks, buffers.room), limits, strict=True
        ):
            _upload(target, torch.from_numpy(source))

    def _fill_groups(self, buffers: StepBuffers, shape: StepShape, sequences: list[SequenceKV]) -> None:
        assert buffers.group_tables is not None and buffers.group_counts is not None
        self.kv.extend_group_means(sequences)
        tables = torch.zeros(shape.sequences, shape.groups, dtype=torch.int32)
        counts = torch.zeros(shape.sequences, dtype=torch.int32)
        for i, sequence in enumerate(sequences):
            tables[i, : len(sequence.groups)] = torch.tensor(sequence.groups, dtype=torch.int32)
            counts[i] = len(sequence.groups)
        _upload(buffers.group_tables, tables)
        _upload(buffers.group_counts, counts)

    def _read(
        self, buffers: StepBuffers, shape: StepShape, inputs: list[SequenceInput]
    ) -> list[SequenceOutput]:
        """The buffers are the next step's too: what is asked for is copied out of them."""
        assert buffers.logits is not None
        outputs = [SequenceOutput() for _ in inputs]
        if buffers.budget is not None:
            assert buffers.counts is not None
            blocks_read = buffers.counts.sum((0, 2)).tolist()
            for i, (item, output) in enumerate(zip(inputs, outputs, strict=True)):
                output.blocks_read = blocks_read[i]
                item.read.budget.memory.weights.copy_(buffers.budget.memory[i])  # type: ignore[union-attr]
        row = 0
        for i, (item, output) in enumerate(zip(inputs, outputs, strict=True)):
            first, row = row, row + len(item.tokens)
            if item.logits != "none":
                output.logits = buffers.logits[row - 1 if item.logits == "last" else first : row].float()
                if output.logits.dtype == buffers.logits.dtype:
                    output.logits = output.logits.clone()
            blocks = -(-item.kv.length // shape.block_size) if shape.block_size else 0
            if shape.emitting:
                weights = [w[i, :, :, :blocks] for w in buffers.weights if w is not None]
                output.block_weights = torch.stack(weights)
            elif shape.read_weights and buffers.budget is None:
                output.read_weights = self._spread(buffers, shape, i, blocks)
        return outputs

    def _spread(self, buffers: StepBuffers, shape: StepShape, sequence: int, blocks: int) -> Tensor:
        """What each block got, on the CPU as readers want it: [layers, kv_heads, blocks]"""
        assert buffers.lists is not None and buffers.counts is not None
        layers, heads = self.kv.num_layers, self.kv.kv_heads
        sparse = [layer for layer in range(layers) if layer not in shape.dense_layers]
        weights = torch.stack([w[sequence] for w in buffers.weights if w is not None])
        lists, counts = buffers.lists[:, sequence], buffers.counts[:, sequence]
        listed = torch.arange(shape.width, device=self.device) < counts[..., None]
        spread = torch.zeros(len(sparse), heads, blocks, device=self.device)
        spread.scatter_add_(2, lists.where(listed, 0).long(), weights.where(listed, 0.0))
        out = torch.zeros(layers, heads, blocks)
        out[sparse] = spread.cpu()
        return out

    # Rounds of a draft. (engine.draft_rounds)

    def prepare_rounds(self, settings: RoundSettings) -> None:
        """Say how rounds are drafted, before the first `draft_rounds`."""
        if settings.projection is not None:
            settings = replace(settings, projection=settings.projection.to(self.device))
        self._round_settings = settings
        self._rounds.clear()

    @torch.inference_mode()
    def warm_up_rounds(self, sequences: int) -> None:
        """Capture rounds of up to `sequences`, before the first request."""
        settings = self._round_settings
        if self.enforce_eager or settings is None:
            return
        kinds = itertools.product(
            (False, True), (False, True) if settings.projection is not None else (False,)
        )
        counts = [(*kind, 1 << i) for kind in kinds for i in range(_bucket(sequences).bit_length())]
        for sampled, announces, count in tqdm(counts, desc="capturing CUDA graphs of rounds"):
            self._round_of(RoundShape(count, ROUND_QUERIES, self.max_pages, sampled, announces), settings)

    def _round_of(self, shape: RoundShape, settings: RoundSettings) -> _Captured[RoundBuffers]:
        if shape not in self._rounds:
            buffers = make_round_buffers(shape, settings, self.device)
            self._rounds[shape] = self._capture(
                buffers, lambda: run_round(self.decoder, self.kv, settings, shape, buffers)
            )
        return self._rounds[shape]

    @torch.inference_mode()
    def draft_rounds(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        """A whole round of each, those that announce and those that do not apart. Raises OutOfPages."""
        behind = [item for item in requests if len(item.tokens) > ROUND_QUERIES]
        if behind:  # they catch up first, so that one graph serves all rounds
            self._read_prompts([SequenceInput(item.kv, item.tokens[:-1]) for item in behind])
        requests = [
            replace(item, tokens=item.tokens[-1:]) if len(item.tokens) > ROUND_QUERIES else item
            for item in requests
        ]
        outputs: dict[int, RoundOutput] = {}
        for announces in (False, True):
            places = [i for i, item in enumerate(requests) if (item.announce is not None) == announces]
            if places:
                results = self._draft([requests[i] for i in places], announces)
                outputs.update(zip(places, results, strict=True))
        return [outputs[i] for i in range(len(requests))]

    def _draft(self, requests: list[RoundRequest], announces: bool) -> list[RoundOutput]:
        settings = self._round_settings
        if settings is None:
            raise RuntimeError("draft_rounds needs prepare_rounds first")
        for item in requests:
            self.kv.grow(item.kv, item.kv.length + len(item.tokens) + settings.gamma)
        shape = RoundShape(
            _bucket(len(requests)),
            ROUND_QUERIES,
            self.max_pages,
            any(item.temperature > 0 for item in requests),
            announces,
        )
        captured = self._round_of(shape, settings)
        self._fill_round(captured.buffers, shape, settings, requests)
        if captured.graph is None:
            run_round(self.decoder, self.kv, settings, shape, captured.buffers)
        else:
            captured.graph.replay()
        return self._read_round(captured.buffers, requests)

    def _fill_round(
        self,
        buffers: RoundBuffers,
        shape: RoundShape,
        settings: RoundSettings,
        requests: list[RoundRequest],
    ) -> None:
        rows = layout([(item.kv, item.tokens) for item in requests], shape)
        _upload_rows(buffers, rows)
        _upload(buffers.lengths, torch.from_numpy(rows.lengths))
        heat = np.zeros((2, shape.sequences), np.float32)
        heat[1] = 1
        uniforms = np.zeros((settings.gamma + 1, shape.sequences))
        limits = np.zeros((3, shape.sequences), np.int32)
        for i, item in enumerate(requests):
            heat[:, i] = item.temperature, item.top_p
            uniforms[:, i] = item.uniforms
            if item.announce is not None:
                limits[:, i] = item.announce.first, item.announce.last, max(0, item.announce.count)
        _upload(buffers.temperature, torch.from_numpy(heat[0]))
        _upload(buffers.top_p, torch.from_numpy(heat[1]))
        _upload(buffers.uniforms, torch.from_numpy(uniforms))
        _upload(buffers.limits, torch.from_numpy(limits))
        if buffers.before is not None:
            words = np.zeros(buffers.before.shape, np.uint64)
            for i, item in enumerate(requests):
                if item.announce is not None and item.announce.before is not None:
                    before = item.announce.before
                    words[i, :, : before.shape[1]] = before
            _upload(buffers.before, torch.from_numpy(words.view(np.int64)))

    def _read_round(self, buffers: RoundBuffers, requests: list[RoundRequest]) -> list[RoundOutput]:
        """All results leave the device by one wait."""
        assert buffers.tokens is not None
        results = [buffers.tokens, buffers.ids, buffers.probs, buffers.words]
        tokens, ids, probs, words = _download(results)
        assert tokens is not None
        outputs = []
        for i, item in enumerate(requests):
            drawn = item.temperature > 0
            outputs.append(
                RoundOutput(
                    tokens[:, i].tolist(),
                    ids[:, i] if drawn and ids is not None else None,
                    probs[:, i] if drawn and probs is not None else None,
                    None if words is None or item.announce is None else words[i].view(np.uint64),
                )
            )
        return outputs

    # Prompts.

    def _read_prompts(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        """Chunks of several prompts in one pass, which is large enough to keep the GPU busy without a graph."""
        longest = max(len(item.tokens) for item in inputs)
        tiled = max(longest, MAX_ROWS)  # so that tiles of queries have one size, whatever the chunks
        for item in inputs:
            self.kv.grow(item.kv, item.kv.length + len(item.tokens))
        pages = max(len(item.kv.pages) for item in inputs)
        rows = layout([(item.kv, item.tokens) for item in inputs], StepShape(len(inputs), longest, pages))
        count = int(rows.query_starts[-1])
        wanted = np.zeros(count, bool)
        for item, start, end in zip(inputs, rows.query_starts, rows.query_starts[1:], strict=False):
            wanted[{"none": end, "last": end - 1, "all": start}[item.logits] : end] = True
        tables, lengths, starts, token_ids, positions, slots, kept = (
            torch.from_numpy(array).to(self.device)
            for array in (
                rows.block_tables,
                rows.lengths,
                rows.query_starts,
                rows.token_ids[:count],
                rows.positions[:count],
                rows.slots[:count],
                np.flatnonzero(wanted),
            )
        )
        backend, scale = default_backend(self.device), self.kv.k_pages[0].shape[3] ** -0.5

        def attend(layer: int, queries: Tensor) -> Tensor:
            arguments = (queries, self.kv.k_pages[layer], self.kv.v_pages[layer], tables, lengths, starts)
            return paged_attention(*arguments, scale, backend=backend, max_queries=tiled)

        kv = self.kv.k_pages, self.kv.v_pages
        logits = run_decoder(self.decoder, token_ids, positions, slots, *kv, attend, backend, kept)
        outputs, row = [], 0
        for item in inputs:
            item.kv.length += len(item.tokens)
            taken = {"none": 0, "last": 1, "all": len(item.tokens)}[item.logits]
            outputs.append(SequenceOutput(logits=logits[row : row + taken].float() if taken else None))
            row += taken
        return outputs


@dataclass
class Rows:
    """How the tokens of several sequences lie in buffers of a fixed shape; rows behind them are empty."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_starts: np.ndarray
    lengths: np.ndarray
    block_tables: np.ndarray


def layout(items: list[tuple[SequenceKV, list[int]]], shape: StepShape | RoundShape) -> Rows:
    """Sequences and the tokens that each is to run next."""
    count = shape.sequences * shape.queries
    rows = Rows(
        token_ids=np.zeros(count, np.int64),
        positions=np.zeros(count, np.int64),
        slots=np.full(count, -1, np.int64),
        query_starts=np.zeros(shape.sequences + 1, np.int32),
        lengths=np.zeros(shape.sequences, np.int32),
        block_tables=np.zeros((shape.sequences, shape.pages), np.int32),
    )
    row = 0
    for i, (kv, tokens) in enumerate(items):
        at = np.arange(kv.length, kv.length + len(tokens))
        pages = np.asarray(kv.pages, dtype=np.int64)
        here = slice(row, row + len(tokens))
        rows.token_ids[here], rows.positions[here] = tokens, at
        rows.slots[here] = pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
        rows.block_tables[i, : len(pages)] = pages
        rows.lengths[i] = kv.length + len(tokens)
        row += len(tokens)
        rows.query_starts[i + 1] = row
    rows.query_starts[len(items) + 1 :] = row
    return rows


def _upload_rows(buffers: StepBuffers | RoundBuffers, rows: Rows) -> None:
    for name in ("token_ids", "positions", "slots", "query_starts", "block_tables"):
        _upload(getattr(buffers, name), torch.from_numpy(getattr(rows, name)))


def _download(tensors: list[Tensor | None]) -> list[np.ndarray | None]:
    """To the host through pinned memory, with one wait for all."""
    if all(tensor is None or tensor.device.type == "cpu" for tensor in tensors):
        return [None if tensor is None else tensor.numpy() for tensor in tensors]
    pinned = [
        None
        if tensor is None
        else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        for tensor in tensors
    ]
    torch.cuda.current_stream().synchronize()
    return [None if tensor is None else tensor.numpy() for tensor in pinned]


def _bucket(n: int) -> int:
    """The power of two at or above n."""
    return 1 << max(0, n - 1).bit_length()


def _upload(target: Tensor, source: Tensor) -> None:
    """Copy to the device without waiting for it; CUDA takes pageable memory in before the call returns."""
    target.copy_(source, non_blocking=True)
