"""KV in tiers: a backing store in host memory has a copy of every full page, and the GPU holds as many pages as fit.

GPU memory is cut into GPU pages: one page of all layers and KV heads each. The life of a page:

    grow ──> in a GPU page, ──(full)──> copied to ──(GPU pages are short)──> left to the clock ──> in the store alone
             written by steps           the store                            its cache lines           │   ▲
                                                                             hold it still     fetched │   │ evicted
                                                                                                       ▼   │
                                                                             in a cache line, a (layer, head) at a time

As long as every page of a pass is in a GPU page, the pass runs as without tiers: block tables name GPU pages. When GPU
pages run short for the first time, the offload becomes `active`: the residency tables (kernels.residency) are made,
full pages are left to the eviction clock as soon as they are stored, and readers use the tables: sparse steps fetch the
blocks that they list (engine.kv.fetch), other steps have whole sequences brought together (engine.kv.staged). New pages
take GPU pages from the clock, which forgets the copies that it had put there: the store has them.
"""

import os
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from specahead.engine.kv.backing_store import BackingStore
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.fetch import ChosenFetcher, FetchPlan, LastChoices, request_listed, start_copies
from specahead.engine.kv.gpu_pages import GpuPages
from specahead.engine.kv.host_memory import host_zeros
from specahead.engine.kv.pages import PAGE_SIZE, OutOfPages, SequenceKV, pages_for
from specahead.engine.kv.staged import StagedReads, make_staged_means
from specahead.engine.kv.tier_memory import Pages, TierCounters, TierMemory
from specahead.engine.parallel.commands import Command
from specahead.engine.parallel.ranks import ALONE, Ranks
from specahead.kernels.kv_scales import KVScales

COPIED_AT_ONCE = 64  # full pages that one copy takes to the store; fewer if GPU pages are short
# Once the offload is active, the clock gets at least 1 / CLOCK_SHARE of the GPU pages, where that is possible.
CLOCK_SHARE = 4


