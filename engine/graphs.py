"""Running a model on a GPU: short steps as CUDA graphs, one a shape; prompts eagerly, in large chunks.

A step's tensors are copied into buffers of fixed shape and the graph of that shape is replayed; nothing else
happens between kernels. Lengths, tables and lists are read on the device, so one graph serves all steps of a shape.
FlashInfer may attend in prompts: it is planned on the host before each pass.
Reads that are chosen layer by layer while the pass runs (the just-in-time rivals) go through ModelRunner.
"""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from engine.attention_backends import check_attention_backend
from engine.batch import ReadMemory, SequenceInput, SparseRead
from engine.decoder import Decoder, run_decoder
from engine.draft_rounds import (
    RoundBuffers,
    RoundOutput,
    RoundRequest,
    RoundSettings,
    RoundShape,
    blocks_of,
    bring_kept,
    lay_out_round,
    make_round_buffers,
    read_round,
    run_round,
    take_kept,
)
from engine.judging import Drafted, support_of
from engine.kv.pages import PAGE_SIZE, SequenceKV, pages_for
from engine.runner import ModelRunner, Runner, SequenceOutput
from engine.sampling import Sampling
from engine.steps import (
    StepBuffers,
    StepShape,
    lay_out_rows,
    lay_out_step,
    make_buffers,
    plan_rows,
    rows_layout,
    run_step,
)
from kernels.backends import AttentionBackend, Backend, default_backend, power_of_two
from kernels.flashinfer_attention import Planned, check_flashinfer, make_planned, make_workspace
from kernels.flashinfer_attention import run as run_flashinfer
from kernels.paged_attention import MAX_ROWS, Work, paged_attention, pinned_tuning, plan_work

STEP_QUERIES = 16  # a sequence with more tokens to run, and more than γ + 1, is reading a prompt
ROUND_QUERIES = 2  # tokens that a round begins with: one, or two where the target's own was not foreseen
SUPPORT = 64  # entries of a drafted token's distribution that graphs are made for; more take another graph
PINNED_SEQUENCES = 8  # of every step of a deterministic runner
PINNED_ROWS = 512  # of every pass over a prompt there
MEMORIES = 64  # of sequences that share budgets out, unless keep_memories says otherwise
MAX_OVERHANG = 2 * 65  # tokens beyond the context: two rounds of the largest γ that is served


Buffers = TypeVar("Buffers")


@dataclass
class _Captured(Generic[Buffers]):
    buffers: Buffers
    graph: torch.cuda.CUDAGraph | None  # None: run eagerly


