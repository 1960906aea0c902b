"""How a pass reads KV that lies in tiers: by fetching what it lists, or by having whole sequences brought together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.paged_kv import PAGE_SIZE, SequenceKV
from engine.tiered_kv import PROGRAMS, TieredKV, head_rows
from kernels.kv_gather import gather_blocks
from kernels.residency import Transfers, find_block_slots, request_blocks


@dataclass
class Fetched:
    """Of a sparse pass, all layers' lists at once. It must be kept until the last layer has waited.

    slots: [layers, sequences, kv_heads, width * pages of a block] int32, where the listed pages lie, once `wait` has
        returned for the layer. refused: [] int32, listed pages that got no slot: if there are any, the pass is void.
    copy_late: copies a layer's pages once the layer waits for them; None: they are under way.
    """

    slots: Tensor
    refused: Tensor
    transfers: Transfers
    events: list[torch.cuda.Event]
    copy_late: Callable[[int], None] | None = None

    def wait(self, layer: int) -> None:
        """Let the current stream wait until this layer's pages are there; to be called once for each layer."""
        if self.copy_late is not None:
            self.copy_late(layer)
        if self.events:
            torch.cuda.current_stream().wait_event(self.events[layer])


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

    lists: [layers, sequences, kv_heads, width] int32 blocks; counts: [layers, sequences, kv_heads] int32
    page_tables: [sequences, max_pages] int32, pages of `kv`; round: [1] int32, `kv.next_round()`
    overlap: False: a layer's pages are copied in `wait`, on the stream that waits, as if nobody had announced them
    Launches only: works inside a CUDA graph.
    """
    per_block = block_size // PAGE_SIZE
    listed = lists, counts, page_tables, kv.kv_heads, per_block
    transfers = request_blocks(kv.tables, *listed, round, round, kv.backend)
    slots = find_block_slots(kv.tables, *listed, kv.backend)[0].clamp_(min=0)
    refused = transfers.unplaced.sum(dtype=torch.int32)
    events: list[torch.cuda.Event] = []
    if not overlap:
        return Fetched(slots, refused, transfers, events, partial(_fetch_layer, kv, transfers))
    if kv.link_stream is None:
        for layer in range(kv.num_layers):
            _fetch_layer(kv, transfers, layer)
    else:
        kv.link_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(kv.link_stream):
            for layer in range(kv.num_layers):
                _fetch_layer(kv, transfers, layer)
                events.append(torch.cuda.Event())
                events[-1].record()
    return Fetched(slots, refused, transfers, events)


def _fetch_layer(kv: TieredKV, transfers: Transfers, layer: int) -> None:
    gather_blocks(
        (head_rows(kv.k_home[layer]), head_rows(kv.v_home[layer])),
        (head_rows(kv.k_pages[layer]), head_rows(kv.v_pages[layer])),
        transfers.pages[layer],
        transfers.slots[layer],
        transfers.counts[layer : layer + 1],
        PROGRAMS,
        kv.backend,
    )


class StagedReads:
    """Whole sequences, brought together layer by layer from frames, slots and home. Always possible, seldom fast.

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
        self._brought: dict[int, torch.cuda.Event | None] = {}
        kv.counters.stages += 1

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [places, kv_heads, PAGE_SIZE, head_dim]; to be called for each layer in turn."""
        kv = self._kv
        if index not in self._brought:
            self._bring_cold(index)
        arrived = self._brought.pop(index)
        if index + 1 < kv.num_layers:  # its buffer was last read by layer index - 1, which has been launched
            self._bring_cold(index + 1)
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        kv.bring_hot(index, index % 2, self._slots.pop(index))
        return kv.k_staged[index % 2], kv.v_staged[index % 2]

    def _bring_cold(self, layer: int) -> None:
        kv = self._kv
        self._slots[layer] = slots = kv.slots_of(layer, self._wanted)
        if kv.link_stream is None:
            kv.bring_cold(layer, layer % 2, self._wanted, slots)
            self._brought[layer] = None
            return
        kv.link_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(kv.link_stream):
            kv.bring_cold(layer, layer % 2, self._wanted, slots)
            self._brought[layer] = torch.cuda.Event()
            self._brought[layer].record()  # type: ignore[union-attr]
        slots.record_stream(kv.link_stream)
