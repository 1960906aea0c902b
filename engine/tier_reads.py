"""How a pass reads KV that lies in tiers: by fetching what it lists, or by having whole sequences brought together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.paged_kv import PAGE_SIZE, SequenceKV
from engine.runner import SequenceOutput
from engine.tiered_kv import TieredKV
from kernels.device_clock import stamp_time
from kernels.kv_gather import gather_blocks, gather_layers, wait_for_layer
from kernels.late_blocks import count_late_blocks
from kernels.residency import Transfers, find_block_slots, request_blocks


@dataclass
class Fetched:
    """Of a sparse pass, the lists of all layers in tiers. It must be kept until the last one has waited.

    slots: [layers, sequences, kv_heads, width * pages of a block] int32, where the listed pages lie, once `wait` has
        returned for the layer. refused: [] int32, listed pages that got no slot: if there are any, the pass is void.
    cold, late: [sequences] int32, listed blocks that were not hot, and those of them that nobody had announced
    waited: [2 * layers] int64, nanoseconds before and after each layer's wait; None if that is not measured
    copy_late: copies a layer's pages once the layer waits for them; None: they are under way.
    programs: that copy a layer, over all links
    from_peer: [1] int32, pages that came from a neighbour GPU, once the last layer has waited; None where there is none
    """

    slots: Tensor
    refused: Tensor
    cold: Tensor
    late: Tensor
    transfers: Transfers
    done: Tensor
    ended: torch.cuda.Event | None
    waited: Tensor | None
    backend: str
    copy_late: Callable[[int], None] | None
    programs: int
    from_peer: Tensor | None

    def wait(self, index: int) -> None:
        """Let the current stream wait until this layer's pages are there; to be called once for each layer."""
        if self.waited is not None:
            stamp_time(self.waited, 2 * index, self.backend)
        if self.copy_late is not None:
            self.copy_late(index)
        else:
            wait_for_layer(self.done, index, self.programs, self.backend)
        if self.ended is not None and index + 1 == len(self.done):
            torch.cuda.current_stream().wait_event(self.ended)  # so that nothing of a step outlasts it
        if self.waited is not None:
            stamp_time(self.waited, 2 * index + 1, self.backend)


@dataclass
class StepRounds:
    """What a step must say to the residency tables, each [1] int32, and what it says to those that use them next.

    round: TieredKV.step_round. oldest, due: Prefetches'. tables_free, link_free: recorded on the way, in a captured
    step too; None without streams.
    """

    round: Tensor
    oldest: Tensor
    due: Tensor
    tables_free: torch.cuda.Event | None
    link_free: torch.cuda.Event | None


def fetch_listed(
    kv: TieredKV,
    lists: Tensor,
    counts: Tensor,
    block_size: int,
    page_tables: Tensor,
    rounds: StepRounds,
    announced: Tensor | None = None,
    leave_out_late: bool = False,
    measure: bool = False,
    overlap: bool = True,
) -> Fetched:
    """Request all pages that a pass lists, and start copying those that are not hot, layer by layer on a side stream.

    lists: [layers, sequences, kv_heads, width] int32 blocks, of the layers that lie in tiers
    counts: [layers, sequences, kv_heads] int32
    page_tables: [sequences, max_pages] int32, pages of `kv`
    announced: [sequences, layers * kv_heads, blocks] uint8, blocks that were known beforehand; None: all
    leave_out_late: take late blocks out of `lists` and `counts` instead of fetching them
    overlap: False: a layer's pages are copied in `wait`, on the stream that waits, as if nobody had announced them;
        there must be no prefetches
    Launches only: works inside a CUDA graph.
    """
    per_block = block_size // PAGE_SIZE
    listed = lists, counts, page_tables, kv.kv_heads, per_block
    cold, late = count_late_blocks(kv.tables.slot_of, *listed, announced, leave_out_late, kv.backend)
    waited = torch.zeros(2 * len(lists), dtype=torch.int64, device=kv.device) if measure else None
    transfers = request_blocks(kv.tables, *listed, rounds.round, rounds.oldest, kv.backend)
    slots, _ = find_block_slots(kv.tables, *listed, kv.backend, absent=0)  # which attention may look at
    refused = transfers.unplaced.sum(dtype=torch.int32)
    if rounds.tables_free is not None:
        rounds.tables_free.record()
    done = torch.zeros(len(lists), dtype=torch.int32, device=kv.device)
    found = slots, refused, cold, late, transfers, done
    from_peer = torch.zeros(1, dtype=torch.int32, device=kv.device) if kv.peer_pages else None
    links = kv.link_programs * len(kv.segments), from_peer
    if not overlap:
        copy_late = partial(_fetch_layer, kv, transfers, from_peer)
        return Fetched(*found, None, waited, kv.backend, copy_late, *links)
    ended = start_fetches(kv, transfers, done, from_peer, rounds)
    return Fetched(*found, ended, waited, kv.backend, None, *links)


