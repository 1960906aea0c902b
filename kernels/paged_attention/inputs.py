"""The inputs of paged attention: one layer's batch, lists of blocks, and the group means that stand in for the rest."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.kernels.kv_scales import EIGHT_BITS, KVScales

MOST_BEYOND = 128  # tokens after a sequence's end whose blocks may be listed, for later passes
VARIANCE_LIMIT = 2.0  # unless `GroupMeans` are given another


@dataclass(frozen=True)
class BlockLists:
    """The KV blocks that each (sequence, KV head) reads; `block_size` tokens divide a page or are whole pages.

    lists: [sequences, kv_heads, width] int32 logical blocks, ascending; some may lie up to MOST_BEYOND tokens after
        the sequence's end
    counts: [sequences, kv_heads] int32, valid entries of `lists`
    slots: [sequences, kv_heads, width * pages of a block] int32, where the listed pages lie: rows of the pages taken as
        [pages * kv_heads, page_size, head_dim], not negative; None: block tables tell it. Only for whole pages
    """

    lists: Tensor
    counts: Tensor
    block_size: int
    slots: Tensor | None = None

    def as_mask(self, blocks: int) -> Tensor:
        """Return which of a sequence's first `blocks` blocks are listed, [sequences, kv_heads, blocks] bool."""
        listed = torch.arange(self.lists.shape[2], device=self.lists.device) < self.counts[..., None]
        mask = torch.zeros(*self.counts.shape, blocks + 1, dtype=torch.bool, device=self.lists.device)
        return mask.scatter_(2, self.lists.where(listed, blocks).long().clamp(max=blocks), True)[..., :blocks]


@dataclass(frozen=True)
class GroupMeans:
    """Means of the keys and values of groups of `group_size` tokens, a whole number of blocks, as pages hold them.

    Of pages in 8 bits they are means of the 8-bit numbers, which stand for keys and values by the scales of the batch.

    k, v: [slots, kv_heads, head_dim] means; k_variance: the same shape, of each key dimension within the group
    tables: [sequences, max_groups] int32, slot of each group from the first token on
    counts: [sequences] int32, groups that have a mean; they end before the first query
    variance_limit: the most that the variance of a group's keys adds to a score, where its term of second order
        overshoots: keys may be far from normal
    """

    k: Tensor
    v: Tensor
    k_variance: Tensor
    tables: Tensor
    counts: Tensor
    group_size: int
    variance_limit: float = VARIANCE_LIMIT


@dataclass(frozen=True)
class Batch:
    """Queries and the pages that they attend to: the queries of a sequence stand at its last KV positions.

    queries: [tokens, heads, head_dim], the sequences one after another
    k_pages, v_pages: [pages, kv_heads, page_size, head_dim]; values in 8 bits [pages, kv_heads, head_dim, page_size]
    block_tables: [sequences, max_pages] int32, page of each logical page
    kv_lengths: [sequences] int32, tokens with KV, the queries' own included
    query_starts: [sequences + 1] int32, first query row of each sequence
    scale: of the scores. max_queries: no sequence has more queries; only Triton needs it
    visible: [tokens, 3] int32, for queries that are on different branches of one sequence: a query with the numbers
        (before, first, last) sees the KV positions below `before` and those from `first` up to `last` - 1; None: each
        query sees its own position and all before it
    scales: the layer's, for pages in 8 bits; None: pages have the dtype of the queries
    """

    queries: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_tables: Tensor
    kv_lengths: Tensor
    query_starts: Tensor
    scale: float
    max_queries: int = 0
    visible: Tensor | None = None
    scales: KVScales | None = None

    @property
    def heads(self) -> int:
        return self.queries.shape[1]

    @property
    def dim(self) -> int:
        return self.queries.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.k_pages.shape[1]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[2]


def check_batch(batch: Batch, blocks: BlockLists | None = None, means: GroupMeans | None = None) -> None:
    """Assert that heads, lists and means fit the pages and one another."""
    assert batch.heads % batch.kv_heads == 0
    assert batch.visible is None or batch.visible.shape == (len(batch.queries), 3)
    assert (batch.scales is None) == (batch.k_pages.dtype != EIGHT_BITS), "scales are of pages in 8 bits"
    if blocks is None:
        assert means is None, "means stand in for blocks that lists leave out"
        return
    size, page_size = blocks.block_size, batch.page_size
    assert size % page_size == 0 or page_size % size == 0
    assert blocks.slots is None or size % page_size == 0, "slots are of whole pages"
    assert means is None or means.group_size % size == 0
