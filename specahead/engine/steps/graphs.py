"""CUDA graphs: launches that are captured once and replayed, each with buffers of its own."""

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from specahead.config.garbage import no_garbage_collected
from specahead.engine.staging import Buffers

MOST_UNPREPARED = 64  # graphs of one runner, captured because a request came first; the least recently used is dropped

log = logging.getLogger(__name__)


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


class Graphs:
    """The graphs of a runner by their shape, in memory that they share, because they never run at the same time.

    captures: False: nothing is captured nor kept, launches run one by one. A runner that captures has one of these of
    its own: memory whose last graph is gone cannot be used again. Graphs that were prepared stay; of those captured
    because a request came first at most MOST_UNPREPARED stay, so that no client can fill the GPU with graphs. made:
    captures of this process, each of which holds up all that runs on the device.
    """

    made: ClassVar[int] = 0

    def __init__(self, captures: bool) -> None:
        self.captures = captures
        self.by_shape: OrderedDict[Hashable, Captured] = OrderedDict()  # the least recently used first
        self._prepared: set[Hashable] = set()
        self._pool = torch.cuda.graph_pool_handle() if captures else None

    def of(
        self,
        shape: Hashable,
        make_buffers: Callable[[], Buffers],
        launch: Callable[[Buffers], None],
        prepared: bool = False,
    ) -> Captured:
        """Return what runs a shape, captured the first time; without graphs in new buffers, for this time.

        prepared: whether it is made ready for requests to come, and stays. Raises what the capture raises: there is no
        quiet way back to eager passes.
        """
        if prepared:
            self._prepared.add(shape)
        captured = self.by_shape.get(shape)
        if captured is not None:
            self.by_shape.move_to_end(shape)
            return captured
        buffers = make_buffers()
        captured = Captured(buffers, partial(launch, buffers))
        if self.captures:
            began = time.perf_counter()
            captured.graph = self._capture(captured)
            Graphs.made += 1
            log.debug("captured a CUDA graph in %.2f s: %s", time.perf_counter() - began, shape)
            self.by_shape[shape] = captured
            self._evict()
        return captured

    def _evict(self) -> None:
        """Drop the least recently used of the unprepared graphs if there are too many.

        None of them is running: the capture that precedes this has waited for the device.
        """
        unprepared = [shape for shape in self.by_shape if shape not in self._prepared]
        for shape in unprepared[:-MOST_UNPREPARED]:
            log.debug("dropped the least recently used CUDA graph: %s", shape)
            del self.by_shape[shape]

    def _capture(self, captured: Captured) -> torch.cuda.CUDAGraph:
        """Capture the copies from and to the host with the launches: each call from outside costs the host dearly."""
        inputs, results = captured.buffers.inputs, captured.buffers.results
        graph = torch.cuda.CUDAGraph()
        # A graph or an event that is collected while another is captured aborts the process. Relaxed: kernels are
        # loaded, and take memory for that, where they are first captured; nothing is launched before to have that done.
        mode = "relaxed"
        with no_garbage_collected(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            inputs.copy_in()
            captured.launch()
            results.copy_out()
        inputs.in_graph = results.in_graph = True
        return graph


@contextlib.contextmanager
def tell_captures(graphs: Graphs, what: str) -> Iterator[None]:
    """Log how many graphs are captured in this context, what of, in how many seconds and in how much memory."""
    start, captured, memory = time.monotonic(), len(graphs.by_shape), torch.cuda.memory_reserved()
    yield
    log.info(
        "CUDA graphs are captured",
        extra={
            "of": what,
            "graphs": len(graphs.by_shape) - captured,
            "seconds": round(time.monotonic() - start, 1),
            "gib": round((torch.cuda.memory_reserved() - memory) / 2**30, 2),
        },
    )
