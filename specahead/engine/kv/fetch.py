"""How a sparse pass reads KV in tiers: it requests the pages that it lists, and each layer waits for its own.

A model that chooses blocks by itself knows what a layer reads only when that layer runs, so each layer fetches for
itself. Blocks that the last round chose are usually still in cache lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
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
        if self.ended is not None and index + 1 == len(self.done):
            torch.cuda.current_stream().wait_event(self.ended)  # so that nothing of a step outlasts it


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


class ChosenFetcher:
    """Fetches the blocks of each layer after its queries have chosen them. It only launches, for CUDA graphs.

    page_tables: [sequences, max_pages] int32, page numbers.
    round: [1] int32, the number of this step.
    requests: those of all layers that have run. The step is void if pages of any of them found no cache line.
    """

    def __init__(self, memory: TierMemory, page_tables: Tensor, round: Tensor) -> None:
        self.requests: list[RequestedPages] = []
        self._memory, self._page_tables, self._round = memory, page_tables, round

    def __call__(self, layer: int, blocks: BlockLists) -> BlockLists:
        """Bring the blocks that a layer has chosen to cache lines; return them with the lines as `slots`."""
        memory, lists, counts = self._memory, blocks.lists[None], blocks.counts[None]
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
        self.requests.append(requested)
        return replace(blocks, slots=requested.lines[0])
