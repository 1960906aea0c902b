"""How a dense pass reads KV in tiers: whole sequences are brought together on the GPU, layer by layer."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from specahead.engine.kv.group_means import GroupMeanPool, make_means
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV
from specahead.engine.kv.tier_memory import TierCounters, TierMemory, bring_hits, bring_misses, rows_of, run_beside


class StagedReads:
    """Whole sequences, brought together from the GPU and the backing store: always possible, seldom fast.

    Layers that are kept on the GPU are read where they lie. Pages from the backing store come while the layer before
    runs, on a side stream; pages in cache lines when the layer's own KV has been written. `tables` has the block table
    of each sequence in the pass, int32 [pages].
    """

    def __init__(
        self,
        memory: TierMemory,
        kept: dict[int, tuple[Tensor, Tensor]],
        sequences: list[SequenceKV],
        counters: TierCounters,
    ) -> None:
        """kept: keys and values of the layers that are kept on the GPU, by their number.

        Raises ValueError if there is no room for so many pages.
        """
        pages = np.concatenate([sequence.table() for sequence in sequences])
        if len(pages) > memory.staged_pages:
            raise ValueError(f"{len(pages)} pages to bring together, there is room for {memory.staged_pages}")
        ends = np.cumsum([len(sequence.pages) for sequence in sequences])
        self.tables = [
            np.arange(end - len(sequence.pages), end, dtype=np.int32)
            for sequence, end in zip(sequences, ends, strict=True)
        ]
        self._memory, self._kept, self._counters = memory, kept, counters
        self._wanted = rows_of(pages, memory.kv_heads, memory.device)
        self._lines: dict[int, Tensor] = {}
        self._missed = torch.zeros(len(sequences), dtype=torch.int64, device=memory.device)  # rows
        counts = torch.tensor([len(sequence.pages) * memory.kv_heads for sequence in sequences])
        self._owner = torch.arange(len(sequences)).repeat_interleave(counts).to(memory.device)
        self._arrived: dict[int, torch.cuda.Event | None] = {}
        counters.stages += 1

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [pages, kv_heads, PAGE_SIZE, head_dim]; to be called for each layer in turn."""
        if layer in self._kept:
            return self._kept[layer]
        memory = self._memory
        index = memory.layers.index(layer)
        if index not in self._arrived:
            self._bring_misses(index)
        arrived = self._arrived.pop(index)
        if index + 1 < len(memory.layers):  # its buffer was last read by layer index - 1, which has been launched
            self._bring_misses(index + 1)
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        bring_hits(memory, index, index % 2, self._lines.pop(index))
        return memory.staging[index % 2]

    def count_fetched(self) -> list[int]:
        """After the pass: count and return how many (layer, KV head, token) triples of each sequence came."""
        missed = self._missed.tolist()
        self._counters.staged_pages += sum(missed)
        return [pages * PAGE_SIZE for pages in missed]

    def _bring_misses(self, index: int) -> None:
        memory = self._memory
        self._lines[index] = lines = memory.tables.line_of[index][self._wanted.long()]
        self._missed.index_add_(0, self._owner, (lines < 0).long())
        bring = partial(bring_misses, memory, index, index % 2, self._wanted, lines)
        self._arrived[index] = run_beside(memory.link, bring)
        if memory.link is not None:
            lines.record_stream(memory.link)


def make_staged_means(
    memory: TierMemory, pages: np.ndarray, slots: Tensor, pool: GroupMeanPool, counters: TierCounters
) -> None:
    """Make the means of groups in the layers in tiers, layer by layer from pages that are brought together.

    pages: int32 [groups, pages of a group]; slots: [groups] int64, where the means go in the pool.
    """
    at_once = max(1, memory.staged_pages // pages.shape[1])  # groups
    missed = torch.zeros((), dtype=torch.int64, device=memory.device)
    for first in range(0, len(pages), at_once):
        part = pages[first : first + at_once]
        staged = np.arange(part.size).reshape(part.shape)
        rows = rows_of(part.reshape(-1), memory.kv_heads, memory.device)
        for index, layer in enumerate(memory.layers):
            lines = memory.tables.line_of[index][rows.long()]  # negative where a row is only in the store
            bring_hits(memory, index, 0, lines)
            bring_misses(memory, index, 0, rows, lines)
            missed += (lines < 0).sum()
            keys, values = memory.staging[0]
            make_means([keys], [values], staged, slots[first : first + at_once], pool, layer)
    counters.staged_pages += int(missed)
