"""How a pass reads KV that lies in tiers: by fetching what it lists, or by having whole sequences brought together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.inputs import SequenceInput
from engine.paged_kv import PAGE_SIZE, SequenceKV
from engine.tiered_kv import PROGRAMS, TieredKV
from kernels.kv_gather import gather_blocks, gather_layers, wait_for_layer
from kernels.missing_blocks import count_missing_blocks
from kernels.residency import Transfers, find_block_slots, request_blocks


@dataclass
class Fetched:
    """Of a sparse pass, the lists of all layers in tiers. It must be kept until the last one has waited.

    slots: [layers, sequences, kv_heads, width * pages of a block] int32, where the listed pages lie, once `wait` has
        returned for the layer. refused: [] int32, listed pages that got no slot: if there are any, the pass is void.
    cold: [sequences] int32, listed blocks that were not hot
    copy_late: copies a layer's pages once the layer waits for them; None: they are under way.
    """

    slots: Tensor
    refused: Tensor
    cold: Tensor
    transfers: Transfers
    done: Tensor
    ended: torch.cuda.Event | None
    backend: str
    copy_late: Callable[[int], None] | None

    def wait(self, index: int) -> None:
        """Let the current stream wait until this layer's pages are there; to be called once for each layer."""
        if self.copy_late is not None:
            self.copy_late(index)
        else:
            wait_for_layer(self.done, index, PROGRAMS, self.backend)
        if self.ended is not None and index + 1 == len(self.done):
            torch.cuda.current_stream().wait_event(self.ended)  # so that nothing of a step outlasts it


def fetch_listed(
    kv: TieredKV,
    lists: Tensor,
    counts: Tensor,
    block_size: int,
    page_tables: Tensor,
    round: Tensor,
    overlap: bool = True,
) -> Fetched:
    """Request all pages that a pass lists, and start copying those that are not hot, layer by layer on a side stream.

    lists: [layers, sequences, kv_heads, width] int32 blocks, of the layers that lie in tiers
    counts: [layers, sequences, kv_heads] int32
    page_tables: [sequences, max_pages] int32, pages of `kv`
    round: [1] int32, TieredKV.next_round
    overlap: False: a layer's pages are copied in `wait`, on the stream that waits, as if nobody had announced them
    Launches only: works inside a CUDA graph.
    """
    per_block = block_size // PAGE_SIZE
    listed = lists, counts, page_tables, kv.kv_heads, per_block
    cold = count_missing_blocks(kv.tables.slot_of, *listed, kv.backend)
    transfers = request_blocks(kv.tables, *listed, round, kv.backend)
    slots, _ = find_block_slots(kv.tables, *listed, kv.backend, absent=0)  # which attention may look at
    refused = transfers.unplaced.sum(dtype=torch.int32)
    done = torch.zeros(len(lists), dtype=torch.int32, device=kv.device)
    found = slots, refused, cold, transfers, done
    if not overlap:
        return Fetched(*found, None, kv.backend, partial(_fetch_layer, kv, transfers))
    return Fetched(*found, start_fetches(kv, transfers, done), kv.backend, None)


def start_fetches(kv: TieredKV, transfers: Transfers, done: Tensor) -> torch.cuda.Event | None:
    """Have all layers' pages copied, beside what the current stream does; returns when that has ended, None on a CPU.

    done: as gather_layers'
    """
    copying = transfers.pages, transfers.slots, transfers.counts, done, PROGRAMS, kv.backend
    if kv.link_stream is None:
        gather_layers(kv.fetches, *copying)
        return None
    kv.link_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(kv.link_stream):
        gather_layers(kv.fetches, *copying)
        ended = torch.cuda.Event()
        ended.record()
    return ended


def _fetch_layer(kv: TieredKV, transfers: Transfers, index: int) -> None:
    rows = transfers.pages[index], transfers.slots[index], transfers.counts[index : index + 1]
    copies = kv.fetches
    gather_blocks(copies.sources[index], copies.destinations[index], *rows, PROGRAMS, kv.backend)


class StagedReads:
    """Whole sequences, brought together layer by layer from frames, slots and home. Always possible, seldom fast.

    Layers that stay on the GPU are read where they lie.

    tables: of each sequence, where its pages are brought to: its block table in the pass. Pages that are only at home
    come a layer ahead, on a side stream; what is on the GPU when the layer's own KV has been written.
    """

    def __init__(self, kv: TieredKV, sequences: list[SequenceKV]) -> None:
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
        # Of each sequence, heads' pages that came from home.
        self._cold = torch.zeros(len(sequences), dtype=torch.int64, device=kv.device)
        counts = torch.tensor([len(sequence.pages) * kv.kv_heads for sequence in sequences])
        self._owner = torch.arange(len(sequences)).repeat_interleave(counts).to(kv.device)
        self._brought: dict[int, torch.cuda.Event | None] = {}
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
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        kv.bring_hot(index, index % 2, self._slots.pop(index))
        return kv.k_staged[index % 2], kv.v_staged[index % 2]

    def count_fetched(self) -> list[int]:
        """After the pass: return how many (layer, head, token) triples of each sequence came from home."""
        cold: list[int] = self._cold.tolist()
        self._kv.counters.staged_pages += sum(cold)
        return [pages * PAGE_SIZE for pages in cold]

    def _bring_cold(self, index: int) -> None:
        kv = self._kv
        self._slots[index] = slots = kv.slots_of(index, self._wanted)
        self._cold.index_add_(0, self._owner, (slots < 0).long())
        bringing = index, index % 2, self._wanted, slots
        self._brought[index] = None
        if kv.link_stream is None:
            kv.bring_cold(*bringing)
            return
        kv.link_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(kv.link_stream):
            kv.bring_cold(*bringing)
            event = torch.cuda.Event()
            event.record()
        self._brought[index] = event
        slots.record_stream(kv.link_stream)


def parts_to_stage(kv: TieredKV, inputs: list[SequenceInput]) -> list[list[SequenceInput]]:
    """Return neighbours whose pages fit into the staging buffers together."""
    parts: list[list[SequenceInput]] = []
    room = 0
    for item in inputs:
        if len(item.kv.pages) > room:
            parts.append([])
            room = kv.staged_pages
        parts[-1].append(item)
        room -= len(item.kv.pages)
    return parts


def count_step(kv: TieredKV, results: dict[str, np.ndarray], block_size: int) -> bool:
    """Count what a fetching step did, by its results; return False if it is void because not all found room."""
    kv.counters.fetched_pages += int(results["fetched"][0])
    kv.counters.refused_pages += int(results["overflow"][0])
    if results["overflow"][0]:
        return False
    missed = int(results["missed"].sum())
    kv.counters.hit_pages += (int(results["listed"][0]) - missed) * (block_size // PAGE_SIZE)
    return True
