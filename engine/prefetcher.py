"""Fetching what rounds to come will read, beside the steps: as soon as a draft has announced it.

A prefetch requests slots for all blocks that it is told of, in every layer that lies in tiers, and copies those that
are not hot. Nobody waits for it but the step that reads them, layer by layer (kernels.kv_gather.wait_for_layer). What
no slot is found for is left to that step.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.paged_kv import PAGE_SIZE, SequenceKV
from engine.prefetches import Prefetch
from engine.staging import Layout, Staging
from engine.tiered_kv import TieredKV
from kernels.backends import power_of_two
from kernels.kv_gather import gather_layers
from kernels.late_blocks import count_late_blocks
from kernels.listed_words import list_words
from kernels.placed_pages import count_unread, keep_placed
from kernels.residency import Transfers, request_blocks
from kernels.shared_budget import WORD

MOST = 4  # sequences of one prefetch
MOST_OUTSTANDING = 8  # prefetches: each keeps what was placed, 17 MB a sequence of 128K of an 8B model


@dataclass(frozen=True)
class Wanted:
    """Blocks that a sequence's next rounds read. words: uint64 [rows, words], a bit a block, the lowest first; rows are
    (layer in tiers, KV head)."""

    kv: SequenceKV
    words: np.ndarray


@dataclass
class _Request:
    """Of so many sequences: inputs, what they give, and the graph that makes one of the other; None: eagerly."""

    inputs: Staging
    transfers: Transfers | None = None
    cold: Tensor | None = None
    graph: torch.cuda.CUDAGraph | None = None


class Prefetcher:
    """Prefetches for one TieredKV. block_size: tokens, whole pages; max_blocks: of a sequence."""

    def __init__(self, kv: TieredKV, block_size: int, max_blocks: int, enforce_eager: bool) -> None:
        if block_size % PAGE_SIZE:
            raise ValueError(
                f"blocks of {block_size} tokens: prefetching is built for whole pages of {PAGE_SIZE}"
            )
        self.kv = kv
        self.block_size = kv.prefetches.block_size = block_size
        self.max_blocks = max_blocks
        self._eager = enforce_eager or kv.device.type != "cuda"
        self._requests: dict[int, _Request] = {}
        # Requests run beside steps: graphs of one pool must not.
        self._pool = None if self._eager else torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def warm_up(self) -> None:
        for count in range(power_of_two(MOST).bit_length()):
            self._request_of(1 << count)
        if self._eager:
            return
        # What follows a request, so that nothing is compiled beside steps; nothing is placed, copied or counted.
        kv, rows = self.kv, self.kv.tables.rows
        lists, counts = (
            torch.zeros(shape, dtype=torch.int32, device=kv.device) for shape in ((rows, 16), (rows,))
        )
        placed = keep_placed(Transfers(lists, lists, counts, counts), kv.backend)
        count_unread(kv.tables.stamps, placed, 0, kv.backend)
        for segment in kv.segments:
            counted = torch.zeros(1, dtype=torch.int32, device=kv.device) if segment.on_peer else None
            done = torch.zeros_like(kv.prefetches.arrived)
            nothing = placed.pages, placed.slots, placed.counts
            gather_layers(segment.fetches, *nothing, done, kv.link_programs, kv.backend, counted)
        torch.cuda.synchronize()

    @property
    def is_ready(self) -> bool:
        """Whether `launch` would start something now."""
        if not self.kv.try_tables():
            return False
        try:
            return self._is_through
        finally:
            self.kv.return_tables()

    @property
    def _is_through(self) -> bool:
        """Whether the inputs of the last request have been read. Asked while nobody captures a graph."""
        requested = self.kv.prefetches.requested
        return requested is None or requested.query()

    @torch.inference_mode()
    def launch(self, wanted: list[Wanted]) -> bool:
        """Start a prefetch for up to MOST sequences; False: not now, since somebody else launches, or the last request
        is not through. Where too many are outstanding it is left out. May be called by another thread than the one that
        runs steps."""
        kv = self.kv
        if not wanted or len(wanted) > MOST:
            raise ValueError(f"a prefetch is for 1 to {MOST} sequences, not for {len(wanted)}")
        if not kv.try_tables():
            return False
        try:
            if not self._is_through:
                return False
            wanted = [item for item in wanted if item.kv.pages and not kv.is_resident(item.kv)]
            if not wanted or not kv.spilled:
                return True
            if len(kv.prefetches.outstanding) >= MOST_OUTSTANDING:
                kv.counters.skipped_prefetches += 1
                return True
            self._launch(wanted)
        finally:
            kv.return_tables()
        return True

    def _launch(self, wanted: list[Wanted]) -> None:
        kv, state = self.kv, self.kv.prefetches
        if not self._eager and not self._requests:
            raise RuntimeError("a Prefetcher warms up before steps run: graphs are not captured beside them")
        kv.counters.prefetches += 1
        request = self._request_of(power_of_two(len(wanted)))
        round = self._lay_out(request.inputs, wanted)
        sequences = [item.kv for item in wanted]
        with torch.cuda.stream(state.request_stream):  # None: where it is
            request.inputs.send()
            kv.follow_tables()
            transfers, cold = self._replay(request)
            from_peer = torch.zeros(1, dtype=torch.int32, device=kv.device)
            if state.request_stream is not None:
                state.requested = torch.cuda.Event()
                state.requested.record()
        state.copied = self._copy(transfers, from_peer)
        state.add(Prefetch(sequences, round, state.tickets + 1, transfers, cold, from_peer, state.copied))

    def _copy(self, transfers: Transfers, from_peer: Tensor) -> torch.cuda.Event | None:
        """Over all links at once, but one prefetch after the other, as they are counted; when it will be done."""
        kv, state = self.kv, self.kv.prefetches
        copying = (
            transfers.pages,
            transfers.slots,
            transfers.counts,
            state.arrived,
            kv.link_programs,
            kv.backend,
        )
        done: torch.cuda.Event | None = None
        for segment, stream in zip(kv.segments, state.copy_streams, strict=True):
            counted = from_peer if segment.on_peer else None
            with torch.cuda.stream(stream):
                if stream is None:
                    gather_layers(segment.fetches, *copying, counted)
                    continue
                for event in (state.requested, state.copied):
                    if event is not None:
                        stream.wait_event(event)
                kv.follow_link()
                gather_layers(segment.fetches, *copying, counted)
                if done is not None:
                    stream.wait_event(done)  # one event stands for all of them
                done = torch.cuda.Event()
                done.record()
        return done

    def _replay(self, request: _Request) -> tuple[Transfers, Tensor]:
        """What it gives is the caller's own: the next replay is not to change it."""
        if request.graph is None:
            return self._run(request.inputs)
        request.graph.replay()
        assert request.transfers is not None and request.cold is not None
        return keep_placed(request.transfers, self.kv.backend), request.cold.clone()

    def _request_of(self, count: int) -> _Request:
        if count in self._requests:
            return self._requests[count]
        kv = self.kv
        rows = len(kv.tiered_layers) * kv.kv_heads
        pages = self.max_blocks * (self.block_size // PAGE_SIZE)
        layout: Layout = {
            "words": ((count, rows, -(-self.max_blocks // WORD)), torch.int64),
            "page_tables": ((count, pages), torch.int32),
            "blocks": ((count,), torch.int32),
            "round": ((1,), torch.int32),
            "oldest": ((1,), torch.int32),
        }
        self._requests[count] = request = _Request(Staging(layout, kv.device))
        if self._eager:
            return request
        stream = kv.prefetches.request_stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # no sequence has a block: nothing is requested
                self._run(request.inputs)
        torch.cuda.synchronize()
        request.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(request.graph, pool=self._pool, stream=stream):
            request.transfers, request.cold = self._run(request.inputs)
        return request

    def _lay_out(self, inputs: Staging, wanted: list[Wanted]) -> int:
        """The round that it is."""
        kv = self.kv
        inputs.begin()
        host = inputs.host
        round = kv.next_round()
        host["round"][0], host["oldest"][0] = round, kv.oldest_for_prefetch(round)
        host["page_tables"][:], host["blocks"][:] = -1, 0
        words = host["words"].view(np.uint64)
        for i, item in enumerate(wanted):
            words[i] = 0
            words[i, :, : item.words.shape[1]] = item.words
            pages = item.kv.table()
            host["page_tables"][i, : len(pages)] = pages
            host["blocks"][i] = min(self.max_blocks, item.words.shape[1] * WORD)
        return round

    def _run(self, inputs: Staging) -> tuple[Transfers, Tensor]:
        """Launches only."""
        kv, device = self.kv, inputs.device
        named = device["words"], device["blocks"], kv.kv_heads, self.max_blocks
        lists, counts = list_words(*named, kv.backend)
        per_block = self.block_size // PAGE_SIZE
        listed = lists, counts, device["page_tables"], kv.kv_heads, per_block
        cold, _ = count_late_blocks(kv.tables.slot_of, *listed, None, False, kv.backend)
        transfers = request_blocks(kv.tables, *listed, device["round"], device["oldest"], kv.backend)
        left, _ = count_late_blocks(kv.tables.slot_of, *listed, None, False, kv.backend)
        return transfers, cold - left
