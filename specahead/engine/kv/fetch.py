"""How a sparse pass reads KV in tiers: it requests the pages that it lists, and each layer waits for its own.

A model that chooses blocks by itself knows what a layer reads only when that layer runs. So a pass requests the blocks
that each layer chose in the last round, and a layer fetches by itself what else it chooses in this one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.kv.tier_memory import PROGRAMS, TierMemory, run_beside
from specahead.kernels.backends import Backend
from specahead.kernels.kv_gather import gather_blocks, gather_layers, wait_for_layer
from specahead.kernels.paged_attention import BlockLists
from specahead.kernels.residency import ListedBlocks, Transfers, count_missing_blocks, find_block_lines, request_blocks


@dataclass
class RequestedPages:
    """The listed pages of all layers of a pass, or of one layer, after the residency tables gave them lines."""

    lines: Tensor
    """[layers, sequences, kv_heads, width * pages of a block] int32, the cache lines of the listed pages, which are
    filled once the missing ones are copied."""
    counts: Tensor
    """[layers, sequences, kv_heads] int32, listed blocks."""
    block_pages: int
    """Pages of a block."""
    missed: Tensor
    """[sequences] int32, listed blocks that were not wholly in cache lines before."""
    transfers: Transfers
    """The pages to copy from the backing store. If pages find no cache line, the pass is void."""


@dataclass
class FetchPlan(RequestedPages):
    """The lists of one sparse pass, of all layers. It must be kept until the last layer has waited."""

    page_counts: Tensor
    """[3 + sequences] int32, as `count_fetches` returns them."""
    done: Tensor
    """[layers] int32, how many programs have finished each layer."""
    backend: Backend
    ended: torch.cuda.Event | None = None
    """The end of all copies; None on a CPU."""

    @property
    def overflow(self) -> Tensor:
        """[1] int32, listed pages that found no cache line. If there are any, the pass is void."""
        return self.page_counts[2:3]

    def wait(self, index: int) -> None:
        """Have the current stream wait until this layer's pages are there; to be called once for each layer."""
        wait_for_layer(self.done, index, PROGRAMS, self.backend)
        if index + 1 == len(self.done):
            self.end()

    def end(self) -> None:
        """Have the current stream wait until all copies have ended, so that nothing of a step outlasts it."""
        if self.ended is not None:
            torch.cuda.current_stream().wait_event(self.ended)


