"""The memory of KV in tiers: GPU pages, the backing store, and the copies of rows between them.

The residency tables have a row for each layer. A *row* of the pages is a page of one KV head; its number is page *
kv_heads + head, and on the GPU it lies in the cache line GPU page * kv_heads + head.

Each rank of a model has such a memory for its own KV heads. Rank 0 decides which pages have GPU pages, are stored, or
are left to the clock, and tells the other ranks, so these are the same on all. Each rank's clock decides by itself
which rows it keeps in which lines, since that follows from the blocks that the rank's own heads list.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from specahead.engine.parallel.commands import Command, Followers
from specahead.kernels.backends import Backend, default_backend
from specahead.kernels.kv_gather import LayerCopies, gather_blocks, layer_copies
from specahead.kernels.kv_scales import as_bytes
from specahead.kernels.residency import (
    ResidencyTables,
    clear_tables,
    drop_pages,
    empty_tables,
    mark_stored,
    pin_gpu_pages,
)

# Programs that fetch: enough to fill the host's link. Attention leaves room for no more beside it
# (specahead.kernels.paged_attention.LEFT_FREE).
PROGRAMS = 8

Pages = tuple[Tensor, Tensor]  # keys and values of a layer, [pages, kv_heads, PAGE_SIZE, head_dim]


@dataclass(frozen=True)
class TierMemory:
    """Where KV in tiers lies."""

    on_gpu: list[Pages]
    """GPU pages, a pair a layer."""
    stored: list[Pages]
    """All pages, on the host, a pair a layer; values in the shape of keys, whatever their bits."""
    staging: list[Pages]
    """Two pairs, in which the pages of a layer are brought together."""
    tables: ResidencyTables
    """Which rows are in which cache lines; they mean nothing until the offload is active."""
    copies: LayerCopies
    """From `stored` to `on_gpu`, of all layers, as rows."""
    link: torch.cuda.Stream | None
    """The stream that copies from the backing store beside the model; None on a CPU."""
    kv_heads: int
    """KV heads of this rank."""
    backend: Backend
    followers: Followers
    """The other ranks, which repeat on their memory what this rank does; on ranks but 0, nobody."""

    @staticmethod
    def make(on_gpu: list[Pages], stored: list[Pages], staged_pages: int, followers: Followers) -> "TierMemory":
        """Return memory with empty tables and room to stage `staged_pages` pages."""
        (keys, values), all_pages = on_gpu[0], stored[0][0]
        gpu_pages, kv_heads, device = len(keys), keys.shape[1], keys.device
        shapes = [(staged_pages, *part.shape[1:]) for part in (keys, values)]
        sources, destinations = ([(head_rows(k), head_rows(v)) for k, v in pairs] for pairs in (stored, on_gpu))
        return TierMemory(
            on_gpu=on_gpu,
            stored=stored,
            staging=[(keys.new_zeros(shapes[0]), keys.new_zeros(shapes[1])) for _ in range(2)],
            tables=empty_tables(len(on_gpu), len(all_pages) * kv_heads, gpu_pages * kv_heads, device),
            copies=layer_copies(sources, destinations, device),
            link=side_stream(device),
            kv_heads=kv_heads,
            backend=default_backend(device),
            followers=followers,
        )

    @property
    def device(self) -> torch.device:
        return self.tables.page_in.device

    @property
    def staged_pages(self) -> int:
        """How many pages can be brought together."""
        return self.staging[0][0].shape[0]

    # The tables, on all ranks.

    def clear_tables(self) -> None:
        """Empty all cache lines, in place, since captured steps hold the tables."""
        self.followers.tell(Command.CLEAR_TABLES)
        clear_tables(self.tables)

    def pin_pages(self, pages: list[int], gpu_pages: list[int], round: int) -> None:
        """Enter that pages lie in `gpu_pages`, and keep them there. round: the number of the round that writes them."""
        if pages:
            self.followers.tell(Command.PIN_PAGES, [round, *pages, *gpu_pages])
            listed = self.list_of(pages), self.list_of(gpu_pages), self.list_of([round])
            pin_gpu_pages(self.tables, *listed, self.kv_heads, self.backend)

    def leave_to_clock(self, pages: list[int]) -> None:
        """Leave the lines of pages to the clock, since the store has them."""
        self.followers.tell(Command.LEAVE_TO_CLOCK, pages)
        mark_stored(self.tables, self.list_of(pages), self.kv_heads, self.backend)

    def drop_pages(self, pages: list[int]) -> None:
        """Free the lines of pages that no sequence holds any more."""
        self.followers.tell(Command.DROP_PAGES, pages)
        drop_pages(self.tables, self.list_of(pages), self.kv_heads, self.backend)

    def list_of(self, numbers: list[int]) -> Tensor:
        """Return numbers as a tensor for the kernels, int32 on the device."""
        return torch.tensor(numbers, dtype=torch.int32).to(self.device)


@dataclass
class TierCounters:
    """Counts since the start. A page is one of a layer and KV head; stored pages are whole pages."""

    hit_pages: int = 0
    """Pages that a step listed and found in a cache line, less those that were prefetched in vain."""
    fetched_pages: int = 0
    """Pages that were brought to cache lines because a step listed or prefetched them."""
    overflow_pages: int = 0
    """Pages that a step listed and that found no cache line, so that the step ran again."""
    staged_pages: int = 0
    """Pages that came from the backing store for a dense pass."""
    stages: int = 0
    """Passes that brought pages together so."""
    stored_pages: int = 0
    """Whole pages that were copied to the backing store."""
    offloads: int = 0
    """How often the offload became active."""

    def values(self, page_bytes: int, heads: int) -> dict[str, float]:
        """Return counts and bytes by name.

        page_bytes: of keys and values of a page of a layer and head. heads: KV heads of all layers together.
        """
        counts = {name: float(value) for name, value in asdict(self).items()}
        counts["bytes_fetched"] = page_bytes * (self.fetched_pages + self.staged_pages)
        counts["bytes_stored"] = page_bytes * heads * self.stored_pages
        return counts


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for work beside a model, None on a CPU.

    It has priority over the model, or it would find no room on the multiprocessors.
    """
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


