"""The reads of a pass's layers: everything, or lists made before the pass or in it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.fetch import ChosenFetcher, FetchPlan
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.model.decoder import Attend, Decoder, PassTokens
from specahead.engine.model.head import StateTap
from specahead.engine.model.layer_attention import (
    ChosenPart,
    ChosenReads,
    Heads,
    LayerAttention,
    ListedReads,
    Rows,
    plan_reads,
)
from specahead.engine.model.modules import ModulesDecoder
from specahead.engine.steps.shapes import Choosers, PassShape
from specahead.kernels.backends import Backend
from specahead.kernels.chosen_blocks import BlockRule, plan_choice
from specahead.kernels.paged_attention import BlockLists, GroupMeans, Tuning, Work

CHOOSING_AT_ONCE = 512  # tokens that choose blocks for themselves: each takes a row of scores over all pages


@dataclass(frozen=True)
class PagedModel:
    """A model, the KV that its passes read and write, and what attends in them."""

    decoder: Decoder | ModulesDecoder
    kv: KVCache
    attention: Backend
    drafting: Decoder | None = None
    """Runs passes that draft, and tokens that a later pass judges (PassShape.light); None: the decoder does."""
    tap: StateTap | None = None
    """Takes the states of the tokens, which a head reads; None: nobody does."""

    @property
    def heads(self) -> Heads:
        """What attention needs to know of the model's heads."""
        kv_heads, dim = self.kv.kv_heads, self.kv.k_pages[0].shape[3]
        return Heads(kv_heads, self.decoder.heads // kv_heads, dim, self.decoder.attention_scale, self.kv.scales)

    def attends(self, rows: Rows) -> LayerAttention:
        """Return attention over the KV's own pages, which reads everything so far."""
        return LayerAttention(self.heads, rows, self.kv.layer_pages, self.attention)

    def plan(
        self,
        rows: Rows,
        tuning: Tuning | None = None,
        blocks: BlockLists | None = None,
        means: list[GroupMeans] | None = None,
    ) -> Work | None:
        """Return the plan of what layers read that read alike (`plan_reads`)."""
        return plan_reads(self.heads, rows, self.attention, tuning, blocks, means)

    def run(self, tokens: PassTokens, attend: Attend, logits_rows: Tensor | None = None) -> Tensor:
        """Run the model on tokens, as `Decoder.run` does."""
        return self.decoder.run(tokens, self.kv, attend, logits_rows)


def listed_layers(shape: PassShape, kv: KVCache) -> dict[int, int]:
    """Return the number of each layer that has lists, among these."""
    return {layer: i for i, layer in enumerate(shape.sparse_layers(kv.num_layers))}


def listed_reads(
    model: PagedModel,
    rows: Rows,
    shape: PassShape,
    given: dict[str, Tensor],
    fetched: FetchPlan | None = None,
    tuning: Tuning | None = None,
) -> ListedReads:
    """Return the reads by the lists and counts in `given`, with the means that stand in for other blocks."""
    means: list[GroupMeans] | None = None
    if shape.read.groups:
        assert model.kv.means is not None
        means = model.kv.means.over(given["group_tables"], given["group_counts"])
    lines, wait = (None, None) if fetched is None else (fetched.lines, fetched.wait)
    blocks = BlockLists(given["lists"], given["counts"], shape.read.block_size, lines)
    work = model.plan(rows, tuning, blocks, means)
    return ListedReads(blocks, listed_layers(shape, model.kv), work, means, wait)


def chosen_reads(
    rule: BlockRule,
    kv: KVCache,
    shape: PassShape,
    given: dict[str, Tensor],
    fetches: ChosenFetcher | None = None,
    tuning: Tuning | None = None,
) -> ChosenReads:
    """Return the reads of a model that chooses blocks by itself. The shape says which tokens choose.

    given: the tensors of the pass (buffers.py). fetches: of a step that fetches what it reads; else None.
    """
    assert kv.page_means is not None
    parts, slots = _choosing_parts(rule, kv.kv_heads, shape, given), given["slots"]
    numbers = given["page_numbers"] if "page_numbers" in given else slots.div(PAGE_SIZE, rounding_mode="floor")
    return ChosenReads(kv.k_pages, kv.page_means, slots, numbers, parts, tuning, fetches)


def _choosing_parts(rule: BlockRule, kv_heads: int, shape: PassShape, given: dict[str, Tensor]) -> list[ChosenPart]:
    """Cut a pass into parts: a single one if first tokens choose for others, else parts of CHOOSING_AT_ONCE tokens."""
    starts, lengths, tables = given["query_starts"], given["lengths"], given["block_tables"]
    numbers = given.get("page_number_tables", tables)
    if shape.choosers is Choosers.NONE:
        return []
    if shape.choosers is Choosers.FIRST:
        rows = Rows(starts, lengths, tables, shape.queries)
        seen = (lengths - starts.diff() + 1).clamp(max=lengths)
        choice = plan_choice(rule, seen, lengths, kv_heads, shape.queries)
        return [ChosenPart(slice(None), rows, numbers, starts[:-1].clamp(max=shape.rows - 1).long(), choice)]
    row = torch.arange(shape.rows + 1, dtype=torch.int32, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), row[:-1], right=True).clamp(max=shape.sequences - 1)
    seen = (given["positions"] + 1).where(given["slots"] >= 0, 0).int()
    parts = []
    for first in range(0, shape.rows, CHOOSING_AT_ONCE):
        here = slice(first, min(shape.rows, first + CHOOSING_AT_ONCE))
        own, of_rows = seen[here], tables[sequence[here]]
        rows = Rows(row[: len(own) + 1], own, of_rows, 1)
        numbers_of_rows = of_rows if numbers is tables else numbers[sequence[here]]
        parts.append(ChosenPart(here, rows, numbers_of_rows, None, plan_choice(rule, own, own, kv_heads, 1)))
    return parts
