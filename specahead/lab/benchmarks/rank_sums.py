"""What one sum over ranks costs within a CUDA graph: as the engine makes it (engine.parallel), and by NCCL alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from specahead.engine.parallel.processes import serve_store
from specahead.engine.parallel.ranks import Ranks, join, leave

SUMS = 64  # of a graph: two a layer of an 8B model
REPLAYS = 50


def sum_microseconds(count: int, rows: list[int], hidden: int) -> list[tuple[float, float]]:
    """Return the microseconds of a sum over `count` GPUs for each number of rows: the engine's, and NCCL's.

    A sum is of [rows, hidden] bfloat16. Each rank is a process of its own, which this starts and waits for.
    """
    store, port = serve_store()
    found: Any = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(_measure, (count, port, rows, hidden, found), nprocs=count)
    del store  # ranks have met there
    microseconds: list[tuple[float, float]] = found.get()
    return microseconds


@torch.inference_mode()
def _measure(rank: int, count: int, port: int, rows: list[int], hidden: int, found: Any) -> None:
    ranks = Ranks(rank, count)
    join(ranks, port, torch.device("cuda", rank))
    measured = []
    for each in rows:
        tensor = torch.zeros(each, hidden, dtype=torch.bfloat16, device="cuda")
        measured.append((_microseconds(partial(ranks.sum, tensor)), _microseconds(partial(dist.all_reduce, tensor))))
    if rank == 0:
        found.put(measured)
    leave()


def _microseconds(add_up: Callable[[], object]) -> float:
    """Return the microseconds of one of the sums of a graph. All ranks must replay it equally often."""
    graph = captured(add_up)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPLAYS):
        graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / (REPLAYS * SUMS)


def captured(add_up: Callable[[], object], times: int = SUMS) -> torch.cuda.CUDAGraph:
    """Return a graph of a sum that is made `times` times. Relaxed, since NCCL's own threads look at its events."""
    add_up()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for _ in range(times):
            add_up()
    return graph
