"""The attention of the layers of one pass: the one place that chooses an attention kernel.

A pass makes one `LayerAttention` and calls it for each layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.parallel.ranks import ALONE, Ranks
from specahead.kernels.backends import Backend
from specahead.kernels.chosen_blocks import Choice, choose_blocks
from specahead.kernels.kv_scales import KVScales
from specahead.kernels.page_means import write_page_means
from specahead.kernels.paged_attention import (
    Batch,
    BlockLists,
    GroupMeans,
    LayersEvidence,
    Tuning,
    Work,
    paged_attention,
    paged_attention_remembering,
    paged_attention_with_read_weights,
    plan_work,
)
from specahead.kernels.prompt_attention import attend_to_prompts
from specahead.kernels.prompt_reads import PromptReads

# The keys and values that a layer attends over, including its new ones: layer -> [pages, kv_heads, page, dim] each.
LayerPages = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model."""

    kv: int
    """KV heads."""
    group: int
    """Query heads of a KV head."""
    dim: int
    """Dimensions of a head."""
    scale: float
    """The factor of the scores, which are products of queries and keys."""
    kv_scales: KVScales | None = None
    """Those of all layers, for KV in 8 bits."""


@dataclass(frozen=True)
class Rows:
    """The sequences of a pass, as attention takes them."""

    starts: Tensor
    """[sequences + 1] int32, the first query row of each sequence."""
    lengths: Tensor
    """[sequences] int32, tokens with KV, including those of the pass."""
    tables: Tensor
    """[sequences, pages] int32."""
    most: int
    """The most queries of a sequence."""
    visible: Tensor | None = None
    """[rows, 3] int32, the tokens that each query sees (`specahead.kernels.paged_attention.Batch`); None: all before
    it."""


@dataclass(frozen=True)
class ListedReads:
    """The block lists of the layers that read sparsely."""

    blocks: BlockLists
    """Lists with a leading dimension for these layers."""
    index: dict[int, int]
    """The place of each layer in that dimension."""
    work: Work | None = None
    """The plan that Triton makes from the lists (`plan_reads`)."""
    means: list[GroupMeans] | None = None
    """Stand in for the blocks that are not listed; one for each layer of the model."""
    wait: Callable[[int], None] | None = None
    """Called with a layer's place before its pages are read."""

    def of_layer(self, at: int) -> BlockLists:
        """Return the lists of the layer at this place."""
        lines = None if self.blocks.slots is None else self.blocks.slots[at]
        return BlockLists(self.blocks.lists[at], self.blocks.counts[at], self.blocks.block_size, lines)


@dataclass(frozen=True)
class ChosenPart:
    """Some queries of a pass, and who among them chooses blocks."""

    queries: slice
    """Which rows of the pass."""
    rows: Rows
    """The sequences whose queries share a choice; where each query chooses for itself, it is a sequence of its own."""
    page_numbers: Tensor
    """[sequences, pages] int32, the indices of the sequences' pages in `ChosenReads.means`."""
    choosers: Tensor | None
    """[sequences] int64, the row of each sequence that chooses, within the part; None: the only one that it has."""
    choice: Choice
    """How many blocks each chooser chooses."""


@dataclass(frozen=True)
class ChosenReads:
    """The reads of a model whose own attention chooses the blocks of each layer."""

    keys: list[Tensor]
    """The pages of each layer to which new keys are written (`KVCache.k_pages`)."""
    means: list[Tensor]
    """The mean keys of each layer's full pages (`KVCache.page_means`)."""
    slots: Tensor
    """[rows] int64, where the new keys of the pass lie."""
    page_numbers: Tensor
    """[rows] int64, the index in `means` of each new key's page."""
    parts: list[ChosenPart]
    """They cover the pass; empty: all sequences are so short that everything is read."""
    tuning: Tuning | None = None
    """How attention is cut; None: as is fastest."""
    fetch: Callable[[int, BlockLists], BlockLists] | None = None
    """Takes a layer's number and the blocks that it chose, brings these to the device, and returns them with the slots
    where they lie. None: all pages are on the device, where block tables say."""


@dataclass(frozen=True)
class BlockMemory:
    """Has a dense pass remember how much weight each block got (`paged_attention_remembering`)."""

    memory: Tensor
    """[places, rows, blocks] float32; a row is a layer of `index` and a KV head."""
    places: Tensor
    """[sequences] int32, the place of each sequence."""
    index: dict[int, int]
    """The number of each layer that remembers."""
    decay: float
    block_size: int
    apart: bool = False
    """Whether the output must equal that of a pass that remembers nothing, bit by bit; then keys are read twice."""
    ranks: Ranks = ALONE
    """Rows are of the heads of all ranks; this one remembers its own."""