class GraphRunner(Runner):
    """A Runner over the fused decoder. `fallback` runs what is chosen while the pass runs.

    step_queries: tokens of a sequence that most steps have, γ + 1 in a target. deterministic: what a sequence gives
    depends on its own tokens only, not on what runs beside it nor on how its rounds fell: every step has one shape,
    prompts are read PINNED_ROWS tokens at a time, and splits of attention are pinned. Some matrix products round
    otherwise in a step than in a prompt.

    attention_backend: None: the device's. "flashinfer": FlashInfer attends in prompts, Triton in steps and rounds.
    "torch" on a GPU needs enforce_eager.

    Raises ValueError, NotImplementedError or RuntimeError for an attention backend that cannot attend here.
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
        deterministic: bool = False,
        attention_backend: AttentionBackend | None = None,
    ) -> None:
        self.decoder = decoder
        self.fallback = fallback
        self.kv = fallback.kv
        self.vocab_size = fallback.vocab_size
        self.device = fallback.device
        self.step_queries = step_queries
        self.deterministic = deterministic
        self.max_queries = max(step_queries, STEP_QUERIES)
        self.max_pages = pages_for(max_context + MAX_OVERHANG)
        self.enforce_eager = enforce_eager or self.device.type != "cuda"
        self._memories: Tensor | None = None  # [places, rows, blocks] float32
        self.keep_memories(MEMORIES)
        self._steps: dict[StepShape, _Captured[StepBuffers]] = {}
        self._staged: dict[StepShape, StepBuffers] = {}
        self._rounds: dict[RoundShape, _Captured[RoundBuffers]] = {}
        self._round_settings: RoundSettings | None = None
        self._kept: Tensor | None = None  # RoundBuffers.kept of all shapes, which never run at the same time
        self._pool = None if self.enforce_eager else torch.cuda.graph_pool_handle()
        if attention_backend is not None:
            check_attention_backend(attention_backend, self.device.type, deterministic, self.enforce_eager)
        self._flashinfer: Planned | None = None  # attends in prompts, if it was chosen
        self._attention: Backend = default_backend(self.device)
        if attention_backend == "flashinfer":
            self._flashinfer = self._open_flashinfer()
        elif attention_backend is not None:
            self._attention = attention_backend

    def _open_flashinfer(self) -> Planned:
        pages = self.kv.k_pages[0]
        check_flashinfer(pages.shape[3], pages.dtype, self.device)
        planned = make_planned(make_workspace(self.device))
        # A prompt of one token: what FlashInfer compiles for this model, and what it lacks for that, shows now.
        one = {
            "block_tables": np.zeros((1, 1), np.int32),
            "lengths": np.ones(1, np.int32),
            "query_starts": np.arange(2, dtype=np.int32),
        }
        plan_rows(planned, one, self.decoder, self.kv)
        return planned

    @torch.inference_mode()
    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        outputs: list[SequenceOutput | None] = [None] * len(inputs)
        self.kv.begin_pass([(item.kv, len(item.tokens)) for item in inputs])
        groups: dict[object, list[int]] = {}
        for i, item in enumerate(inputs):
            groups.setdefault(self._kind(item), []).append(i)
        for kind, places in groups.items():
            chosen = [inputs[i] for i in places]
            if kind == "fallback":
                results = self.fallback.forward(chosen, begun=True)
            elif self.deterministic:
                read = self._read_pinned if kind == "prompt" else self._steps_of_one_shape
                results = read(chosen)
            elif kind == "prompt":
                results = self._read_prompts(chosen)
            else:
                results = self._step(chosen)
            for i, result in zip(places, results, strict=True):
                outputs[i] = result
        return outputs  # type: ignore[return-value]

    def _steps_of_one_shape(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        parts = range(0, len(inputs), PINNED_SEQUENCES)
        return [output for i in parts for output in self._step(inputs[i : i + PINNED_SEQUENCES])]

    def _kind(self, item: SequenceInput) -> object:
        """Inputs of one kind run in one pass."""
        read, judged = item.read, item.drafted is not None
        if read is not None and read.selector is not None:
            return "fallback"
        # A prompt's last part may be short or long, by what else is read: here it must make no difference.
        prompt = self.deterministic and not judged and not item.emitting and read is None
        if len(item.tokens) > self.max_queries or prompt:
            return "fallback" if read is not None or item.emitting else "prompt"
        if read is None:
            return (item.block_size, item.emitting) if item.emitting else (judged,)
        if read.budget is not None:
            # One plan serves all: importance is the same for all sequences.
            budget = read.budget
            kind = read.block_size, read.group_means, budget.dense_layers, budget.memory.decay
            return ("budget", judged, *kind)
        dense = tuple(layer for layer, entry in enumerate(read.lists or []) if entry is None)
        return (judged, read.block_size, read.group_means, read.emit, dense)

    # Steps.

    def _step(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        if not all(self.kv.is_resident(item.kv) for item in inputs):
            return self._step_over_tiers(inputs)
        shape = self._shape(inputs)
        captured = self._step_of(shape)
        self._lay_out(captured.buffers, shape, inputs)
        self._run(captured, shape)
        return self._read(captured.buffers, shape, inputs, _fetch(captured.buffers))

    def _run(self, captured: _Captured[StepBuffers], shape: StepShape) -> None:
        if captured.graph is None:
            run_step(self.decoder, self.kv, shape, captured.buffers, self._attention)
        else:
            captured.graph.replay()

    def _lay_out(
        self,
        buffers: StepBuffers,
        shape: StepShape,
        inputs: list[SequenceInput],
        tables: list[np.ndarray] | None = None,
    ) -> None:
        if shape.groups:
            self.kv.extend_group_means([item.kv for item in inputs])
        places = [
            self._place_of(item.read.budget.memory) for item in inputs if item.read and item.read.budget
        ]
        lay_out_step(buffers, shape, inputs, places, self.kv, tables)

    # Steps over KV that has partly left the GPU.

    def _step_over_tiers(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        """By fetching what is listed, at once if it fits, else in halves; or by bringing whole sequences together."""
        shape = self._shape(inputs)
        if shape.width > 0 and self.kv.can_fetch(shape.dense_layers, shape.block_size):
            outputs = self._step_fetching(replace(shape, tiered=True), inputs)
            if outputs is not None:
                return outputs
            if len(inputs) > 1:
                half = len(inputs) // 2
                return self._step(inputs[:half]) + self._step(inputs[half:])
        return [
            output
            for part in self._parts_to_stage(inputs)
            for output in self._step_staged(self._shape(part), part)
        ]

    def _step_fetching(self, shape: StepShape, inputs: list[SequenceInput]) -> list[SequenceOutput] | None:
        """None if the GPU has no room for all that is listed: then nothing was done that another step does not redo."""
        captured = self._step_of(shape)
        self._lay_out(captured.buffers, shape, inputs, [item.kv.table() for item in inputs])
        self._run(captured, shape)
        results = _fetch(captured.buffers)
        if not self.kv.count_fetched(results, shape.block_size // PAGE_SIZE):
            return None
        return self._read(captured.buffers, shape, inputs, results)

    def _step_staged(self, shape: StepShape, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        """Without a graph: what comes from where is looked up as the layers run."""
        if shape not in self._staged:
            memory = None if shape.decay is None else self._memory_of(shape)
            of_model = self.kv.num_layers, self.kv.kv_heads, self.device
            self._staged[shape] = make_buffers(shape, *of_model, memory)
        buffers = self._staged[shape]
        staged = self.kv.stage([item.kv for item in inputs])
        assert staged is not None
        self._lay_out(buffers, shape, inputs, staged.tables)
        run_step(self.decoder, self.kv, shape, buffers, self._attention, staged.layer)
        outputs = self._read(buffers, shape, inputs, _fetch(buffers))
        for output, tokens in zip(outputs, staged.account(), strict=True):
            output.tokens_fetched = tokens
        return outputs

    def _parts_to_stage(self, inputs: list[SequenceInput]) -> list[list[SequenceInput]]:
        """Neighbours whose pages fit into the staging buffers together."""
        parts = self.kv.staging_parts([item.kv for item in inputs])
        return [[inputs[i] for i in part] for part in parts]

    def _step_of(self, shape: StepShape) -> _Captured[StepBuffers]:
        if shape not in self._steps:
            memory = None if shape.decay is None else self._memory_of(shape)
            buffers = make_buffers(shape, self.kv.num_layers, self.kv.kv_heads, self.device, memory)
            self._steps[shape] = self._capture(
                buffers, lambda: run_step(self.decoder, self.kv, shape, buffers, self._attention)
            )
        return self._steps[shape]

    @torch.inference_mode()
    def warm_up(self, reads: list[SparseRead | None], sequences: int) -> None:
        """Capture the steps that these reads take, greedy and sampled, in batches of up to `sequences`."""
        if self.enforce_eager:
            return
        kinds = itertools.product(reads, (Sampling(0.0), Sampling(1.0)))
        counts = [(*kind, 1 << i) for kind in kinds for i in range(power_of_two(sequences).bit_length())]
        for read, sampling, count in tqdm(counts, desc="capturing CUDA graphs of steps"):
            for queries in (1, self.step_queries) if read is None else (self.step_queries,):
                drafted = Drafted([0] * (queries - 1), [], sampling, 0)
                item = SequenceInput(SequenceKV(), [0] * queries, "all", read, drafted=drafted)
                shape = self._shape([item] * count)
                self._step_of(shape)
                if shape.width > 0 and self.kv.can_fetch(shape.dense_layers, shape.block_size):
                    self._step_of(replace(shape, tiered=True))

    # What is remembered of sequences, each at its place.

    def keep_memories(self, sequences: int) -> None:
        """Have room for so many sequences; to be called before the first step that shares a budget out."""
        if self._memories is not None:
            raise RuntimeError("keep_memories comes before the first step that shares a budget out")
        self._free_places = list(range(sequences - 1, -1, -1))

    def _memory_of(self, shape: StepShape) -> Tensor:
        if self._memories is None:
            rows = (self.kv.num_layers - len(shape.dense_layers)) * self.kv.kv_heads
            self._memories = torch.zeros(len(self._free_places), rows, shape.blocks, device=self.device)
        return self._memories

    def _place_of(self, memory: ReadMemory) -> int:
        """Given with the first step, taken back when the sequence's memory is dropped."""
        if memory.place is None:
            assert self._memories is not None
            if not self._free_places:
                raise RuntimeError(f"{len(self._memories)} sequences share budgets out: keep more memories")
            memory.place = self._free_places.pop()
            self._memories[memory.place].zero_()
            weakref.finalize(memory, self._free_places.append, memory.place)
        return memory.place

    def _shape(self, inputs: list[SequenceInput]) -> StepShape:
        first = inputs[0]
        longest = max(len(item.tokens) for item in inputs)
        sizes = (1, self.step_queries, self.max_queries)[self.deterministic :]
        shape = StepShape(
            sequences=PINNED_SEQUENCES if self.deterministic else power_of_two(len(inputs)),
            queries=next(n for n in sizes if n >= longest),
            pages=self.max_pages,
            pinned=self.deterministic,
            apart=bool(self.kv.kept_layers),
        )
        if first.emitting:
            return replace(shape, block_size=first.block_size, emitting=first.emitting)
        if first.drafted is not None:
            support = support_of([item.drafted for item in inputs if item.drafted is not None])
            shape = replace(shape, judged=True, support=support and max(SUPPORT, power_of_two(support)))
        read = first.read
        if read is None:
            return shape
        dense = tuple(layer for layer, entry in enumerate(read.lists or []) if entry is None)
        if read.budget is not None:
            dense = read.budget.dense_layers
        self.kv.check_dense_layers(dense)
        shape = replace(shape, block_size=read.block_size, dense_layers=dense)
        if read.group_means:
            assert self.kv.means is not None
            shape = replace(shape, groups=max(1, self.max_pages * PAGE_SIZE // self.kv.means.group_size))
        if read.budget is not None:
            return replace(
                shape,
                width=shape.blocks,
                read_weights=True,
                decay=read.budget.memory.decay,
            )
        lists = [entry for item in inputs for entry in item.read.lists if entry is not None]  # type: ignore[union-attr]
        width = max((entry[0].shape[1] for entry in lists), default=0)
        return replace(shape, width=max(16, power_of_two(width)), read_weights=read.emit)

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

    def _read(
        self,
        buffers: StepBuffers,
        shape: StepShape,
        inputs: list[SequenceInput],
        fetched: dict[str, np.ndarray],
    ) -> list[SequenceOutput]:
        """The buffers are the next step's too: what is asked for is copied out of them."""
        assert buffers.logits is not None
        for item in inputs:
            item.kv.length += len(item.tokens)
        outputs = [SequenceOutput() for _ in inputs]
        if fetched:
            results = {name: values.tolist() for name, values in fetched.items()}
            if buffers.budget is not None:
                for output, count in zip(outputs, results["blocks_read"], strict=False):
                    output.blocks_read = count
            if shape.judged:
                for output, *verdict in zip(outputs, results["accepted"], results["following"], strict=False):
                    output.verdict = verdict[0], verdict[1]
            if shape.tiered:
                for output, missed in zip(outputs, results["missed"], strict=False):
                    output.tokens_fetched = missed * shape.block_size
        row = 0
        for i, (item, output) in enumerate(zip(inputs, outputs, strict=True)):
            first, row = row, row + len(item.tokens)
            if item.logits != "none" and not shape.judged:
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
        if self.kv.offloads:
            raise NotImplementedError("rounds are drafted over KV that lies on one device: no tiers")
        if settings.projection is not None:
            settings = replace(settings, projection=settings.projection.to(self.device))
        self._round_settings = settings
        self._rounds.clear()
        if not self.enforce_eager and not any(step.graph for step in self._steps.values()):
            # A pool whose last graph is gone cannot be used again.
            self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def warm_up_rounds(self, sequences: int) -> None:
        """Capture rounds of up to `sequences`, before the first request."""
        settings = self._round_settings
        if self.enforce_eager or settings is None:
            return
        announcing = (False,) if settings.projection is None else (False, True)
        kinds = list(itertools.product((False, True), announcing))
        sizes = range(power_of_two(sequences).bit_length())
        # The largest first: what all shapes share is made to fit it.
        counts = [(*kind, 1 << i) for kind in kinds for i in reversed(sizes)]
        for sampled, announces, count in tqdm(counts, desc="capturing CUDA graphs of rounds"):
            shape = RoundShape(count, ROUND_QUERIES, self.max_pages, sampled, announces)
            self._round_of(shape, settings)

    def _round_of(self, shape: RoundShape, settings: RoundSettings) -> _Captured[RoundBuffers]:
        if shape not in self._rounds:
            buffers = make_round_buffers(shape, settings, self.vocab_size, self.device)
            if settings.refresh_every > 1:
                buffers.kept = self._kept_of(shape, settings)
            self._rounds[shape] = self._capture(
                buffers,
                lambda: run_round(self.decoder, self.kv, settings, shape, buffers, self._attention),
            )
        return self._rounds[shape]

    def _kept_of(self, shape: RoundShape, settings: RoundSettings) -> Tensor:
        if self._kept is None or len(self._kept) < shape.sequences:
            sizes = shape.sequences, len(self.decoder.layers), self.decoder.heads, blocks_of(shape, settings)
            self._kept = torch.zeros(sizes, device=self.device)
        return self._kept[: shape.sequences]

    @torch.inference_mode()
    def draft_rounds(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        """A whole round of each, those that announce and those that do not apart. Raises OutOfPages."""
        behind = [item for item in requests if len(item.tokens) > ROUND_QUERIES]
        if behind:  # they catch up first, so that one graph serves all rounds
            self.kv.begin_pass([(item.kv, len(item.tokens) - 1) for item in behind])
            self._read_prompts([SequenceInput(item.kv, item.tokens[:-1]) for item in behind])
        requests = [
            replace(item, tokens=item.tokens[-1:]) if len(item.tokens) > ROUND_QUERIES else item
            for item in requests
        ]
        outputs: dict[int, RoundOutput] = {}
        for announces in (False, True):
            places = [i for i, item in enumerate(requests) if (item.announce is not None) == announces]
            if places:
                chosen = [requests[i] for i in places]
                results = self._draft(chosen, announces)
                outputs.update(zip(places, results, strict=True))
        return [outputs[i] for i in range(len(requests))]

    def _draft(self, requests: list[RoundRequest], announces: bool) -> list[RoundOutput]:
        settings = self._round_settings
        if settings is None:
            raise RuntimeError("draft_rounds needs prepare_rounds first")
        for item in requests:
            self.kv.grow(item.kv, item.kv.length + len(item.tokens) + settings.gamma)
        shape = RoundShape(
            power_of_two(len(requests)),
            ROUND_QUERIES,
            self.max_pages,
            any(item.temperature > 0 for item in requests),
            announces,
        )
        captured = self._round_of(shape, settings)
        lay_out_round(captured.buffers, requests)
        bring_kept(captured.buffers, requests)

        if captured.graph is None:
            run_round(self.decoder, self.kv, settings, shape, captured.buffers, self._attention)
        else:
            captured.graph.replay()
        take_kept(captured.buffers, settings, requests)
        return read_round(captured.buffers, requests)

    # Prompts.

    def _read_pinned(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        """Each by itself, in passes of one size."""
        outputs = []
        for item in inputs:
            if item.logits == "all":
                raise NotImplementedError("a deterministic runner gives a prompt's last logits or none")
            for start in range(0, len(item.tokens), PINNED_ROWS):
                tokens = item.tokens[start : start + PINNED_ROWS]
                last = start + len(tokens) == len(item.tokens)
                part = replace(item, tokens=tokens, logits=item.logits if last else "none")
                (output,) = self._read_prompts([part], PINNED_ROWS)
            outputs.append(output)
        return outputs

    def _read_prompts(self, inputs: list[SequenceInput], rows: int = 0) -> list[SequenceOutput]:
        """Chunks of several prompts in one pass, which is large enough to keep the GPU busy without a graph.

        rows: that the pass has in any case, with splits of attention pinned; 0: as many as there are tokens.
        """
        gpu_pages = [self.kv.gpu_pages(item.kv) for item in inputs]
        staged = None
        if not all(self.kv.is_resident(item.kv) for item in inputs):
            parts = self._parts_to_stage(inputs)
            if len(parts) > 1:
                return [output for part in parts for output in self._read_prompts(part, rows)]
            staged = self.kv.stage([item.kv for item in inputs])
        longest = max(rows, *(len(item.tokens) for item in inputs))
        tiled = max(longest, MAX_ROWS)  # so that tiles of queries have one size, whatever the chunks
        pages = max(len(item.kv.pages) for item in inputs)
        kept = self.kv.kept_layers
        host = {
            name: np.zeros(shape, np.int64 if dtype == torch.int64 else np.int32)
            for name, (shape, dtype) in rows_layout(len(inputs), longest, pages, bool(kept)).items()
        }
        tables = None if staged is None else staged.tables
        lay_out_rows(host, [(item.kv, item.tokens) for item in inputs], gpu_pages, tables)
        count = int(host["query_starts"][-1])
        wanted = np.zeros(count, bool)
        run = rows or count
        for item, start, end in zip(inputs, host["query_starts"], host["query_starts"][1:], strict=False):
            wanted[{"none": end, "last": end - 1, "all": start}[item.logits] : end] = True
        block_tables, lengths, starts, token_ids, positions, slots, logits_rows = (
            torch.from_numpy(array).to(self.device)
            for array in (
                host["block_tables"],
                host["lengths"],
                host["query_starts"],
                host["token_ids"][:run],
                host["positions"][:run],
                host["slots"][:run],
                np.flatnonzero(wanted),
            )
        )
        layer_slots: Tensor | list[Tensor] = slots
        if kept:
            kept_tables = torch.from_numpy(host["kept_tables"]).to(self.device)
            kept_slots = torch.from_numpy(host["kept_slots"][:run]).to(self.device)
            layer_slots = [kept_slots if layer in kept else slots for layer in range(self.kv.num_layers)]
        backend, dim = default_backend(self.device), self.kv.k_pages[0].shape[3]
        work: Work | None = None
        planned = self._flashinfer
        if planned is not None:
            plan_rows(planned, host, self.decoder, self.kv)
        elif self._attention == "triton":
            heads = self.kv.kv_heads, self.decoder.heads // self.kv.kv_heads, dim
            tuning = pinned_tuning(dim) if rows else None
            work = plan_work(*heads, tiled, block_tables, lengths, PAGE_SIZE, tuning=tuning)

        def attend(layer: int, queries: Tensor) -> Tensor:
            pages = self.kv.k_pages[layer], self.kv.v_pages[layer]
            if staged is not None:
                pages = staged.layer(layer)
            if planned is not None:
                return run_flashinfer(planned, queries, *pages)
            table = kept_tables if layer in kept else block_tables
            arguments = (queries, *pages, table, lengths, starts, self.decoder.attention_scale)
            return paged_attention(*arguments, backend=self._attention, max_queries=tiled, work=work)

        kv = self.kv.k_pages, self.kv.v_pages
        logits = run_decoder(
            self.decoder, token_ids, positions, layer_slots, *kv, attend, backend, logits_rows
        )
        outputs, row = [], 0
        for item in inputs:
            item.kv.length += len(item.tokens)
            taken = {"none": 0, "last": 1, "all": len(item.tokens)}[item.logits]
            outputs.append(SequenceOutput(logits=logits[row : row + taken].float() if taken else None))
            row += taken
        if staged is not None:
            for output, tokens in zip(outputs, staged.account(), strict=True):
                output.tokens_fetched = tokens
        return outputs


def _fetch(buffers: StepBuffers) -> dict[str, np.ndarray]:
    """A step's results on the host, by name; waits for them if there are any."""
    return buffers.results.fetch() if buffers.results.host else {}
