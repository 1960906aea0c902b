"""A stand-in for a GPU, on which captured steps run as late as possible: when the host waits for their results.

With it a test without a GPU finds faults that otherwise only graphs show: of shapes with room for more sequences and
tokens than there are, of inputs that the host overwrites too early, and of launches that read what earlier launches
leave on the device. It runs the torch kernels. It does not find Python numbers that a graph would freeze.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specahead.engine.staging import Staging
from specahead.engine.steps.device_chain import DeviceChain
from specahead.engine.steps.graphs import Captured, Graphs
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.pass_runner import PassRunner


class LateDevice:
    """A stream of launches."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._ended = 0
        self._runs = False
        self.replayed = 0
        """Graphs that ran."""

    def launch(self, run: Callable[[], object]) -> None:
        """Queue a launch. A launch within a running one runs at once, as part of it."""
        if self._runs:
            run()
        else:
            self._waiting.append(run)

    def run_until(self, count: int) -> None:
        """Run launches in order until `count` have ended since the device was made."""
        self._runs = True
        with torch.inference_mode():
            while self._ended < count:
                self._waiting.popleft()()
                self._ended += 1
        self._runs = False

    @property
    def launched(self) -> int:
        """Launches since the device was made, whether or not they have run."""
        return self._ended + len(self._waiting)

    def replay(self, captured: Captured) -> None:
        """Run a graph, which also copies its inputs and results."""
        self.replayed += 1
        captured.buffers.inputs.copy_in()
        captured.launch()
        captured.buffers.results.copy_out()


def run_late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """Have all runners that the test makes later capture their steps and rounds, and run them on a late device."""
    device = LateDevice()

    class Event:
        def record(self) -> None:
            self._count = device.launched

        def synchronize(self) -> None:
            device.run_until(self._count)

    class Graph:
        def __init__(self, captured: Captured) -> None:
            self._captured = captured

        def replay(self) -> None:
            device.launch(lambda: device.replay(self._captured))

    def capture(_: Graphs, captured: Captured) -> Graph:
        captured.buffers.inputs.in_graph = captured.buffers.results.in_graph = True
        return Graph(captured)

    make_staging, make_runner = Staging.__init__, ModelRunner.__init__

    def init_staging(staging: Staging, *given: Any) -> None:
        make_staging(staging, *given)
        staging._device, staging._sent = torch.zeros_like(staging._host), Event()
        for name, tensor in staging.device.items():
            start = tensor.data_ptr() - staging._host.data_ptr()
            part = staging._device[start : start + tensor.nbytes]
            staging.device[name] = part.view(tensor.dtype).view(tensor.shape)

    def init_runner(runner: ModelRunner, *given: Any, **how: Any) -> None:
        make_runner(runner, *given, **how)
        runner._captures = runner._joins = runner.chains_steps = runner._shapes.chains_steps = True
        runner.passes.graphs = Graphs(captures=True)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(Graphs, "_capture", capture)
    monkeypatch.setattr(Staging, "__init__", init_staging)
    monkeypatch.setattr(ModelRunner, "__init__", init_runner)
    late = (Staging, "copy_in"), (Staging, "copy_out"), (PassRunner, "_run_exact"), (DeviceChain, "impose")
    for owner, name in late:
        monkeypatch.setattr(owner, name, _launching(getattr(owner, name), device))
    return device


def _launching(method: Callable[..., object], device: LateDevice) -> Callable[..., None]:
    return lambda *given: device.launch(lambda: method(*given))
