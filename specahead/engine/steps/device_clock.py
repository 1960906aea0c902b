"""How long a device takes for what is launched, without waiting for it."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch


class DeviceClock:
    """Times work on one device. Launches of others that run before it on the same stream do not count."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._under_way: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._ended: list[tuple[int, float]] = []

    @contextlib.contextmanager
    def timing(self, amount: int) -> Iterator[None]:
        """Time what is launched in the block. amount: of it, which `take` returns with the time."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._ended.append((amount, time.perf_counter() - began))
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._under_way.append((amount, begin, end))

    def take(self) -> list[tuple[int, float]]:
        """Return the amount and the seconds of all work that has ended since the last call."""
        while self._under_way and self._under_way[0][2].query():
            amount, begin, end = self._under_way.popleft()
            self._ended.append((amount, begin.elapsed_time(end) / 1e3))
        taken, self._ended = self._ended, []
        return taken
