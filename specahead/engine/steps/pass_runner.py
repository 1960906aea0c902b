"""Running passes of given shapes: as CUDA graphs that are replayed, or launched one by one at their exact size."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, LastChoice
from specahead.engine.kv.staged import StagedReads
from specahead.engine.model.decoder import Decoder, PassTokens
from specahead.engine.model.head import DraftHead, StateTap
from specahead.engine.model.modules import ModulesDecoder
from specahead.engine.parallel.commands import Command, encode
from specahead.engine.staging import Buffers
from specahead.engine.steps.auditing import compare
from specahead.engine.steps.buffers import make_buffers
from specahead.engine.steps.device_chain import DeviceChain
from specahead.engine.steps.graphs import Captured, Graphs
from specahead.engine.steps.grouping import StepLimits
from specahead.engine.steps.inputs import ReadMemory, SequenceInput, SequenceOutput
from specahead.engine.steps.launches import run_pass
from specahead.engine.steps.layout import lay_out_pass
from specahead.engine.steps.outputs import StepUnderWay, read_outputs, read_results
from specahead.engine.steps.prompt_graphs import MOST_TOKENS, PromptGraphs, sizes_up_to
from specahead.engine.steps.read_memories import ReadMemories
from specahead.engine.steps.reads import PagedModel
from specahead.engine.steps.shapes import Choosers, PassShape
from specahead.kernels.backends import Backend, default_backend
from specahead.kernels.linear import MOST_ROWS
from specahead.kernels.paged_attention import takes_heads
from specahead.kernels.prompt_attention import attend_once, cudnn_attends, merge_in_all_ways
from specahead.kernels.prompt_reads import PromptReads, make_room, plan_prompts, shapes_of_parts


class PassRunner:
    """Runs inputs of one kind in a pass of a given shape: it copies them into the shape's buffers and replays its
    launches.

    memories: the remembered weights of sequences that read by budgets, or the last choices of a model that chooses
    blocks by itself. drafting: runs tokens that a later pass judges; None: the decoder. tap: takes the states of a
    target's tokens for a head. Attention is Triton's on a GPU, and cuDNN's for prompts where that supports the heads.
    torch attends where Triton does not support the heads; such passes cannot be captured.
    """

    def __init__(
        self,
        decoder: Decoder | ModulesDecoder,
        kv: KVCache,
        limits: StepLimits,
        memories: ReadMemories,
        captures: bool,
        drafting: Decoder | None = None,
        tap: StateTap | None = None,
    ) -> None:
        self._kv, self._limits, self._followers, self.memories = kv, limits, kv.ranks.followers, memories
        self.graphs = Graphs(captures, kv.ranks)
        dim, dtype = kv.k_pages[0].shape[3], kv.dtype
        attention: Backend = default_backend(kv.device) if takes_heads(dim) else "torch"
        self.model = PagedModel(decoder, kv, attention, drafting, tap)
        self._cudnn = cudnn_attends(dim, dtype, kv.device)
        self.chain = DeviceChain.make(1, kv.device)
        self._logits: Tensor | None = None  # shared by all captured steps
        self._room: Tensor | None = None  # for the parts that cuDNN reads a prompt in
        self._prompt_graphs: PromptGraphs | None = None
        self._unfinished: torch.cuda.Event | None = None  # comes when the last part of a prompt has run

    def step_of(self, shape: PassShape, prepared: bool = False) -> Captured:
        """Return the step of a shape, ready to run. prepared: as in `Graphs.of`."""
        if self.graphs.captures and (prepared or shape not in self.graphs.by_shape):
            # Before this rank begins: NCCL may need all ranks while a sum is captured.
            self._followers.tell(Command.CAPTURE, (prepared, *encode(shape)))
        launch = self._launch_sharing_logits if self.graphs.captures else self._launch
        return self.graphs.of(shape, partial(self._make_buffers, shape, None), partial(launch, shape), prepared)

    def launches_of(self, shape: PassShape) -> Callable[[], None]:
        """Return a function that launches the step of a shape once, in buffers of its own."""
        return partial(self._launch, shape, self._make_buffers(shape, None))

    def _launch(self, shape: PassShape, buffers: Buffers) -> None:
        run_pass(self.model, shape, buffers, chain=self.chain)
        if not shape.read.reports:  # later captures reuse their memory
            for name in ("all_lists", "all_counts", "lists", "counts"):
                buffers.tensors.pop(name, None)

    def _launch_sharing_logits(self, shape: PassShape, buffers: Buffers) -> None:
        """Launch a step, and keep its logits in memory that all captured steps share: 125 MiB for 64 sessions.

        The steps can share it because the host reads a step's logits before it launches the next one. If steps follow
        one another in the device chain, the host reads no logits.
        """
        self._launch(shape, buffers)
        logits = buffers.tensors.get("logits")
        if logits is None:  # the step only drafts
            return
        if self._logits is None or len(self._logits) < logits.numel():
            self._logits = logits.view(-1)
        else:
            buffers.tensors["logits"] = self._logits[: logits.numel()].view(logits.shape).copy_(logits)

    def can_fetch(self, shape: PassShape) -> bool:
        """Return whether a step of a shape can fetch the pages that it reads. Else whole sequences are staged.

        If each token chooses blocks for itself, sequences are staged, since all tokens together choose most blocks.
        """
        if shape.choosers is Choosers.NONE:
            return self._kv.can_fetch(shape.read.dense_layers, shape.read.block_size)
        return self._kv.offloads and shape.choosers is Choosers.FIRST

    def run_fetching(self, inputs: list[SequenceInput], shape: PassShape) -> list[SequenceOutput] | None:
        """Run the step of a shape that fetches. Return None if the GPU has no room for all listed pages: the step
        is then void, and the caller has to run its inputs again.
        """
        buffers = self._run_step(inputs, shape, [item.kv.table() for item in inputs])
        compare(buffers, shape, inputs)
        results = buffers.results.fetch()
        if not self._kv.count_step(results):
            return None
        return read_outputs(buffers, shape, inputs, self._kv, results)

    def start_step(self, inputs: list[SequenceInput], shape: PassShape) -> StepUnderWay:
        """Launch the step of a shape. The returned function waits for it; call it before the shape runs again."""
        return self._started(self._run_step(inputs, shape), shape, inputs)

    def _run_step(
        self, inputs: list[SequenceInput], shape: PassShape, tables: list[np.ndarray] | None = None
    ) -> Buffers:
        """Launch the step of a shape on all ranks, and return its buffers. tables: as `lay_out_pass` takes them."""
        step = self.step_of(shape)
        self._lay_out(step.buffers, shape, inputs, tables)
        self._followers.tell_step(shape)
        step.run()
        return step.buffers

    def _started(self, buffers: Buffers, shape: PassShape, inputs: list[SequenceInput]) -> StepUnderWay:
        results, compared = buffers.results, compare(buffers, shape, inputs)
        done = results.send_back()

        def end() -> list[SequenceOutput]:
            outputs = read_outputs(buffers, shape, inputs, self._kv, results.wait(done))
            for index, rows in compared:
                outputs[index].divergence = rows.numpy()
            return outputs

        return end

    def launch_step(self, inputs: list[SequenceInput], shape: PassShape) -> StepUnderWay:
        """Launch the step of a shape whose inputs are all judged, and advance the lengths of their KV at once."""
        results = self._run_step(inputs, shape).results
        done = results.send_back()
        for item in inputs:
            item.kv.length += item.rows
        return lambda: read_results(results.wait(done), inputs)

    def start_exact(
        self, inputs: list[SequenceInput], shape: PassShape, staged: StagedReads | None = None
    ) -> StepUnderWay:
        """Launch a pass of its exact size, without a graph. The returned function waits for it.

        staged: the inputs' sequences if they are staged; None: the pass reads the KV's own pages.
        """
        logits_rows = sum(item.logits_rows for item in inputs)
        buffers = self._make_buffers(shape, logits_rows)
        tables, pages = (None, []) if staged is None else (staged.tables, staged.pages)
        self._lay_out(buffers, shape, inputs, tables)
        self._followers.tell_exact(shape, buffers.inputs.flat, logits_rows, pages)
        self._run_exact(buffers, shape, staged)
        gives_nothing = not any(item.logits_rows or item.read or item.drafted for item in inputs)
        if gives_nothing and self._kv.device.type == "cuda" and not self._kv.offloads:
            self._wait_for_the_one_before()
            return lambda: read_outputs(buffers, shape, inputs, self._kv, {})
        return self._started(buffers, shape, inputs)

    def _run_exact(self, buffers: Buffers, shape: PassShape, staged: StagedReads | None) -> None:
        prompts, graphs = None, None
        if self._is_read_by_cudnn(shape):
            prompts, graphs = self._plan_prompts(buffers), None if shape.light else self._prompt_graphs
        run_pass(self.model, shape, buffers, None if staged is None else staged.layer, prompts, graphs=graphs)

    def follow_exact(
        self, shape: PassShape, logits_rows: int, pages: list[np.ndarray], receive: Callable[[np.ndarray], object]
    ) -> None:
        """Launch a pass of its exact size that rank 0 has laid out, on a rank that follows it.

        logits_rows: how many rows give logits. pages: the pages of each sequence, int32 [pages], if sequences are
        staged; else empty. receive: writes the inputs that rank 0 sends to an array.
        """
        buffers = self._make_buffers(shape, logits_rows)
        receive(buffers.inputs.flat)
        buffers.inputs.send()
        self._run_exact(buffers, shape, self._kv.stage_pages(pages) if pages else None)

    def _make_buffers(self, shape: PassShape, logits_rows: int | None) -> Buffers:
        memory = None
        if shape.read.is_sparse:
            rows = len(shape.sparse_layers(self._kv.num_layers)) * self._kv.all_kv_heads
            blocks = replace(shape, pages=self._limits.pages).blocks
            memory = self.memories.weights(rows, blocks, self._kv.device)
        if shape.fetches_chosen and (rule := self.model.decoder.block_rule) is not None:
            width = rule.width(self._limits.queries)
            memory = self.memories.choices(self._kv.num_layers, self._kv.kv_heads, width, self._kv.device)
        return make_buffers(shape, self._kv, memory, logits_rows, isinstance(self.model.decoder, DraftHead))

    def _lay_out(
        self, buffers: Buffers, shape: PassShape, inputs: list[SequenceInput], tables: list[np.ndarray] | None = None
    ) -> None:
        if shape.read.groups:
            # Sequences that are always read densely need no means, and there is no room for theirs.
            sparse = [item for item in inputs if item.kv.drafts or not item.kv.dense]
            self._kv.extend_group_means([item.kv for item in sparse], [item.first_position for item in sparse])
        indices = [self._index_of(item.read.budget.memory) for item in inputs if item.read]
        if shape.fetches_chosen:
            indices = [self._index_of(item.kv.last_choice) for item in inputs]
        lay_out_pass(buffers.inputs, shape, inputs, indices, self._kv, tables)

    def _index_of(self, memory: ReadMemory | LastChoice) -> int:
        is_new = memory.index is None
        index = self.memories.index_of(memory)
        if is_new:
            self._followers.tell(Command.CLEAR_MEMORY, [index])
        return index

    # Prompts.

    def _is_read_by_cudnn(self, shape: PassShape) -> bool:
        reads_all = not shape.read.is_sparse and shape.choosers is Choosers.NONE
        return self._cudnn and not shape.pinned and reads_all and shape.queries > self._limits.queries

    def launches_of_prompts(self, tokens: int) -> list[Callable[[], Callable[[], None]]]:
        """Return functions that each make a launch to compile, for prompts that are read up to `tokens` tokens at once.

        Short prompts may take other kernels.
        """
        heads, device = self.model.heads, self._kv.device
        merges = partial(merge_in_all_ways, heads.kv * heads.group, heads.dim, self._kv.dtype, device)
        sizes = (tokens, 2 * MOST_ROWS) if self.model.decoder.can_capture else ()
        return [lambda: merges, *(partial(self.launches_of_prompt, size) for size in sizes)]

    def launches_of_prompt(self, tokens: int) -> Callable[[], None]:
        """Return a function that launches the layers of a pass over `tokens` tokens once, without attention."""

        def launch() -> None:
            numbers = torch.zeros(tokens, dtype=torch.int64, device=self._kv.device)
            decoder = self.model.decoder
            decoder = decoder.reading(numbers) if isinstance(decoder, DraftHead) else decoder
            decoder.run(PassTokens(numbers, numbers, numbers), self._kv, lambda _layer, queries: queries, numbers[:0])

        return launch

    def shapes_of_prompts(self, tokens: int) -> list[Callable[[], None]]:
        """Return functions that each have cuDNN plan one shape of prompts that are read up to `tokens` tokens at once.

        cuDNN keeps plans by thread: call them in the thread that runs the model.
        """
        if not self._cudnn:
            return []
        longest = self._limits.pages * PAGE_SIZE
        shapes = [(own, before) for own, before in shapes_of_parts(min(tokens, longest)) if own + before <= longest]
        return [partial(self.plan_prompt, *shape) for shape in shapes]

    def plan_prompt(self, own: int, before: int) -> None:
        """Have cuDNN plan one shape of prompts (kernels.prompt_reads.shapes_of_parts), on every rank."""
        self._followers.tell(Command.PLAN_PROMPT, [own, before])
        heads, room = self.model.heads, self._room_for_prompts()
        attend_once(own, before, heads.kv * heads.group, heads.kv, heads.dim, scale=heads.scale, room=room)

    def captures_of_prompts(self, tokens: int) -> list[Callable[[], None]]:
        """Return functions that each capture the layers of one size of passes over prompts, up to `tokens` tokens."""
        if isinstance(self.model.decoder, DraftHead):  # one layer is few launches
            return []
        if not (self._cudnn and self.graphs.captures and isinstance(self.model.decoder, Decoder)):
            return []
        return [partial(self.capture_prompt, size) for size in sizes_up_to(min(tokens, MOST_TOKENS))]

    def capture_prompt(self, tokens: int) -> None:
        """Capture the layers of passes over a number of prompt tokens, on every rank.

        So all ranks run a pass in the same size, without which sums over them would be over other numbers of rows.
        """
        self._followers.tell(Command.CAPTURE_PROMPT, [tokens])
        assert isinstance(self.model.decoder, Decoder)
        if self._prompt_graphs is None:
            self._prompt_graphs = PromptGraphs(self.model.decoder, self._kv, self.model.tap)
        self._prompt_graphs.capture(tokens)

    def _room_for_prompts(self) -> Tensor:
        if self._room is None:
            pages = self._kv.k_pages[0]
            sizes = self._limits.pages * PAGE_SIZE, self._kv.kv_heads, pages.shape[3]
            self._room = make_room(*sizes, self._kv.dtype, pages.device)
        return self._room

    def _plan_prompts(self, buffers: Buffers) -> PromptReads:
        """Return the reads of the prompts in a pass."""
        host, tables = buffers.inputs.host, buffers.tensors["block_tables"]
        starts, lengths = host["query_starts"].tolist(), host["lengths"].tolist()
        heads, room = self.model.heads, self._room_for_prompts()
        of_heads = heads.kv * heads.group, heads.kv, heads.dim
        return plan_prompts(starts, lengths, tables, of_heads, PAGE_SIZE, room, self._cudnn)

    def _wait_for_the_one_before(self) -> None:
        """Wait for the last part of a prompt that had no outputs, and let the present one run.

        So the host lays out one part of a prompt while the device runs the part before it, and never more than one.
        """
        before, self._unfinished = self._unfinished, torch.cuda.Event()
        self._unfinished.record()
        if before is not None:
            before.synchronize()
