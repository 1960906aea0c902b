"""CUDA graphs: launches that are captured once and replayed. Each graph has its own buffers."""

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
from specahead.engine.parallel.ranks import ALONE, Ranks
from specahead.engine.staging import Buffers

MOST_UNPREPARED = 64  # graphs of one runner, captured because a request came first; the least recently used is dropped
SHORT_UNPREPARED = 24  # the same, where the GPU's memory is short
# Bytes of a GPU that stay free: of graphs that requests ask for, since a step over 8,192 tokens of a prompt takes more
# than one GiB for a time; and of graphs that no request has asked for yet, twice as many.
LEAST_FREE = 2 << 30
LEAST_FREE_BEFORE = 2 * LEAST_FREE

log = logging.getLogger(__name__)


@dataclass
class Captured:
    """A shape that is ready to run."""

    buffers: Buffers
    launch: Callable[[], None]
    """Launches the shape's kernels one by one."""
    graph: torch.cuda.CUDAGraph | None = None
    """Replays the launches together; None: nothing was captured."""

    def run(self) -> None:
        """Run the shape on its buffers."""
        if self.graph is None:
            self.launch()
        else:
            self.graph.replay()


class Graphs:
    """The graphs of one runner, by shape. They never run at the same time, so they share one memory pool.

    Prepared graphs stay. A graph that was captured because a request came first may be evicted: at most MOST_UNPREPARED
    of these stay, and SHORT_UNPREPARED where memory is short, so that no client can fill the GPU with graphs. Two
    runners cannot share a Graphs, because a memory pool cannot be used again once its last graph is gone.
    captures: whether to capture. If not, nothing is kept, and launches run one by one.
    ranks: those that run the model; all of them capture the same graphs, in the same order.
    """

    made: ClassVar[int] = 0
    """Graphs that this process has captured. Each capture holds up everything else on the device."""

    def __init__(self, captures: bool, ranks: Ranks = ALONE) -> None:
        self.captures, self._ranks = captures, ranks
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
        """Return a shape that is ready to run: captured the first time, or with new buffers each time if nothing is
        captured.

        prepared: whether the graph is made before any request needs it, and stays. Raises what the capture raises;
        nothing falls back to eager passes.
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
        """Drop the least recently used unprepared graphs beyond those that may stay.

        None of them is running, since the capture just before this has waited for the device. Their memory serves
        later captures. All ranks drop the same graphs, since no rank may replay a sum while another one captures it.
        """
        unprepared = [shape for shape in self.by_shape if shape not in self._prepared]
        if len(unprepared) <= SHORT_UNPREPARED:
            return
        is_short = self._ranks.least(free_memory()) < LEAST_FREE
        for shape in unprepared[: -(SHORT_UNPREPARED if is_short else MOST_UNPREPARED)]:
            log.debug("dropped the least recently used CUDA graph: %s", shape)
            del self.by_shape[shape]

    def _capture(self, captured: Captured) -> torch.cuda.CUDAGraph:
        """Capture the launches, together with the copies from and to the host, so that one call replays all of them."""
        inputs, results = captured.buffers.inputs, captured.buffers.results
        graph = torch.cuda.CUDAGraph()
        # Collecting a graph or an event during a capture aborts the process. The mode is relaxed because kernels are
        # loaded, and allocate memory, when they are first captured.
        mode = "relaxed"
        with no_garbage_collected(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            inputs.copy_in()
            captured.launch()
            results.copy_out()
        inputs.in_graph = results.in_graph = True
        return graph


def free_memory() -> int:
    """Return how many bytes of the present GPU's memory are free.

    Memory that torch keeps for later tensors counts as taken. So torch gives it back first if little is free.
    """
    if torch.cuda.mem_get_info()[0] < LEAST_FREE_BEFORE:
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@contextlib.contextmanager
def tell_captures(graphs: Graphs, what: str) -> Iterator[None]:
    """Log how many graphs are captured in this context, in how many seconds and how much memory. what: for the log."""
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
