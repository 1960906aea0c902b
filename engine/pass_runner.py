"""Running passes of given shapes: captured once and replayed on a GPU, or launched one by one at their exact size."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.decoder import Decoder
from engine.graphs import Captured, Graphs
from engine.inputs import SequenceInput, SequenceOutput
from engine.kv.cache import KVCache
from engine.kv.pages import PAGE_SIZE
from engine.layer_attention import LayerPages
from engine.modules import ModulesDecoder
from engine.passes.buffers import make_buffers
from engine.passes.grouping import StepLimits
from engine.passes.launches import heads_of, run_pass
from engine.passes.layout import lay_out_pass
from engine.passes.outputs import read_outputs
from engine.passes.shape import PassShape
from engine.read_memories import ReadMemories
from engine.staging import Buffers
from kernels.backends import AttentionBackend, Backend, default_backend
from kernels.flashinfer_attention import Planned, check_flashinfer, dense_requests, make_planned, make_workspace, plan


class PassRunner:
    """Runs the inputs of one kind in a pass of a given shape: copies them into its buffers and replays its launches.

    memories: what is remembered of sequences that share budgets out. attention: None for the device's.

    Raises ValueError, NotImplementedError or RuntimeError for FlashInfer where it cannot attend.
    """

    def __init__(
        self,
        decoder: Decoder | ModulesDecoder,
        kv: KVCache,
        limits: StepLimits,
        memories: ReadMemories,
        captures: bool,
        attention: AttentionBackend | None,
    ) -> None:
        self._decoder, self._kv, self._limits = decoder, kv, limits
        self.memories = memories
        self.graphs = Graphs(captures)
        self.prompt_plan: Planned | None = None  # FlashInfer's, if it attends in prompts
        self._attention: Backend = default_backend(kv.device)
        if attention == "flashinfer":
            self.prompt_plan = self._open_flashinfer()
        elif attention is not None:
            self._attention = attention

    def step_of(self, shape: PassShape) -> Captured:
        """Return the captured step of a shape; without graphs, one for this time."""

        def launch(buffers: Buffers) -> None:
            run_pass(self._decoder, self._kv, shape, buffers, self._attention)

        return self.graphs.of(shape, lambda: self._make_buffers(shape, None), launch)

    def run_step(self, inputs: list[SequenceInput], shape: PassShape) -> list[SequenceOutput] | None:
        """Run the captured step of a shape. Return None if it fetches and the GPU has no room for all that is listed.

        What such a step did is void, and done again by whoever runs these inputs next.
        """
        step = self.step_of(shape)
        self._lay_out(step.buffers, shape, inputs, [item.kv.table() for item in inputs] if shape.fetches else None)
        step.run()
        results = step.buffers.results.fetch()
        if shape.fetches and not self._kv.count_step(results, shape.block_size):
            return None
        return read_outputs(step.buffers, shape, inputs, self._kv, results)

    def run_exact(
        self,
        inputs: list[SequenceInput],
        shape: PassShape,
        tables: list[np.ndarray] | None = None,
        layer_pages: LayerPages | None = None,
    ) -> list[SequenceOutput]:
        """Run a pass without a graph.

        tables, layer_pages: the sequences' block tables and what they name, where it is not the KV's own pages.
        """
        buffers = self._make_buffers(shape, sum(item.logits_rows for item in inputs))
        self._lay_out(buffers, shape, inputs, tables)
        is_dense_prompt = shape.queries > self._limits.queries and not shape.width
        prompt = self.prompt_plan if is_dense_prompt else None
        if prompt is not None:
            names = "block_tables", "lengths", "query_starts"
            self._plan_prompt(prompt, *(torch.from_numpy(buffers.inputs.host[name]) for name in names))
        run_pass(self._decoder, self._kv, shape, buffers, self._attention, layer_pages, prompt)
        return read_outputs(buffers, shape, inputs, self._kv, buffers.results.fetch())

    def _make_buffers(self, shape: PassShape, logits_rows: int | None) -> Buffers:
        memory = None
        if shape.decay is not None:
            rows = len(shape.sparse_layers(self._kv.num_layers)) * self._kv.kv_heads
            blocks = replace(shape, pages=self._limits.pages).blocks
            memory = self.memories.weights(rows, blocks, self._kv.device)
        return make_buffers(shape, self._kv, memory, logits_rows)

    def _lay_out(
        self, buffers: Buffers, shape: PassShape, inputs: list[SequenceInput], tables: list[np.ndarray] | None
    ) -> None:
        if shape.groups:
            self._kv.extend_group_means([item.kv for item in inputs])
        budgets = [item.read.budget for item in inputs if item.read and item.read.budget]
        indices = [self.memories.index_of(budget.memory) for budget in budgets]
        lay_out_pass(buffers.inputs, shape, inputs, indices, self._kv, tables)

    # FlashInfer.

    def _open_flashinfer(self) -> Planned:
        heads = heads_of(self._decoder, self._kv)
        check_flashinfer(heads.dim, self._kv.k_pages[0].dtype, self._kv.device)
        planned = make_planned(make_workspace(self._kv.device))
        # A prompt of one token: what FlashInfer compiles for this model, and what it lacks for that, shows now.
        self._plan_prompt(planned, torch.zeros(1, 1).int(), torch.ones(1).int(), torch.arange(2).int())
        return planned

    def _plan_prompt(self, planned: Planned, tables: Tensor, lengths: Tensor, starts: Tensor) -> None:
        """Plan dense attention over whole sequences; tensors on the CPU, as `dense_requests` takes them."""
        heads = heads_of(self._decoder, self._kv)
        requests = dense_requests(tables, lengths, starts, PAGE_SIZE)
        sizes = heads.kv * heads.group, heads.kv, heads.dim, PAGE_SIZE
        plan(planned, requests, *sizes, heads.scale, self._kv.k_pages[0].dtype)