def start_fetches(
    kv: TieredKV,
    transfers: Transfers,
    done: Tensor,
    from_peer: Tensor | None,
    rounds: StepRounds,
) -> torch.cuda.Event | None:
    """Have all segments' pages copied, each over its link, at once; returns when that has ended, None on a CPU.

    done: as gather_layers'; the programs of all links count, the first one's when prefetches have come, too.
    from_peer: Fetched.from_peer
    """
    first = kv.segments[0]
    copying = transfers.pages, transfers.slots, transfers.counts, done, kv.link_programs, kv.backend
    ended: torch.cuda.Event | None = None
    for segment in kv.segments:
        copied = from_peer if segment.on_peer else None
        follows = (kv.prefetches.arrived, rounds.due) if segment is first else None
        if segment.stream is None:
            gather_layers(segment.fetches, *copying, copied, follows)
            continue
        segment.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(segment.stream):
            gather_layers(segment.fetches, *copying, copied, follows)
            if ended is not None:
                segment.stream.wait_event(ended)  # one event stands for all of them
            if rounds.link_free is not None and segment is kv.segments[-1]:
                rounds.link_free.record()
            ended = torch.cuda.Event()
            ended.record()
    return ended


def _fetch_layer(kv: TieredKV, transfers: Transfers, from_peer: Tensor | None, index: int) -> None:
    for segment in kv.segments:
        gather_blocks(
            segment.fetches.sources[index],
            segment.fetches.destinations[index],
            transfers.pages[index],
            transfers.slots[index],
            transfers.counts[index : index + 1],
            kv.link_programs,
            kv.backend,
            segment.fetches.first_source,
            from_peer if segment.on_peer else None,
        )


class StagedReads:
    """Whole sequences, brought together layer by layer from frames, slots and home. Always possible, seldom fast.

    Layers that stay on the GPU are read where they lie.

    tables: of each sequence, where its pages are brought to: its block table in the pass. Pages that are only at home
    come a layer ahead, on a side stream; what is on the GPU when the layer's own KV has been written.
    """

    def __init__(self, kv: TieredKV, sequences: list[SequenceKV]) -> None:
        kv.await_prefetches()
        pages = np.concatenate([sequence.table() for sequence in sequences])
        if len(pages) > kv.staged_pages:
            raise ValueError(f"{len(pages)} pages to bring together, there is room for {kv.staged_pages}")
        ends = np.cumsum([len(sequence.pages) for sequence in sequences])
        self.tables = [
            np.arange(end - len(sequence.pages), end, dtype=np.int32)
            for sequence, end in zip(sequences, ends, strict=True)
        ]
        self._kv = kv
        self._wanted = kv.rows_of(pages)
        self._slots: dict[int, Tensor] = {}
        # Of each sequence, heads' pages that came from home; of all, those that a neighbour GPU had.
        self._cold = torch.zeros(len(sequences), dtype=torch.int64, device=kv.device)
        self._from_peer = torch.zeros((), dtype=torch.int64, device=kv.device)
        counts = torch.tensor([len(sequence.pages) * kv.kv_heads for sequence in sequences])
        self._owner = torch.arange(len(sequences)).repeat_interleave(counts).to(kv.device)
        self._brought: dict[int, list[torch.cuda.Event]] = {}
        kv.counters.stages += 1

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [places, kv_heads, PAGE_SIZE, head_dim]; to be called for each layer in turn."""
        kv = self._kv
        if layer in kv.kept_layers:
            return kv.k_pages[layer], kv.v_pages[layer]
        index = kv.tiered_layers.index(layer)
        if index not in self._brought:
            self._bring_cold(index)
        arrived = self._brought.pop(index)
        if index + 1 < len(
            kv.tiered_layers
        ):  # its buffer was last read by layer index - 1, which has been launched
            self._bring_cold(index + 1)
        for event in arrived:
            torch.cuda.current_stream().wait_event(event)
        kv.bring_hot(index, index % 2, self._slots.pop(index))
        return kv.k_staged[index % 2], kv.v_staged[index % 2]

    def account(self, outputs: list[SequenceOutput]) -> None:
        """After the pass: say how much of each sequence came from home."""
        for output, cold in zip(outputs, self._cold.tolist(), strict=True):
            output.tokens_fetched = cold * PAGE_SIZE
            self._kv.counters.staged_pages += cold
        self._kv.counters.pages_from_peer += int(self._from_peer)

    def _bring_cold(self, index: int) -> None:
        kv = self._kv
        self._slots[index] = slots = kv.slots_of(index, self._wanted)
        self._cold.index_add_(0, self._owner, (slots < 0).long())
        if kv.peer_pages:
            self._from_peer += kv.from_peer(self._wanted, slots)
        self._brought[index] = []
        for segment in kv.segments:
            bringing = segment, index, index % 2, self._wanted, slots
            if segment.stream is None:
                kv.bring_cold(*bringing)
                continue
            segment.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(segment.stream):
                kv.bring_cold(*bringing)
                event = torch.cuda.Event()
                event.record()
            self._brought[index].append(event)
            slots.record_stream(segment.stream)
