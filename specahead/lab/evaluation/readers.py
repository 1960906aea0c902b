"""What a variant's rounds read where that is not for services: chosen layer by layer, while the pass runs.

`LayerReader` answers what `specahead.sparsity.reader.Reader` answers. Its passes run by `lab.evaluation.attending`.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specahead.engine.model.decoder import Attend
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.kernels.backends import default_backend
from specahead.kernels.paged_attention import Batch, BlockLists, paged_attention
from specahead.kernels.selection import compact
from specahead.lab.evaluation.just_in_time import JustInTime, SequenceKeys
from specahead.lab.evaluation.methods import Rival, check_compared
from specahead.sparsity.choice import mandatory
from specahead.sparsity.methods import Method
from specahead.sparsity.plan import Plan
from specahead.sparsity.reader import Reader
from specahead.sparsity.selection import BlockSelection


class LayerSelector(Protocol):
    """Chooses blocks of one sequence: when a layer is asked, its queries are known and its attention has not run."""

    def begin(self, announced: list[BlockSelection], base: int, length: int) -> None:
        """Prepare a pass that builds on `base` committed tokens and ends at `length`."""
        ...

    def choose(self, layer: int, queries: Tensor, keys: SequenceKeys, scale: float) -> Tensor | None:
        """Return bool [kv_heads, blocks], or [rows, kv_heads, blocks] for a choice of each query; None: everything.

        queries: [rows, heads, dim].
        """
        ...


@dataclass
class EachQuery:
    """The selector of an announcing method with sharing `per_query`: each query reads what its own weights say."""

    method: Method
    plan: Plan
    masks: Tensor | None = None  # bool [queries, sparse layers, kv_heads, blocks]

    def begin(self, announced: list[BlockSelection], base: int, length: int) -> None:
        assert self.method.announcing is not None
        blocks = self.plan.num_blocks(length)
        rows = self.method.announcing.expand(self.plan)
        matrices = [torch.from_numpy(selection.resized(blocks).matrix())[rows] for selection in announced]
        self.masks = torch.stack(matrices) | mandatory(self.plan, base, blocks, self.method.window)

    def choose(self, layer: int, queries: Tensor, keys: SequenceKeys, scale: float) -> Tensor | None:
        assert self.masks is not None
        if layer in self.plan.dense_layers:
            return None
        return self.masks[:, self.plan.sparse_layers.index(layer)].to(queries.device)


@dataclass
class LayerReader:
    """What one sequence reads by a selector. Call `read` before a pass and `finish` after it, once a round.

    chosen: the blocks that the last round read, bool [layers, kv_heads, blocks] on the CPU; where queries choose for
    themselves, those that any of them read. summary_tokens: tokens of KV that each sparse head read beside its blocks.
    """

    method: Method | Rival
    plan: Plan
    selector: LayerSelector
    chosen: Tensor | None = None
    summary_tokens: float = 0.0
    _masks: dict[int, Tensor] = field(default_factory=dict)  # of the pass that runs, by layer; others read everything
    _length: int = 0

    def read(self, announced: list[BlockSelection], base: int, length: int) -> None:
        """Prepare a round that builds on `base` committed tokens and ends at `length`.

        announced: the draft's selection, or one for each query; empty where the method announces nothing.
        """
        self._masks, self._length = {}, length
        self.summary_tokens = self.method.summaries(self.plan, base)
        self.selector.begin(announced, base, length)

    def attend(self, runner: ModelRunner, item: SequenceInput) -> Attend:
        """Return how the layers of a pass with this input attend: each chooses first."""
        length, scale = item.kv.length + len(item.tokens), runner.decoder.attention_scale

        def attend(layer: int, queries: Tensor) -> Tensor:
            k_pages, v_pages = runner.kv.layer_pages(layer)
            table = torch.from_numpy(item.kv.table()).to(queries.device)
            keys = SequenceKeys(k_pages, table.long(), length)
            chosen = self.selector.choose(layer, queries, keys, scale)
            if chosen is not None:
                self._masks[layer] = chosen
            return attend_chosen(queries, k_pages, v_pages, table, length, scale, chosen, self.plan.block_size)

        return attend

    def finish(self) -> None:
        """Take note of what the pass read."""
        plan = self.plan
        sizes = plan.target_layers, plan.target_kv_heads, plan.num_blocks(self._length)
        self.chosen = torch.ones(sizes, dtype=torch.bool)
        for layer, mask in self._masks.items():
            self.chosen[layer] = (mask.any(0) if mask.dim() == 3 else mask).cpu()

    @property
    def tokens_read(self) -> tuple[float, int]:
        """Tokens of KV that the heads of the last round read, summaries included, and tokens that there are."""
        plan = self.plan
        assert self.chosen is not None
        summaries = self.summary_tokens * len(plan.sparse_layers) * plan.target_kv_heads
        return float(self.chosen.sum()) * plan.block_size + summaries, self.chosen.numel() * plan.block_size


def attend_chosen(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    length: int,
    scale: float,
    chosen: Tensor | None,
    block_size: int,
) -> Tensor:
    """Let the queries of one sequence attend over the blocks that they chose: [rows, heads, dim] like `queries`.

    table: [pages] int32; length: tokens with KV, the queries' own included; chosen: as LayerSelector.choose gives it.
    """
    rows, device = len(queries), queries.device
    lengths = torch.full((1,), length, dtype=torch.int32, device=device)
    if chosen is not None and chosen.dim() == 3:  # each query becomes a sequence of its own
        lengths = torch.arange(length - rows + 1, length + 1, dtype=torch.int32, device=device)
    sequences = len(lengths)
    starts = torch.arange(0, rows + 1, rows // sequences, dtype=torch.int32, device=device)
    tables = table.expand(sequences, -1).contiguous()
    batch = Batch(queries, k_pages, v_pages, tables, lengths, starts, scale, rows // sequences)
    blocks = None if chosen is None else _to_block_lists(chosen.view(sequences, *chosen.shape[-2:]), block_size)
    return paged_attention(batch, blocks, backend=default_backend(device))


def _to_block_lists(chosen: Tensor, block_size: int) -> BlockLists:
    """bool [sequences, kv_heads, blocks] to lists"""
    lists, counts = compact(chosen.flatten(0, 1))
    shape = chosen.shape[:2]
    return BlockLists(lists.view(*shape, -1), counts.view(shape), block_size)


def make_reader(method: Method | Rival, plan: Plan) -> Reader | LayerReader:
    """Return what says what a variant's rounds read. Raises PlanError for a plan that the method cannot use."""
    check_compared(method, plan)
    if isinstance(method, Rival):
        return LayerReader(method, plan, JustInTime(plan, method.rule_of(plan), method.choose))
    if plan.sharing == "per_query" and method.announcing is not None:
        return LayerReader(method, plan, EachQuery(method, plan))
    return Reader(method, plan, report_blocks=method.shares_budget)