def run_beside(stream: torch.cuda.Stream | None, work: Callable[[], object]) -> torch.cuda.Event | None:
    """Launch work on a side stream, after all that is launched already; return the event of its end.

    Without a stream the work is done at once, and there is no event.
    """
    if stream is None:
        work()
        return None
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        ended = torch.cuda.Event()
        ended.record()
    return ended


def head_rows(pages: Tensor) -> Tensor:
    """Return pages as rows, [pages * kv_heads, PAGE_SIZE * head_dim], a view: those in 8 bits as bytes."""
    return as_bytes(pages).flatten(0, 1).flatten(1)


def rows_of(pages: np.ndarray, kv_heads: int, device: torch.device) -> Tensor:
    """Return the rows of pages, head by head: int32 [pages * kv_heads]."""
    rows = (pages[:, None] * kv_heads + np.arange(kv_heads)).reshape(-1)
    return torch.from_numpy(rows.astype(np.int32)).to(device)


def bring_rows(memory: TierMemory, layer: int, buffer: int, rows: Tensor, stored: bool) -> None:
    """Copy rows of a layer, int32 [rows], to the first rows of a staging buffer; negative ones are passed over.

    stored: whether rows are of the backing store, else they are cache lines.
    """
    keys, values = memory.staging[buffer]
    gather_blocks(
        (memory.copies.sources if stored else memory.copies.destinations)[layer],
        (head_rows(keys), head_rows(values)),
        rows,
        torch.arange(len(rows), dtype=torch.int32, device=memory.device),
        torch.tensor([len(rows)], dtype=torch.int32).to(memory.device),
        4 * PROGRAMS,  # nothing else runs while a layer's pages are awaited
        memory.backend,
    )
