"""How the layers of one pass attend, and what weights they leave: the one place that chooses an attention kernel.

A pass makes one `LayerAttention` and calls it once a layer. What all layers share is made once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.kernels.backends import Backend
from specahead.kernels.paged_attention import (
    Batch,
    BlockLists,
    GroupMeans,
    LayersEvidence,
    Tuning,
    Work,
    add_listed_weights,
    paged_attention,
    paged_attention_remembering,
    paged_attention_with_block_weights,
    paged_attention_with_read_weights,
    plan_work,
)
from specahead.kernels.prompt_attention import PromptReads, attend_to_prompts
from specahead.kernels.sparse_prompt_attention import SparsePromptReads, attend_sparsely

# The keys and values that a layer attends over, once its new ones are written: layer -> [pages, kv_heads, page, dim].
LayerPages = Callable[[int], tuple[Tensor, Tensor]]
# What the sequences of a pass over prompts read in a layer.
PromptsOfLayer = Callable[[int], PromptReads | SparsePromptReads]


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model. group: query heads of a KV head; dim: of a head; scale: of the scores."""

    kv: int
    group: int
    dim: int
    scale: float


@dataclass(frozen=True)
class Rows:
    """The sequences of a pass, as attention takes them.

    starts: [sequences + 1] int32, the first query row of each. lengths: [sequences] int32, tokens with KV, those of
    the pass included. tables: [sequences, pages] int32. most: queries of one sequence, at most. visible: [rows, 3]
    int32, what each query sees, where it is not all before it (`specahead.kernels.paged_attention.Batch`).
    """

    starts: Tensor
    lengths: Tensor
    tables: Tensor
    most: int
    visible: Tensor | None = None


@dataclass(frozen=True)
class ListedReads:
    """The block lists of the layers that do not read everything.

    blocks: lists with a leading dimension for these layers. index: the index of each of them there. work: what Triton
    derives from the lists (`plan_reads`). means: what stands in for the rest, a layer of the model each. wait: called
    with its index before a listed layer's pages are read.
    """

    blocks: BlockLists
    index: dict[int, int]
    work: Work | None = None
    means: list[GroupMeans] | None = None
    wait: Callable[[int], None] | None = None

    def of_layer(self, at: int) -> BlockLists:
        """Return the lists of the listed layer with index `at`."""
        lines = None if self.blocks.slots is None else self.blocks.slots[at]
        return BlockLists(self.blocks.lists[at], self.blocks.counts[at], self.blocks.block_size, lines)


@dataclass
class Evidence:
    """Adds `share` of the last `queries` queries' mean weights on blocks to `sums`, in place.

    sums: [sequences, layers, heads, blocks] float32. fresh: whether they hold nothing yet, so that a pass over
    everything sets them.
    """

    sums: Tensor
    share: float
    block_size: int
    queries: int = 1
    fresh: bool = False


@dataclass(frozen=True)
class BlockMemory:
    """Has a dense pass remember how much weight each block got (`paged_attention_remembering`).

    memory: [places, rows, blocks] float32; rows are (layer, KV head), for those layers that `index` has a number for.
    places: [sequences] int32, where each sequence's are. apart: whether the output must be, to the last bit, that of a
    pass that remembers nothing; then keys are read twice.
    """

    memory: Tensor
    places: Tensor
    index: dict[int, int]
    decay: float
    block_size: int
    apart: bool = False


