"""Running a model over paged KV: short steps as CUDA graphs, one a shape; prompts, and everything on a CPU, in passes
of the exact size without a graph.

The inputs of a step that attend alike run in one pass. The tensors of a pass are copied into buffers of its shape and
its launches are replayed; nothing else happens between kernels.
"""

import itertools
from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from config.attention_backends import check_attention_backend
from engine.decoder import Attend, Decoder
from engine.graphs import Captured, GraphPool
from engine.inputs import SequenceInput, SequenceOutput, SparseRead
from engine.judging import Drafted
from engine.kv.cache import KVCache
from engine.kv.pages import PAGE_SIZE, SequenceKV, pages_for
from engine.layer_attention import LayerPages
from engine.modules import ModulesDecoder
from engine.passes.buffers import PassBuffers, make_buffers
from engine.passes.grouping import Limits, exact_shape, kind_of, step_shape
from engine.passes.launches import heads_of, run_pass
from engine.passes.layout import lay_out_pass
from engine.passes.outputs import read_outputs
from engine.passes.shape import PassShape
from engine.read_memories import ReadMemories
from engine.round_runner import ROUND_QUERIES, RoundRunner
from engine.rounds.requests import RoundOutput, RoundRequest, RoundSettings
from engine.runner import Runner
from engine.sampling import Sampling
from kernels.backends import AttentionBackend, Backend, default_backend, power_of_two
from kernels.flashinfer_attention import Planned, check_flashinfer, dense_requests, make_planned, make_workspace, plan

STEP_QUERIES = 16  # a sequence with more tokens to run, and more than γ + 1, is reading a prompt
PINNED_SEQUENCES = 8  # of every step of a deterministic runner
PINNED_ROWS = 512  # of every pass over a prompt there
MEMORIES = 64  # of sequences that share budgets out, unless keep_memories says otherwise
MAX_OVERHANG = 2 * 65  # tokens beyond the context: two rounds of the largest γ that is served


