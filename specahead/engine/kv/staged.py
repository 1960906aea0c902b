"""How a dense pass reads KV in tiers: whole sequences are brought together on the GPU, layer by layer."""

import numpy as np
import torch
from torch import Tensor

from specahead.engine.kv.group_means import GroupMeanPool, make_means
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.kv.tier_memory import TierCounters, TierMemory, bring_rows, rows_of, run_beside
from specahead.engine.parallel.ranks import Ranks


class StagedReads:
    """Whole sequences, brought together from the GPU and the backing store: always possible, seldom fast.

    Pages from the backing store come while the layer before runs, on a side stream; pages in cache lines when the
    layer's own KV has been written. Each rank brings its own heads.

    pages: the page numbers of each sequence, int32 [pages].
    tables: the block table of each sequence in the staged pages, int32 [pages].
    """

    def __init__(self, memory: TierMemory, pages: list[np.ndarray], counters: TierCounters, ranks: Ranks) -> None:
        """Raises ValueError if there are more pages than there is room for."""
        together = np.concatenate(pages)
        if len(together) > memory.staged_pages:
            raise ValueError(f"{len(together)} pages to bring together, there is room for {memory.staged_pages}")
        self.pages = pages
        ends = np.cumsum([len(each) for each in pages])
        self.tables = [np.arange(end - len(each), end, dtype=np.int32) for each, end in zip(pages, ends, strict=True)]
        self._memory, self._counters, self._ranks = memory, counters, ranks
        self._wanted = rows_of(together, memory.kv_heads, memory.device)
        if memory.link is not None:  # it may still copy the last layer, if no token reads that layer
            self._wanted.record_stream(memory.link)
        self._lines: dict[int, Tensor] = {}
        self._missed = torch.zeros(len(pages), dtype=torch.int64, device=memory.device)  # rows, on all ranks
        counts = torch.tensor([len(each) * memory.kv_heads for each in pages])
        self._owner = torch.arange(len(pages)).repeat_interleave(counts).to(memory.device)
        self._arrived: dict[int, torch.cuda.Event | None] = {}
        counters.stages += 1

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [pages, kv_heads, PAGE_SIZE, head_dim]; called for each layer in turn."""
        memory = self._memory
        if layer not in self._arrived:
            self._bring_misses(layer)
        arrived = self._arrived.pop(layer)
        if layer + 1 < len(memory.on_gpu):  # its buffer was last read by the layer before, which has been launched
            self._bring_misses(layer + 1)
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        bring_rows(memory, layer, layer % 2, self._lines.pop(layer), stored=False)
        return memory.staging[layer % 2]

    def count_fetched(self) -> list[int]:
        """After the pass: count and return how many (layer, KV head, token) triples of each sequence came."""
        missed = self._missed.tolist()
        self._counters.staged_pages += sum(missed)
        return [pages * PAGE_SIZE for pages in missed]

    def _bring_misses(self, layer: int) -> None:
        memory = self._memory
        self._lines[layer] = lines = memory.tables.line_of[layer][self._wanted.long()]
        self._missed.index_add_(0, self._owner, (lines < 0).long())
        if layer + 1 == len(memory.on_gpu):
            self._ranks.sum(self._missed)

        def bring() -> None:
            bring_rows(memory, layer, layer % 2, self._wanted.masked_fill(lines >= 0, -1), stored=True)

        self._arrived[layer] = run_beside(memory.link, bring)
        if memory.link is not None:
            lines.record_stream(memory.link)


def make_staged_means(
    memory: TierMemory, pages: np.ndarray, slots: list[int], pool: GroupMeanPool, counters: TierCounters, ranks: Ranks
) -> None:
    """Make the means of groups, layer by layer, from pages that are brought together. All ranks run this together.

    pages: int32 [groups, pages of a group]. slots: the slot of each group's means in the pool.
    """
    at_once = max(1, memory.staged_pages // pages.shape[1])  # groups
    missed = torch.zeros((), dtype=torch.int64, device=memory.device)
    if memory.link is not None:  # it may still copy the last layer of a pass, which no token reads
        torch.cuda.current_stream().wait_stream(memory.link)
    for first in range(0, len(pages), at_once):
        part = pages[first : first + at_once]
        staged = np.arange(part.size).reshape(part.shape)
        rows = rows_of(part.reshape(-1), memory.kv_heads, memory.device)
        for layer in range(len(memory.on_gpu)):
            lines = memory.tables.line_of[layer][rows.long()]  # negative where a row is only in the store
            bring_rows(memory, layer, 0, lines, stored=False)
            bring_rows(memory, layer, 0, rows.masked_fill(lines >= 0, -1), stored=True)
            missed += (lines < 0).sum()
            keys, values = memory.staging[0]
            make_means([keys], [values], staged, slots[first : first + at_once], pool, layer)
    counters.staged_pages += int(ranks.sum(missed))
