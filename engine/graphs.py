"""CUDA graphs: launches that are captured once and replayed, each with buffers of its own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.staging import Buffers


@dataclass
class Captured:
    """The buffers of a shape, and what runs it: a graph, or its launches one by one where there is none."""

    buffers: Buffers
    launch: Callable[[], None]
    graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Run what the buffers hold."""
        if self.graph is None:
            self.launch()
        else:
            self.graph.replay()


class GraphPool:
    """The memory that all graphs of a runner share, because they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, buffers: Buffers, launch: Callable[[], None]) -> Captured:
        """Capture launches. Raises what the capture raises: there is no quiet way back to eager passes."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels compile and load, cuBLAS takes its workspace
            for _ in range(2):
                launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            launch()
        return Captured(buffers, launch, graph)