@dataclass
class LayerAttention:
    """The attention of one pass: call it with a layer's index and its queries [rows, heads, dim]."""

    heads: Heads
    rows: Rows
    pages: LayerPages
    backend: Backend
    listed: ListedReads | None = None
    weights: Tensor | LayersEvidence | BlockMemory | None = None
    """Where the pass leaves softmax weights, if anywhere. Layers with lists fill a tensor with the weight of each
    listed block, [layers with lists, sequences, kv_heads, width]."""
    prompts: PromptReads | None = None
    """The reads of a pass over prompts, the same in all layers."""
    dense_work: Work | None = None
    chosen: ChosenReads | None = None
    """How the model chooses blocks by itself, if it does."""
    unread: int | None = None
    """A layer whose output nothing reads: it does not attend, and returns its queries."""

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        if self.chosen is not None:
            chosen, scales = self.chosen, self._scales(layer)
            of_layer = chosen.keys[layer], chosen.means[layer]
            write_page_means(*of_layer, chosen.slots, chosen.page_numbers, self.backend, scales)
        if layer == self.unread:
            return queries
        if self.chosen is not None and self.chosen.parts:
            return self._chosen(layer, queries, self.chosen)
        at = None if self.listed is None else self.listed.index.get(layer)
        return self._dense(layer, queries) if at is None else self._listed(layer, at, queries)

    def _batch(
        self, layer: int, queries: Tensor, rows: Rows | None = None, pages: tuple[Tensor, Tensor] | None = None
    ) -> Batch:
        rows = rows or self.rows
        keys, values = pages or self.pages(layer)
        of_rows = rows.tables, rows.lengths, rows.starts, self.heads.scale, rows.most, rows.visible
        return Batch(queries, keys, values, *of_rows, self._scales(layer))

    def _scales(self, layer: int) -> KVScales | None:
        return None if self.heads.kv_scales is None else self.heads.kv_scales.layer(layer)

    def _dense(self, layer: int, queries: Tensor) -> Tensor:
        batch, weights = self._batch(layer, queries), self.weights
        how: dict[str, Any] = {"backend": self.backend, "work": self.dense_work}
        if isinstance(weights, LayersEvidence):
            return weights.attend(layer, batch, None, self.dense_work)
        if isinstance(weights, BlockMemory) and layer in weights.index:
            first = (weights.index[layer] * weights.ranks.count + weights.ranks.rank) * self.heads.kv
            rows = slice(first, first + self.heads.kv)
            remembered = weights.memory[:, rows], weights.places, weights.decay
            out = paged_attention_remembering(batch, weights.block_size, *remembered, **how)
            return paged_attention(batch, **how) if weights.apart else out
        if self.prompts is not None:
            return attend_to_prompts(self.prompts, batch)
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
        if isinstance(weights, LayersEvidence):
            return weights.attend(layer, batch, blocks, work)
        if isinstance(weights, Tensor):
            out, _ = paged_attention_with_read_weights(batch, blocks, means, weights_out=weights[at], **how)
            return out
        return paged_attention(batch, blocks, means, **how)

    def _chosen(self, layer: int, queries: Tensor, chosen: ChosenReads) -> Tensor:
        outs, pages = [], self.pages(layer)
        for part in chosen.parts:
            rows, own, scale = part.rows, queries[part.queries], self.heads.scale
            choosing = own if part.choosers is None else own[part.choosers]
            blocks = choose_blocks(choosing, chosen.means[layer], part.page_numbers, part.choice, scale, self.backend)
            if chosen.fetch is not None:
                blocks = chosen.fetch(layer, blocks)
            work = plan_reads(self.heads, rows, self.backend, chosen.tuning, blocks)
            outs.append(paged_attention(self._batch(layer, own, rows, pages), blocks, None, self.backend, work))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def plan_reads(
    heads: Heads,
    rows: Rows,
    backend: Backend,
    tuning: Tuning | None = None,
    blocks: BlockLists | None = None,
    means: list[GroupMeans] | None = None,
) -> Work | None:
    """Return the plan that Triton makes from lengths, or from lists if there are any, for all layers that read alike.

    Other backends need none: None.
    """
    if backend != "triton":
        return None
    how = PAGE_SIZE, blocks, None if means is None else means[0], tuning, heads.kv_scales is not None
    return plan_work(heads.kv, heads.group, heads.dim, rows.most, rows.tables, rows.lengths, *how)
