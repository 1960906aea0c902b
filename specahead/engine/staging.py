"""What a captured step takes from the host and gives back to it: named arrays side by side, moved by one copy.

Each launch or copy costs the host tens of microseconds; a step has a dozen small inputs.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes: what kernels may assume of a tensor's start

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes by name


class Staging:
    """Arrays of fixed shapes in host memory (`host`, numpy) and on the device (`device`, torch), zero at first.

    Write `host` after `begin`, then `send`; or let the device write `device`, then `fetch`. On a CPU both are the
    same memory. in_graph: the copies stand in a CUDA graph, which is replayed between `send` and `fetch`, each time
    after the last `fetch`; then these launch nothing.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        offsets, size = {}, 0
        for name, (shape, dtype) in layout.items():
            offsets[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=cuda)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device) if cuda else self._host
        self._sent = torch.cuda.Event() if cuda else None
        self.in_graph = False
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        for name, (shape, dtype) in layout.items():
            part = slice(offsets[name], offsets[name] + math.prod(shape) * dtype.itemsize)
            self.host[name] = self._host[part].view(dtype).view(shape).numpy()
            self.device[name] = self._device[part].view(dtype).view(shape)

    def begin(self) -> None:
        """Wait until the last `send` has read `host`."""
        if self._sent is not None and not self.in_graph:
            self._sent.synchronize()

    def send(self) -> None:
        """Copy `host` to the device, in the order of its stream, without waiting."""
        if self._sent is not None and not self.in_graph:
            self.copy_in()
            self._sent.record()

    def send_back(self) -> torch.cuda.Event | None:
        """Copy what the device writes to `host`, in the order of its stream, without waiting.

        Returns what comes once it is there; None: it is. The next `send_back` overwrites it.
        """
        if self._sent is None:
            return None
        if not self.in_graph:
            self.copy_out()
        done = torch.cuda.Event()
        done.record()
        return done

    def fetch(self) -> dict[str, np.ndarray]:
        """Wait for what the device writes; `host`, which the next `fetch` overwrites."""
        done = self.send_back()
        if done is not None:
            done.synchronize()
        return self.host

    def copy_in(self) -> None:
        """Launch the copy from the host."""
        self._device.copy_(self._host, non_blocking=True)

    def copy_out(self) -> None:
        """Launch the copy to the host."""
        self._host.copy_(self._device, non_blocking=True)


@dataclass
class Buffers:
    """All tensors that the launches of one shape read and write.

    inputs: what comes from the host. results: what goes back to it. tensors: by name, the inputs on the device, what
    lasts from one run to the next, and what the launches leave there.
    """

    inputs: Staging
    results: Staging
    tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = dict(self.inputs.device)