@dataclass
class LayerAttention:
    """The attention of one pass: call it with a layer's index and its queries [rows, heads, dim].

    pages: where the layer's keys and values lie. tables_of: the block tables of a layer, where layers differ.
    weights: what the pass leaves of softmax weights, if anything; a tensor: filled by listed layers with the weight of
    each listed block, [listed layers, sequences, kv_heads, width]. prompts: what sequences read piece by piece, if so.
    unread: a layer whose output nothing reads: it does not attend, and gives its queries back.
    """

    heads: Heads
    rows: Rows
    pages: LayerPages
    backend: Backend
    listed: ListedReads | None = None
    weights: Tensor | Evidence | BlockMemory | None = None
    tables_of: Callable[[int], Tensor] | None = None
    prompts: PromptsOfLayer | None = None
    dense_work: Work | None = None
    unread: int | None = None
    _all_layers: LayersEvidence | None = None

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        if layer == self.unread:
            return queries
        at = None if self.listed is None else self.listed.index.get(layer)
        return self._dense(layer, queries) if at is None else self._listed(layer, at, queries)

    def _batch(self, layer: int, queries: Tensor) -> Batch:
        rows = self.rows
        tables = rows.tables if self.tables_of is None else self.tables_of(layer)
        keys, values = self.pages(layer)
        of_rows = tables, rows.lengths, rows.starts, self.heads.scale, rows.most, rows.visible
        return Batch(queries, keys, values, *of_rows)

    def _evidence(self, to: Evidence) -> LayersEvidence:
        """Return what adds the weights of all layers to evidence: all layers read lists, or none does."""
        if self._all_layers is None:
            listed = None if self.listed is None else self.listed.blocks
            self._all_layers = LayersEvidence(to.sums, to.share, to.block_size, to.queries, listed, to.fresh)
        return self._all_layers

    def _dense(self, layer: int, queries: Tensor) -> Tensor:
        batch, weights = self._batch(layer, queries), self.weights
        how: dict[str, Any] = {"backend": self.backend, "work": self.dense_work}
        if isinstance(weights, Evidence) and self.backend == "triton":
            return self._evidence(weights).attend(layer, batch, None, self.dense_work)
        if isinstance(weights, Evidence):
            width = weights.sums.shape[3]
            emitting = weights.queries
            out, given = paged_attention_with_block_weights(batch, weights.block_size, emitting, width=width, **how)
            sums = weights.sums[:, layer]
            if weights.fresh:
                sums.zero_()
            sums.add_(given[:, 0] if emitting == 1 else given.mean(1), alpha=weights.share)
            return out
        if isinstance(weights, BlockMemory) and layer in weights.index:
            rows = slice(weights.index[layer] * self.heads.kv, (weights.index[layer] + 1) * self.heads.kv)
            remembered = weights.memory[:, rows], weights.places, weights.decay
            out = paged_attention_remembering(batch, weights.block_size, *remembered, **how)
            return paged_attention(batch, **how) if weights.apart else out
        if self.prompts is not None:
            reads, of_layer = self.prompts(layer), (queries, batch.k_pages, batch.v_pages, batch.scale)
            if isinstance(reads, SparsePromptReads):
                return attend_sparsely(reads, *of_layer)
            return attend_to_prompts(reads, *of_layer)
        return paged_attention(batch, **how)

    def _listed(self, layer: int, at: int, queries: Tensor) -> Tensor:
        assert self.listed is not None
        if self.listed.wait is not None:
            self.listed.wait(at)
        batch, weights = self._batch(layer, queries), self.weights
        blocks = self.listed.of_layer(at)
        work = None if self.listed.work is None else self.listed.work.layer(at)
        means = None if self.listed.means is None else self.listed.means[layer]
        how: dict[str, Any] = {"backend": self.backend, "work": work}
        if isinstance(weights, Evidence) and self.backend == "triton":
            return self._evidence(weights).attend(layer, batch, blocks, work)
        if isinstance(weights, Evidence):
            sums = weights.sums[:, layer]
            return add_listed_weights(batch, blocks, sums, weights.share, emitting=weights.queries, **how)
        if isinstance(weights, Tensor):
            out, _ = paged_attention_with_read_weights(batch, blocks, means, weights_out=weights[at], **how)
            return out
        return paged_attention(batch, blocks, means, **how)


def plan_reads(
    heads: Heads,
    rows: Rows,
    backend: Backend,
    tuning: Tuning | None = None,
    blocks: BlockLists | None = None,
    means: list[GroupMeans] | None = None,
) -> Work | None:
    """Make what Triton derives from lengths, or from lists if there are any, once for all layers that read so.

    Return None for other backends.
    """
    if backend != "triton":
        return None
    of_rows = rows.most, rows.tables, rows.lengths, PAGE_SIZE
    return plan_work(heads.kv, heads.group, heads.dim, *of_rows, blocks, None if means is None else means[0], tuning)
