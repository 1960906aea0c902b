"""How a sparse pass reads KV in tiers: it requests the pages that it lists, and each layer waits for its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.kv.tier_memory import PROGRAMS, TierMemory, run_beside
from specahead.kernels.backends import Backend
from specahead.kernels.kv_gather import gather_layers, wait_for_layer
from specahead.kernels.residency import ListedBlocks, Transfers, count_missing_blocks, find_block_lines, request_blocks


@dataclass
class FetchPlan:
    """The lists of one sparse pass, of all layers. It must be kept until the last layer has waited."""

    lines: Tensor
    """[layers, sequences, kv_heads, width * pages of a block] int32, the cache lines of the listed pages, which are
    filled when `wait` has returned for the layer."""
    tallies: Tensor
    """[3 + sequences] int32: the other four, so that ranks add them up at once."""
    transfers: Transfers
    """The pages that are copied from the backing store."""
    done: Tensor
    """[layers] int32, how many programs have finished each layer."""
    backend: Backend
    ended: torch.cuda.Event | None = None
    """The end of all copies; None on a CPU."""

    @property
    def listed(self) -> Tensor:
        """[1] int32, listed blocks of all layers and KV heads."""
        return self.tallies[0:1]

    @property
    def fetched(self) -> Tensor:
        """[1] int32, pages that are copied from the backing store."""
        return self.tallies[1:2]

    @property
    def overflow(self) -> Tensor:
        """[1] int32, listed pages that found no cache line. If there are any, the pass is void."""
        return self.tallies[2:3]

    @property
    def missed(self) -> Tensor:
        """[sequences] int32, listed blocks that were not wholly in cache lines before."""
        return self.tallies[3:]

    def wait(self, index: int) -> None:
        """Have the current stream wait until this layer's pages are there; to be called once for each layer."""
        wait_for_layer(self.done, index, PROGRAMS, self.backend)
        if self.ended is not None and index + 1 == len(self.done):
            torch.cuda.current_stream().wait_event(self.ended)  # so that nothing of a step outlasts it


def request_listed(
    memory: TierMemory, lists: Tensor, counts: Tensor, block_size: int, page_tables: Tensor, round: Tensor
) -> FetchPlan:
    """Request all pages that a pass lists; `start_copies` copies those that are missing.

    lists: [layers, sequences, kv_heads, width] int32 blocks.
    counts: [layers, sequences, kv_heads] int32.
    block_size: tokens of a block, whole pages.
    page_tables: [sequences, max_pages] int32, page numbers.
    round: [1] int32, the number of this step (KVCache.next_round).
    Launches only: works inside a CUDA graph.
    """
    listed = ListedBlocks(lists, counts, page_tables, memory.kv_heads, block_size // PAGE_SIZE)
    missed = count_missing_blocks(memory.tables, listed, memory.backend)
    transfers = request_blocks(memory.tables, listed, round, memory.backend)
    # Line 0 where there is none, since attention may look there.
    lines = find_block_lines(memory.tables, listed, memory.backend, absent=0)
    sums = [part.sum(dtype=torch.int32).view(1) for part in (counts, transfers.counts, transfers.overflow)]
    done = torch.zeros(len(lists), dtype=torch.int32, device=memory.device)
    return FetchPlan(lines, torch.cat([*sums, missed]), transfers, done, memory.backend)


def start_copies(memory: TierMemory, plan: FetchPlan) -> FetchPlan:
    """Copy the missing pages layer by layer, beside the current stream; return the plan. Launches only."""
    transfers = plan.transfers
    copying = transfers.pages, transfers.lines, transfers.counts, plan.done, PROGRAMS, memory.backend
    plan.ended = run_beside(memory.link, lambda: gather_layers(memory.copies, *copying))
    return plan
