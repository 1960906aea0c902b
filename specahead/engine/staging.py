"""The inputs and results of a captured step: named arrays side by side, moved by one copy.

A step has a dozen small inputs, and each copy would cost the host tens of microseconds.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes; kernels may assume that a tensor starts at a multiple of this

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes by name


class Staging:
    """Arrays of fixed shapes in host memory (`host`, numpy) and on the device (`device`, torch), zero at first.

    For inputs: call `begin`, write `host`, then `send`. For results: the device writes `device`, then call `fetch`. On
    a CPU `host` and `device` are the same memory.
    in_graph: whether a CUDA graph contains the copies, and is replayed between `send` and `fetch`. Then `send` and
    `fetch` launch no copy.
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

    @property
    def flat(self) -> np.ndarray:
        """All arrays of `host` in one, uint8: the same bytes in each process that has this layout."""
        flat: np.ndarray = self._host.numpy()
        return flat

    @property
    def flat_on_device(self) -> Tensor:
        """All tensors of `device` in one, uint8."""
        return self._device

    def begin(self) -> None:
        """Wait until the last `send` has read `host`, which may then be written."""
        if self._sent is not None and not self.in_graph:
            self._sent.synchronize()

    def send(self) -> None:
        """Launch the copy of `host` to the device, on the current stream."""
        if self._sent is not None and not self.in_graph:
            self.copy_in()
            self._sent.record()

    def send_back(self) -> torch.cuda.Event | None:
        """Launch the copy of the results to `host`, on the current stream.

        Returns an event that comes when they have arrived; None: they are there. The next `send_back` overwrites them.
        """
        if self._sent is None:
            return None
        if not self.in_graph:
            self.copy_out()
        done = torch.cuda.Event()
        done.record()
        return done

    def wait(self, done: torch.cuda.Event | None) -> dict[str, np.ndarray]:
        """Wait for the results that `send_back` sends, and return `host`. done: what it returned."""
        if done is not None:
            done.synchronize()
        return self.host

    def fetch(self) -> dict[str, np.ndarray]:
        """Wait for the results, and return `host`, which the next `fetch` overwrites."""
        return self.wait(self.send_back())

    def copy_in(self) -> None:
        """Launch the copy from the host."""
        self._device.copy_(self._host, non_blocking=True)

    def copy_out(self) -> None:
        """Launch the copy to the host."""
        self._host.copy_(self._device, non_blocking=True)


@dataclass
class Buffers:
    """All tensors that the launches of one shape read and write."""

    inputs: Staging
    """Comes from the host."""
    results: Staging
    """Goes back to the host."""
    tensors: dict[str, Tensor] = field(init=False)
    """By name: the inputs on the device, tensors that last from one run to the next, and intermediate results."""

    def __post_init__(self) -> None:
        self.tensors = dict(self.inputs.device)
