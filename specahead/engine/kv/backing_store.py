"""The backing store: host memory with a copy of every full page, so that the page may leave the GPU.

A page is copied once, when it is full. Tokens that a round has rolled back are never copied.
"""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from specahead.engine.kv.tier_memory import PROGRAMS, TierMemory, run_beside, side_stream
from specahead.engine.parallel.commands import Command
from specahead.kernels.kv_gather import gather_blocks
from specahead.kernels.kv_scales import as_bytes


class BackingStore:
    """Which pages the store has or will have, and which of these may leave their GPU pages.

    A full page waits, is copied, and may then leave. Pages that are read densely leave last. Within these groups pages
    keep the order in which they came. `holds` says which pages the store has, bool [pages].
    """

    def __init__(self, memory: TierMemory) -> None:
        self.holds = np.zeros(len(memory.stored[0][0]), bool)
        self._memory, self._layers = memory, list(zip(memory.on_gpu, memory.stored, strict=True))
        self._stream = side_stream(memory.device)
        self._waiting: dict[int, bool] = {}  # by page, whether it is read densely
        self._copying: dict[int, bool] = {}
        # The pages of each copy, and the event of its end; None where copying returns when it is done.
        self._copies: deque[tuple[list[int], torch.cuda.Event | None]] = deque()
        self._movable: dict[int, None] = {}  # stored, and in a GPU page
        self._movable_dense: dict[int, None] = {}

    @property
    def waiting(self) -> int:
        """Full pages whose copy has not been started."""
        return len(self._waiting)

    @property
    def is_behind(self) -> bool:
        """Whether there are full pages that are not stored yet."""
        return bool(self._waiting or self._copying)

    def offer(self, pages: np.ndarray, dense: bool) -> None:
        """Have full, committed pages, int32 [pages], wait to be copied, unless they are stored or on their way.

        dense: whether they are read densely. Pages of a shared prefix that are now read sparsely, too, leave like
        others, or the blocks that sparse steps fetch would lack their GPU pages.
        """
        for page in pages[~self.holds[pages]].tolist():
            if page not in self._copying and page not in self._waiting:
                self._waiting[page] = dense
        for page in pages.tolist() if not dense else ():
            for on_its_way in (self._waiting, self._copying):
                if page in on_its_way:
                    on_its_way[page] = False
            if page in self._movable_dense:
                del self._movable_dense[page]
                self._movable[page] = None

    def start_copies(self, gpu_page_of: np.ndarray) -> int:
        """Start to copy the waiting pages on a stream of its own; return how many. gpu_page_of: int32, by page."""
        pages = list(self._waiting)
        if not pages:
            return 0
        self._copying |= self._waiting
        self._waiting.clear()
        self.copy(pages, gpu_page_of[pages].tolist())
        return len(pages)

    def copy(self, pages: list[int], gpu_pages: list[int]) -> None:
        """Start to copy pages to the store, on all ranks. gpu_pages: the GPU page in which each of them lies."""
        self._memory.followers.tell(Command.STORE_PAGES, [*pages, *gpu_pages])
        lists = [self._memory.list_of(part) for part in (gpu_pages, pages, [len(pages)])]
        self._copies.append((pages, run_beside(self._stream, lambda: self._copy_layers(*lists))))
        if self._stream is not None:
            for tensor in lists:
                tensor.record_stream(self._stream)

    def _copy_layers(self, gpu_pages: Tensor, pages: Tensor, count: Tensor) -> None:
        for source, destination in self._layers:
            gather_blocks(
                (_page_rows(source[0]), _page_rows(source[1])),
                (_page_rows(destination[0]), _page_rows(destination[1])),
                gpu_pages,
                pages,
                count,
                PROGRAMS,
                self._memory.backend,
            )

    def take_up_copies(self, wait: bool) -> None:
        """Note which copies have ended. wait: have the device, not the host, wait for the others."""
        copies = self._copies
        while copies and (wait or (done := copies[0][1]) is None or done.query()):
            for page in self.end_copy():
                dense = self._copying.pop(page)
                self.holds[page] = True
                (self._movable_dense if dense else self._movable)[page] = None

    def end_copy(self) -> list[int]:
        """Have the device wait for the end of the oldest copy, and return its pages.

        All ranks wait for their own copies, since another rank's may take longer than this one's.
        """
        self._memory.followers.tell(Command.END_COPY)
        pages, done = self._copies.popleft()
        if done is not None:
            torch.cuda.current_stream().wait_event(done)
        return pages

    def take_movable(self) -> list[int]:
        """Return the pages that may leave the GPU and are not read densely; each is returned once."""
        pages = list(self._movable)
        self._movable.clear()
        return pages

    def take_movable_dense(self, count: int) -> list[int]:
        """Return up to `count` pages that may leave and are read densely, the first to come; each is returned once."""
        pages = list(self._movable_dense)[: max(0, count)]
        for page in pages:
            del self._movable_dense[page]
        return pages

    def forget(self, pages: list[int]) -> None:
        """Drop pages that no sequence holds any more."""
        self.holds[pages] = False
        for page in pages:
            for kept in (self._waiting, self._copying, self._movable, self._movable_dense):
                kept.pop(page, None)
            for copied, _ in self._copies:  # what the page holds next counts as copied by its own copy only
                if page in copied:
                    copied.remove(page)

    def check_integrity(self, gpu_page_of: np.ndarray) -> None:
        """Raise AssertionError unless what is stored is what is on the GPU, byte by byte."""
        both = np.flatnonzero(self.holds & (gpu_page_of >= 0))
        for source, destination in self._layers:
            for near, far in zip(source, destination, strict=True):
                assert torch.equal(_page_rows(near)[gpu_page_of[both]].cpu(), _page_rows(far)[both].cpu())
        movable = {**self._movable, **self._movable_dense}
        assert all(self.holds[page] and gpu_page_of[page] >= 0 for page in movable)
        assert not (set(movable) & set(self._waiting)) and not (set(movable) & set(self._copying))


def _page_rows(pages: Tensor) -> Tensor:
    """Return each page as a row, a view: those in 8 bits as bytes."""
    return as_bytes(pages).flatten(1)