def request_listed(
    memory: TierMemory,
    lists: Tensor,
    counts: Tensor,
    block_size: int,
    page_tables: Tensor,
    round: Tensor,
    layer: int | None = None,
) -> RequestedPages:
    """Request all pages that a pass, or one of its layers, lists. It only launches, so it works inside a CUDA graph.

    lists: [layers, sequences, kv_heads, width] int32 blocks.
    counts: [layers, sequences, kv_heads] int32.
    block_size: tokens of a block, whole pages.
    page_tables: [sequences, max_pages] int32, page numbers.
    round: [1] int32, the number of this step (KVCache.next_round).
    layer: the only layer that the lists are of; None: they are of all layers.
    """
    tables = memory.tables if layer is None else memory.tables.of_row(layer)
    listed = ListedBlocks(lists, counts, page_tables, memory.kv_heads, block_size // PAGE_SIZE)
    missed = count_missing_blocks(tables, listed, memory.backend)
    transfers = request_blocks(tables, listed, round, memory.backend)
    # Line 0 where there is none, since attention may look there.
    lines = find_block_lines(tables, listed, memory.backend, absent=0)
    return RequestedPages(lines, counts, listed.pages_per_block, missed, transfers)


def count_fetches(requests: Sequence[RequestedPages]) -> Tensor:
    """Count the pages of all requests of a pass, in one tensor, so that one sum over ranks is enough.

    Returns [3 + sequences] int32: the pages of listed blocks, the pages to copy, and the pages without a cache line;
    then, for each sequence, the pages of listed blocks that were not wholly in cache lines before.
    """
    transfers, pages = [each.transfers for each in requests], requests[0].block_pages
    listed = torch.cat([each.counts.flatten() for each in requests]).sum() * pages
    copied = torch.cat([each.counts for each in transfers]).sum()
    overflow = torch.cat([each.overflow for each in transfers]).sum()
    missed = torch.stack([each.missed for each in requests]).sum(0) * pages
    return torch.cat([torch.stack([listed, copied, overflow]), missed]).int()


def start_copies(memory: TierMemory, requested: RequestedPages) -> FetchPlan:
    """Start to copy the missing pages layer by layer, on a stream beside the current one. It only launches."""
    transfers, done = requested.transfers, torch.zeros(len(requested.lines), dtype=torch.int32, device=memory.device)
    copying = transfers.pages, transfers.lines, transfers.counts, done, PROGRAMS, memory.backend
    ended = run_beside(memory.link, lambda: gather_layers(memory.copies, *copying))
    counted = count_fetches([requested])
    return FetchPlan(**vars(requested), page_counts=counted, done=done, backend=memory.backend, ended=ended)


@dataclass(frozen=True)
class LastChoices:
    """The blocks that the layers of each sequence chose in its last round."""

    blocks: Tensor
    """[sequences of the runner + 1, layers, kv_heads, width] int32, -1 where there is none. The last is of nobody."""
    indices: Tensor
    """[sequences] int32, where those of each sequence of a pass are; -1: there is no sequence."""
    block_size: int
    """Tokens of a block, whole pages."""


class ChosenFetcher:
    """Fetches the blocks of each layer after its queries have chosen them. It only launches, for CUDA graphs.

    From the beginning it prefetches, beside the layers, the blocks that each layer chose in the last round. Layers read
    what they choose, whatever was prefetched. Prefetched pages are requested under the number before the step's, so
    that pages that are chosen may take their room.

    page_tables: [sequences, max_pages] int32, page numbers.
    round: [1] int32, the number of this step.
    last: what sequences chose last; `end` replaces it by what they have chosen in this step.
    """

    def __init__(self, memory: TierMemory, page_tables: Tensor, round: Tensor, last: LastChoices) -> None:
        self._memory, self._page_tables, self._round, self._last = memory, page_tables, round, last
        self._chosen: list[BlockLists] = []
        self._requests: list[RequestedPages] = []
        lists = last.blocks[last.indices.long()].transpose(0, 1).contiguous()
        counts = (lists >= 0).sum(3, dtype=torch.int32)
        requested = request_listed(memory, lists, counts, last.block_size, page_tables, round - 1)
        self._prefetch = start_copies(memory, requested)

    def __call__(self, layer: int, blocks: BlockLists) -> BlockLists:
        """Bring the blocks that a layer has chosen to cache lines; return them with the lines as `slots`."""
        memory, lists, counts = self._memory, blocks.lists[None], blocks.counts[None]
        self._prefetch.wait(layer)
        requested = request_listed(memory, lists, counts, blocks.block_size, self._page_tables, self._round, layer)
        copied, copies = requested.transfers, memory.copies
        gather_blocks(
            copies.sources[layer],
            copies.destinations[layer],
            copied.pages[0],
            copied.lines[0],
            copied.counts,
            4 * PROGRAMS,  # nothing else runs while a layer's pages are awaited
            memory.backend,
        )
        self._chosen.append(blocks)
        self._requests.append(requested)
        return replace(blocks, slots=requested.lines[0])

    def end(self) -> Tensor:
        """Remember what the layers that have run chose, and return the counts of the pass, as `count_fetches` does.

        Listed are the blocks that were chosen. Prefetched pages that nobody chose count as fetched and missed as well.
        """
        self._prefetch.end()
        lists = torch.stack([each.lists for each in self._chosen], 1)
        counts = torch.stack([each.counts for each in self._chosen], 1)
        beyond = torch.arange(lists.shape[3], device=lists.device) >= counts[..., None]
        remembered = self._last.blocks
        padding = 0, remembered.shape[3] - lists.shape[3]
        kept = F.pad(lists.masked_fill(beyond, -1), padding, value=-1)
        remembered[self._last.indices.long(), : len(self._chosen)] = kept
        counted, prefetched = count_fetches(self._requests), self._prefetch.page_counts
        counted[1] += prefetched[1]
        counted[3:] += prefetched[3:]
        return counted
