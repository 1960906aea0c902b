"""How a sparse pass reads KV in tiers: it requests what it lists, and layers wait for their pages alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.kv.pages import PAGE_SIZE
from engine.kv.tier_memory import PROGRAMS, TierMemory
from kernels.backends import Backend
from kernels.kv_gather import gather_blocks, gather_layers, wait_for_layer
from kernels.residency import Transfers, count_missing_blocks, find_block_lines, request_blocks


@dataclass(frozen=True)
class FetchPlan:
    """The lists of one sparse pass, of all layers in tiers. It must be kept until the last layer has waited.

    lines: [layers, sequences, kv_heads, width * pages of a block] int32, the cache lines of the listed pages, once
        `wait` has returned for the layer
    overflow: [] int32, listed pages that found no cache line. If there are any, the pass is void.
    missed: [sequences] int32, listed blocks that were not wholly in cache lines before
    transfers: what is copied from the backing store
    done: [layers] int32, how many programs have finished each layer
    ended: when all copies have; None on a CPU
    fetch_now: copies a layer's pages when the layer waits for them; None: the copies are under way
    """

    lines: Tensor
    overflow: Tensor
    missed: Tensor
    transfers: Transfers
    done: Tensor
    ended: torch.cuda.Event | None
    backend: Backend
    fetch_now: Callable[[int], None] | None

    def wait(self, index: int) -> None:
        """Let the current stream wait until this layer's pages are there; to be called once for each layer."""
        if self.fetch_now is not None:
            self.fetch_now(index)
        else:
            wait_for_layer(self.done, index, PROGRAMS, self.backend)
        if self.ended is not None and index + 1 == len(self.done):
            torch.cuda.current_stream().wait_event(self.ended)  # so that nothing of a step outlasts it


def fetch_listed(
    memory: TierMemory,
    lists: Tensor,
    counts: Tensor,
    block_size: int,
    page_tables: Tensor,
    round: Tensor,
    overlap: bool = True,
) -> FetchPlan:
    """Request all pages that a pass lists, and start to copy those that are missing, layer by layer on a side stream.

    lists: [layers, sequences, kv_heads, width] int32 blocks, of the layers that lie in tiers
    counts: [layers, sequences, kv_heads] int32
    block_size: tokens of a block, whole pages
    page_tables: [sequences, max_pages] int32, page numbers
    round: [1] int32, the number of this step (KVCache.next_round)
    overlap: False: a layer's pages are copied in `wait`, on the stream that waits (to compare with)
    Launches only: works inside a CUDA graph.
    """
    listed = lists, counts, page_tables, memory.kv_heads, block_size // PAGE_SIZE
    missed = count_missing_blocks(memory.tables, *listed, memory.backend)
    transfers = request_blocks(memory.tables, *listed, round, memory.backend)
    # Line 0 where there is none, since attention may look there.
    lines = find_block_lines(memory.tables, *listed, memory.backend, absent=0)
    overflow = transfers.overflow.sum(dtype=torch.int32)
    done = torch.zeros(len(lists), dtype=torch.int32, device=memory.device)
    found = lines, overflow, missed, transfers, done
    if not overlap:
        return FetchPlan(*found, None, memory.backend, partial(_fetch_layer, memory, transfers))
    return FetchPlan(*found, _start_copies(memory, transfers, done), memory.backend, None)


def _start_copies(memory: TierMemory, transfers: Transfers, done: Tensor) -> torch.cuda.Event | None:
    """Copy all layers' pages beside what the current stream does; returns when that has ended, None on a CPU."""
    copying = transfers.pages, transfers.lines, transfers.counts, done, PROGRAMS, memory.backend
    if memory.link is None:
        gather_layers(memory.copies, *copying)
        return None
    memory.link.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(memory.link):
        gather_layers(memory.copies, *copying)
        ended = torch.cuda.Event()
        ended.record()
    return ended


def _fetch_layer(memory: TierMemory, transfers: Transfers, index: int) -> None:
    rows = transfers.pages[index], transfers.lines[index], transfers.counts[index : index + 1]
    copies = memory.copies
    gather_blocks(copies.sources[index], copies.destinations[index], *rows, PROGRAMS, memory.backend)
