"""The memory of KV in tiers: what lies on the GPU, the backing store, and how rows get from one to the other.

Layers that lie in tiers are counted among themselves here: `index` is a row of the residency tables. A *row* is a page
of one KV head: row page * kv_heads + head, on the GPU and in the backing store alike. On the GPU it lies in a cache
line, GPU page * kv_heads + head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specahead.kernels.backends import Backend
from specahead.kernels.kv_gather import LayerCopies, gather_blocks
from specahead.kernels.residency import ResidencyTables

# Programs that fetch: enough for the host's link (docs/performance.md). Attention has room for no more beside it
# (specahead.kernels.paged_attention.LEFT_FREE).
PROGRAMS = 8

Pages = tuple[Tensor, Tensor]  # keys and values of a layer, [pages, kv_heads, PAGE_SIZE, head_dim]


@dataclass(frozen=True)
class TierMemory:
    """Where the KV of the layers in tiers lies.

    layers: their numbers in the model. on_gpu: a pair a layer, GPU pages. stored: a pair a layer, all pages, on the
    host. staging: two pairs, in which a layer's pages are brought together. tables: which rows are in which cache
    lines; they say nothing until the offload is active. copies: from `stored` to `on_gpu`, of all layers, as rows.
    link: the stream that copies from the backing store beside the model; None on a CPU.
    """

    layers: list[int]
    on_gpu: list[Pages]
    stored: list[Pages]
    staging: list[Pages]
    tables: ResidencyTables
    copies: LayerCopies
    link: torch.cuda.Stream | None
    kv_heads: int
    backend: Backend

    @property
    def device(self) -> torch.device:
        return self.tables.page_in.device

    @property
    def staged_pages(self) -> int:
        """How many pages can be brought together."""
        return self.staging[0][0].shape[0]


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for what runs beside a model, None on a CPU. It goes before the model, or it would find no room
    on the multiprocessors."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


def run_beside(stream: torch.cuda.Stream | None, work: Callable[[], object]) -> torch.cuda.Event | None:
    """Launch work on a side stream, behind what is launched already, and return the event of its end.

    Without a stream it is done at once, and there is no event.
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
    """Return pages as rows, [pages * kv_heads, PAGE_SIZE * head_dim], a view."""
    return pages.flatten(0, 1).flatten(1)


def rows_of(pages: np.ndarray, kv_heads: int, device: torch.device) -> Tensor:
    """Return the rows of pages, head by head: int32 [pages * kv_heads]."""
    rows = (pages[:, None] * kv_heads + np.arange(kv_heads)).reshape(-1)
    return torch.from_numpy(rows.astype(np.int32)).to(device)


def bring_hits(memory: TierMemory, index: int, buffer: int, lines: Tensor) -> None:
    """Copy what is in cache lines of a layer to the first rows of a staging buffer; negative lines are passed over."""
    _bring(memory, memory.copies.destinations[index], buffer, lines)


def bring_misses(memory: TierMemory, index: int, buffer: int, rows: Tensor, lines: Tensor) -> None:
    """Copy the rows of a layer that are in no cache line from the backing store to the same rows of a buffer."""
    _bring(memory, memory.copies.sources[index], buffer, rows.masked_fill(lines >= 0, -1))


def _bring(memory: TierMemory, source: Pages, buffer: int, rows: Tensor) -> None:
    keys, values = memory.staging[buffer]
    gather_blocks(
        source,
        (head_rows(keys), head_rows(values)),
        rows,
        torch.arange(len(rows), dtype=torch.int32, device=memory.device),
        torch.tensor([len(rows)], dtype=torch.int32).to(memory.device),
        4 * PROGRAMS,  # nothing else runs while a layer's pages are awaited
        memory.backend,
    )