class ModelRunner(Runner):
    """Runs a decoder over KV.

    max_context: tokens of a sequence, at most. step_queries: tokens of a sequence that most steps have, γ + 1 in a
    target. deterministic: what a sequence gives depends on its own tokens only, not on what runs beside it nor on how
    its rounds fell: every step has one shape, prompts are read PINNED_ROWS tokens at a time, and splits of attention
    are pinned. Some matrix products round otherwise in a step than in a prompt. attention_backend: None: the device's.
    "flashinfer": FlashInfer attends in prompts, Triton in steps and rounds. "torch" on a GPU needs enforce_eager.

    Raises ValueError, NotImplementedError or RuntimeError for an attention backend that cannot attend here.
    """

    def __init__(
        self,
        decoder: Decoder | ModulesDecoder,
        kv: KVCache,
        vocab_size: int,
        max_context: int,
        enforce_eager: bool = False,
        step_queries: int = 5,
        deterministic: bool = False,
        attention_backend: AttentionBackend | None = None,
    ) -> None:
        self.decoder, self.kv, self.vocab_size, self.device = decoder, kv, vocab_size, kv.device
        self.deterministic = deterministic
        self._limits = Limits(
            pages=pages_for(max_context + MAX_OVERHANG),
            step_queries=step_queries,
            queries=max(step_queries, STEP_QUERIES),
            pinned_sequences=PINNED_SEQUENCES if deterministic else 0,
        )
        self._captures = not enforce_eager and decoder.can_capture and self.device.type == "cuda"
        self._pool = GraphPool() if self._captures else None
        self._steps: dict[PassShape, Captured[PassBuffers]] = {}
        self._memories = ReadMemories(MEMORIES)
        self._rounds: RoundRunner | None = None
        if attention_backend is not None:
            check_attention_backend(attention_backend, self.device.type, deterministic, not self._captures)
        self._attention: Backend = default_backend(self.device)
        self._prompt_plan: Planned | None = None  # FlashInfer's, if it attends in prompts
        if attention_backend == "flashinfer":
            self._prompt_plan = self._open_flashinfer()
        elif attention_backend is not None:
            self._attention = attention_backend

    def _open_flashinfer(self) -> Planned:
        check_flashinfer(heads_of(self.decoder, self.kv).dim, self.kv.k_pages[0].dtype, self.device)
        planned = make_planned(make_workspace(self.device))
        # A prompt of one token: what FlashInfer compiles for this model, and what it lacks for that, shows now.
        table, length, starts = torch.zeros(1, 1), torch.ones(1), torch.arange(2)
        self._plan_rows(planned, table.int(), length.int(), starts.int())
        return planned

    def _plan_rows(self, planned: Planned, tables: Tensor, lengths: Tensor, starts: Tensor) -> None:
        """Plan dense attention over whole sequences; tensors on the CPU, as `dense_requests` takes them."""
        heads = heads_of(self.decoder, self.kv)
        requests = dense_requests(tables, lengths, starts, PAGE_SIZE)
        sizes = heads.kv * heads.group, heads.kv, heads.dim, PAGE_SIZE
        plan(planned, requests, *sizes, heads.scale, self.kv.k_pages[0].dtype)

    @torch.inference_mode()
    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        for item in inputs:
            item.check()
        self.kv.begin_pass([(item.kv, len(item.tokens)) for item in inputs])
        outputs: dict[int, SequenceOutput] = {}
        groups: dict[Hashable, list[int]] = {}
        for i, item in enumerate(inputs):
            groups.setdefault(kind_of(item, self._limits), []).append(i)
        for members in groups.values():
            outputs.update(zip(members, self._run([inputs[i] for i in members]), strict=True))
        return [outputs[i] for i in range(len(inputs))]

    def _run(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        """Run inputs of one kind."""
        if self._limits.is_prompt(inputs[0]):
            return self._read_pinned(inputs) if self.deterministic else self._run_exact(inputs)
        if self.deterministic:
            parts = range(0, len(inputs), PINNED_SEQUENCES)
            return [output for i in parts for output in self._step(inputs[i : i + PINNED_SEQUENCES])]
        return self._step(inputs)

    # Steps.

    def _step(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        if not self._captures and not self.deterministic:
            return self._run_exact(inputs)
        if not self._all_resident(inputs):
            return self._step_over_tiers(inputs, self._shape(inputs))
        shape = self._shape(inputs)
        step = self._step_of(shape)
        self._lay_out(step.buffers, shape, inputs)
        step.run()
        return read_outputs(step.buffers, shape, inputs, self.kv, step.buffers.results.fetch())

    def _shape(self, inputs: list[SequenceInput]) -> PassShape:
        return step_shape(inputs, self.kv, self._limits)

    def _step_of(self, shape: PassShape) -> Captured[PassBuffers]:
        """Return the captured step of a shape; without graphs, one for this time."""
        if shape in self._steps:
            return self._steps[shape]
        buffers = self._buffers(shape)

        def launch() -> None:
            run_pass(self.decoder, self.kv, shape, buffers, self._attention)

        if self._pool is None:
            return Captured(buffers, launch)
        self._steps[shape] = self._pool.capture(buffers, launch)
        return self._steps[shape]

    def _buffers(self, shape: PassShape, logits_rows: int | None = None) -> PassBuffers:
        memory = None
        if shape.decay is not None:
            rows = (self.kv.num_layers - len(shape.dense_layers)) * self.kv.kv_heads
            blocks = replace(shape, pages=self._limits.pages).blocks
            memory = self._memories.weights(rows, blocks, self.device)
        return make_buffers(shape, self.kv, self.device, memory, logits_rows)

    def _lay_out(
        self,
        buffers: PassBuffers,
        shape: PassShape,
        inputs: list[SequenceInput],
        tables: list[np.ndarray] | None = None,
    ) -> None:
        if shape.groups:
            self.kv.extend_group_means([item.kv for item in inputs])
        budgets = [item.read.budget for item in inputs if item.read and item.read.budget]
        indices = [self._memories.index_of(budget.memory) for budget in budgets]
        lay_out_pass(buffers.inputs, shape, inputs, indices, self.kv, tables)

    # Passes of the exact size.

    @torch.inference_mode()
    def forward_attending(self, item: SequenceInput, attend: Attend) -> SequenceOutput:
        """Run one sequence whose layers attend by a function of the caller's, over what lies in the KV's own pages.

        For comparisons: methods that look at a layer's queries before they choose. item.read must be None.
        """
        item.check()
        self.kv.begin_pass([(item.kv, len(item.tokens))])
        shape = exact_shape([item], self.kv, self._limits)
        return self._run_shape([item], shape, attend=attend)[0]

    def _run_exact(self, inputs: list[SequenceInput], rows: int = 0) -> list[SequenceOutput]:
        """Run inputs of one kind without a graph. rows: of the pass in any case, with splits of attention pinned."""
        if not self._all_resident(inputs):
            return self._step_over_tiers(inputs, exact_shape(inputs, self.kv, self._limits, rows))
        return self._run_shape(inputs, exact_shape(inputs, self.kv, self._limits, rows))

    def _run_shape(
        self,
        inputs: list[SequenceInput],
        shape: PassShape,
        tables: list[np.ndarray] | None = None,
        layer_pages: LayerPages | None = None,
        attend: Attend | None = None,
    ) -> list[SequenceOutput]:
        """Run a pass without a graph."""
        wanted = sum({"none": 0, "last": 1}.get(item.logits, len(item.tokens)) for item in inputs)
        buffers = self._buffers(shape, wanted)
        self._lay_out(buffers, shape, inputs, tables)
        prompt = self._plan_prompt(buffers, shape)
        how = layer_pages, prompt, True, attend
        run_pass(self.decoder, self.kv, shape, buffers, self._attention, *how)
        return read_outputs(buffers, shape, inputs, self.kv, buffers.results.fetch())

    def _plan_prompt(self, buffers: PassBuffers, shape: PassShape) -> Planned | None:
        """Plan FlashInfer for a prompt, if it was chosen."""
        if self._prompt_plan is None or shape.queries <= self._limits.queries or shape.width or shape.emitting:
            return None
        names = "block_tables", "lengths", "query_starts"
        self._plan_rows(self._prompt_plan, *(torch.from_numpy(buffers.inputs.host[name]) for name in names))
        return self._prompt_plan

    def _read_pinned(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        """Read prompts one by one, in passes of one size."""
        outputs = []
        for item in inputs:
            if item.logits == "all":
                raise NotImplementedError("a deterministic runner gives a prompt's last logits or none")
            for start in range(0, len(item.tokens), PINNED_ROWS):
                tokens = item.tokens[start : start + PINNED_ROWS]
                last = start + len(tokens) == len(item.tokens)
                part = replace(item, tokens=tokens, logits=item.logits if last else "none")
                (output,) = self._run_exact([part], PINNED_ROWS)
            outputs.append(output)
        return outputs

    # Steps over KV that has partly left the GPU.

    def _all_resident(self, inputs: list[SequenceInput]) -> bool:
        return all(self.kv.is_resident(item.kv) for item in inputs)

    def _step_over_tiers(self, inputs: list[SequenceInput], shape: PassShape) -> list[SequenceOutput]:
        """Fetch what is listed, at once if it fits, else in halves; or bring whole sequences together."""
        if self.kv.can_fetch(shape.width, shape.dense_layers, shape.block_size):
            outputs = self._step_fetching(replace(shape, fetches=True), inputs)
            if outputs is not None:
                return outputs
            if len(inputs) > 1:
                half = len(inputs) // 2
                return self._run(inputs[:half]) + self._run(inputs[half:])
        outputs = []
        for indices in self.kv.staging_parts([item.kv for item in inputs]):
            part = [inputs[i] for i in indices]
            rows = shape.rows if shape.pinned else 0
            of_part = exact_shape(part, self.kv, self._limits, rows)
            staged = self.kv.stage([item.kv for item in part])
            assert staged is not None
            brought = self._run_shape(part, of_part, staged.tables, staged.layer)
            for output, tokens in zip(brought, staged.count_fetched(), strict=True):
                output.tokens_fetched = tokens
            outputs += brought
        return outputs

    def _step_fetching(self, shape: PassShape, inputs: list[SequenceInput]) -> list[SequenceOutput] | None:
        """Return None if the GPU has no room for all that is listed: what was done then is done again."""
        step = self._step_of(shape)
        self._lay_out(step.buffers, shape, inputs, [item.kv.table() for item in inputs])
        step.run()
        results = step.buffers.results.fetch()
        if not self.kv.count_step(results, shape.block_size):
            return None
        return read_outputs(step.buffers, shape, inputs, self.kv, results)

    # Before the first request.

    def keep_memories(self, sequences: int) -> None:
        if self._memories.made:
            raise RuntimeError("keep_memories comes before the first step that shares a budget out")
        self._memories = ReadMemories(sequences)

    @torch.inference_mode()
    def warm_up(self, reads: list[SparseRead | None], sequences: int) -> None:
        """Capture the steps that these reads take, greedy and sampled, in batches of up to `sequences`."""
        if self._pool is None:
            return
        kinds = itertools.product(reads, (Sampling(0.0), Sampling(1.0)))
        counts = [(*kind, 1 << i) for kind in kinds for i in range(power_of_two(sequences).bit_length())]
        step_queries = self._limits.step_queries
        for read, sampling, count in tqdm(counts, desc="capturing CUDA graphs of steps"):
            for queries in (1, step_queries) if read is None else (step_queries,):
                drafted = Drafted([0] * (queries - 1), [], sampling, 0)
                item = SequenceInput(SequenceKV(), [0] * queries, "all", read, drafted=drafted)
                shape = self._shape([item] * count)
                self._step_of(shape)
                if self.kv.can_fetch(shape.width, shape.dense_layers, shape.block_size):
                    self._step_of(replace(shape, fetches=True))

    # Rounds of a draft.

    def prepare_rounds(self, settings: RoundSettings) -> None:
        # A pool of its own: one whose last graph is gone cannot be used again.
        pool = GraphPool() if self._captures else None
        of_model = self.decoder, self.kv, settings, self.vocab_size
        self._rounds = RoundRunner(*of_model, self._limits.pages, default_backend(self.device), pool)

    @torch.inference_mode()
    def warm_up_rounds(self, sequences: int) -> None:
        if self._rounds is not None:
            self._rounds.warm_up(sequences)

    @torch.inference_mode()
    def draft_rounds(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        if self._rounds is None:
            raise RuntimeError("draft_rounds needs prepare_rounds first")
        behind = [item for item in requests if len(item.tokens) > ROUND_QUERIES]
        if behind and self._captures:  # they catch up first, so that one graph serves all rounds
            self.forward([SequenceInput(item.kv, item.tokens[:-1]) for item in behind])
            requests = [
                replace(item, tokens=item.tokens[-1:]) if len(item.tokens) > ROUND_QUERIES else item
                for item in requests
            ]
        return self._rounds.draft(requests)