class TieredKV(KVCache):
    """A KV cache whose page numbers are indices in the backing store.

    `memory` holds the KV, `store` knows which pages are stored, `resident` which GPU page each page has.
    `offload_active` says whether rows must be looked up in the residency tables.
    """

    offloads = True

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        gpu_pages: int,
        pages: int,
        longest: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        ranks: Ranks = ALONE,
        scales: KVScales | None = None,
        page_means: bool = False,
    ) -> None:
        """gpu_pages: how many pages lie on the GPU at once. pages: how many the backing store has.

        longest: the most tokens of a sequence; staged reads have room for them. ranks, scales, page_means: as for
        KVCache. The means of all pages lie on the GPU.
        Raises ValueError for sizes that do not fit, MemoryError if the host has no room.
        """
        device = torch.device(device)
        if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            raise ValueError(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 lets no copies run beside a step, which waits for them: unset it, or "
                "leave --host-kv-memory out"
            )
        if not 0 < gpu_pages <= pages:
            raise ValueError(f"{gpu_pages} GPU pages for {pages} pages in the backing store: expected 1 to {pages}")
        of_gpu = dtype, device, gpu_pages, ranks, scales, page_means
        super().__init__(num_layers, kv_heads, head_dim, pages, *of_gpu)
        self._freed: list[int] = []
        self.pool.freed = self._freed
        stored = self._make_store(num_layers, (pages, kv_heads, PAGE_SIZE, head_dim), self.k_pages[0].dtype)
        on_gpu = [self.layer_pages(layer) for layer in range(num_layers)]
        self.memory = TierMemory.make(on_gpu, stored, pages_for(longest), ranks.followers)
        self.store = BackingStore(self.memory)
        self.resident = GpuPages(gpu_pages, pages)
        self.counters = TierCounters()
        self.offload_active = False
        self._round = 0  # of the residency tables
        self._away = 0  # pages that are in the store alone
        self._last_work: list[SequenceKV] = []

    def _make_store(self, layers: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Pages]:
        return [(host_zeros(shape, dtype, self.device), host_zeros(shape, dtype, self.device)) for _ in range(layers)]

    @property
    def totals(self) -> dict[str, float]:
        page_bytes = 2 * self.k_pages[0][0, 0].nbytes
        values = self.counters.values(page_bytes, self.num_layers * self.all_kv_heads)
        return {f"kv_{name}": value for name, value in values.items()}

    @property
    def gauges(self) -> dict[str, float]:
        return {
            "kv_gpu_pages": self.resident.count,
            "kv_gpu_pages_given": self.resident.count - self.resident.free,  # the clock has the others
            "kv_offload_active": float(self.offload_active),
        }

    # Where pages lie.

    def gpu_pages(self, sequence: SequenceKV) -> np.ndarray:
        return self.resident.of[sequence.table()]

    def is_resident(self, sequence: SequenceKV) -> bool:
        return not self._away or self.resident.hold(sequence.table())

    # Before a pass.

    def begin_pass(self, work: list[tuple[SequenceKV, int]]) -> None:
        self._forget_freed()
        super().begin_pass(work)
        self._forget_freed()  # pages that were kept for their prefix, and have a new owner now
        self._offer_full_pages(work)
        new, reads_stored = self._needs(work)
        if not self.offload_active and (reads_stored or len(new) > self.resident.free):
            self._activate_offload()
        if self.offload_active:
            self._leave_to_clock(len(new))
        if len(new) > self.resident.free:
            for sequence, _ in work:
                self.truncate(sequence, sequence.length)
            raise OutOfPages(
                f"{len(new)} GPU pages wanted, {self.resident.free} of {self.resident.count} can be given: "
                "raise --kv-memory, or lower --max-sessions or --prefill-chunk"
            )
        self.resident.give(new)
        if self.offload_active:
            self._pin(new)

    def _forget_freed(self) -> None:
        """Drop pages that no sequence holds any more from the GPU and from the store."""
        if not self._freed:
            return
        freed = list(dict.fromkeys(self._freed))
        self._freed.clear()
        if self.offload_active:
            self.memory.drop_pages(freed)
        self._away -= int((self.store.holds[freed] & (self.resident.of[freed] < 0)).sum())
        self.store.forget(freed)
        self.resident.take_back(freed)
        if self.offload_active and self.pool.held <= self.resident.count and not self._holds_away():
            # Every held page lies in a GPU page: what the clock has put elsewhere is forgotten.
            self.offload_active = False

    def _holds_away(self) -> bool:
        """Whether a sequence holds a page without a GPU page. Pages kept for their prefix only do not count."""
        away = np.flatnonzero(self.store.holds & (self.resident.of < 0)).tolist()
        return any(self.pool.references[page] for page in away)

    def _offer_full_pages(self, work: list[tuple[SequenceKV, int]]) -> None:
        """Offer the committed pages of the sequences of this pass and of the last one to the store.

        A page that a later pass may write again stays on the GPU: it could not be written once it is only in the store.
        """
        for sequence in {id(s): s for s in (*self._last_work, *(s for s, _ in work))}.values():
            self._offer(sequence, int(min(sequence.length, sequence.settled)) // PAGE_SIZE)
        self._last_work = [sequence for sequence, _ in work]
        self.store.take_up_copies(wait=False)
        if self.store.waiting >= COPIED_AT_ONCE:
            self._copy_to_store()

    def _offer(self, sequence: SequenceKV, count: int) -> None:
        """Offer the first `count` pages of a sequence to the store."""
        dense = sequence.dense and self.page_means is None  # models that choose blocks read no long text densely
        self.store.offer(sequence.table()[sequence.stored : count], dense)
        sequence.stored = max(sequence.stored, count)

    def _copy_to_store(self) -> None:
        self.counters.stored_pages += self.store.start_copies(self.resident.of)

    def _needs(self, work: list[tuple[SequenceKV, int]]) -> tuple[list[int], bool]:
        """Return the pages that need a GPU page because they are written, and whether pages that have none are read."""
        new: list[int] = []
        reads_stored = False
        for sequence, tokens in work:
            written = sequence.pages[sequence.length // PAGE_SIZE : pages_for(sequence.length + tokens)]
            new += [page for page in written if self.resident.of[page] < 0]
            old = sequence.table()[: sequence.length // PAGE_SIZE]
            reads_stored = reads_stored or (self._away > 0 and not self.resident.hold(old))
        return new, reads_stored

    def _activate_offload(self) -> None:
        self.memory.clear_tables()
        self.offload_active = True
        self.counters.offloads += 1
        self._pin(np.flatnonzero(self.resident.of >= 0).tolist())

    def _leave_to_clock(self, wanted: int) -> None:
        """Take GPU pages from stored pages until there are `wanted` to give out, and some for the clock."""
        floor = wanted + self.resident.count // CLOCK_SHARE
        leaving = self.store.take_movable()
        if self.resident.free + len(leaving) < floor and self.store.is_behind:
            self._copy_to_store()
            self.store.take_up_copies(wait=True)
            leaving += self.store.take_movable()
        leaving += self.store.take_movable_dense(floor - self.resident.free - len(leaving))
        if leaving:
            self.memory.leave_to_clock(leaving)
            self.resident.take_back(leaving)
            self._away += len(leaving)

    def _pin(self, pages: list[int]) -> None:
        """Enter in the tables that these pages lie in their GPU pages."""
        self.memory.pin_pages(pages, self.resident.of[pages].tolist(), self._round)

    # Reading KV that is not on the GPU.

    def next_round(self) -> int:
        self._round += 2  # ChosenFetcher takes the number before as well
        return self._round

    def fetch_plan(
        self, lists: Tensor, counts: Tensor, block_size: int, page_tables: Tensor, round: Tensor
    ) -> FetchPlan | None:
        plan = start_copies(self.memory, request_listed(self.memory, lists, counts, block_size, page_tables, round))
        self.ranks.sum(plan.page_counts)  # a pass that is void on one rank is void on all
        return plan

    def chosen_fetcher(self, page_tables: Tensor, round: Tensor, last: LastChoices) -> ChosenFetcher | None:
        return ChosenFetcher(self.memory, page_tables, round, last)

    def count_step(self, results: Mapping[str, np.ndarray]) -> bool:
        overflow = int(results["overflow"][0])
        self.counters.fetched_pages += int(results["fetched"][0])
        self.counters.overflow_pages += overflow
        if overflow:
            return False
        self.counters.hit_pages += max(0, int(results["listed"][0]) - int(results["missed"].sum()))
        return True

    def stage(self, sequences: list[SequenceKV]) -> Iterator[StagedReads]:
        parts: list[list[SequenceKV]] = []
        room = 0
        for sequence in sequences:
            if len(sequence.pages) > room:
                parts.append([])
                room = self.memory.staged_pages
            parts[-1].append(sequence)
            room -= len(sequence.pages)
        for part in parts:
            yield self.stage_pages([sequence.table() for sequence in part])

    def stage_pages(self, tables: list[np.ndarray]) -> StagedReads:
        return StagedReads(self.memory, tables, self.counters, self.ranks)

    # Group means.

    def make_means(self, pages: np.ndarray, slots: list[int]) -> None:
        gpu_pages = self.resident.of[pages]
        if (gpu_pages >= 0).all():
            self.make_means_on_gpu(gpu_pages, slots)
        else:
            self.make_staged_means(pages, slots)

    def make_staged_means(self, pages: np.ndarray, slots: list[int]) -> None:
        """Make means as `make_means` does, on all ranks, from pages that are first brought together."""
        assert self.means is not None
        self.ranks.followers.tell(Command.MAKE_STAGED_MEANS, [pages.shape[1], *slots, *pages.flatten().tolist()])
        make_staged_means(self.memory, pages, slots, self.means, self.counters, self.ranks)

    # Checks, and sequences.

    def check_writable(self, pages: int, why: str) -> None:
        if self.resident.count < pages:
            raise ValueError(
                f"{self.resident.count} KV pages of {PAGE_SIZE} fit on the GPU; {why}, write up to {pages} at once: "
                "raise kv_memory, or lower max_sessions or prefill_chunk"
            )

    def release(self, sequence: SequenceKV) -> None:
        """Give all pages back. Pages kept for their prefix are stored, and give up their GPU pages."""
        self._offer(sequence, sequence.indexed)
        super().release(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every GPU page has one owner and what is stored is there, byte by byte."""
        self.pool.check_integrity()
        self.resident.check_integrity()
        assert self._away == (self.store.holds & (self.resident.of < 0)).sum()
        self.store.check_integrity(self.resident.of)
