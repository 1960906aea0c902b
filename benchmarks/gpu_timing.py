"""Timing work on a GPU without the cost of launching it: captured once in a CUDA graph, replayed many times."""

from collections.abc import Callable
from itertools import pairwise

import torch


def graph_milliseconds(work: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> float:
    """Median milliseconds of one replay of `work`, which must only launch kernels on preallocated tensors."""
    graph = capture(work, warm_up)
    graph.replay()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(marks))
    return times[len(times) // 2]


def capture(work: Callable[[], object], warm_up: int = 3) -> torch.cuda.CUDAGraph:
    """`work` as a CUDA graph, after running it a few times on a side stream, where kernels compile and load."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def copy_bandwidth(gigabytes: float = 4.0) -> float:
    """Bytes read and written a second by a device-to-device copy: the yardstick for what is bound by memory."""
    source = torch.empty(int(gigabytes * 2**30), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / graph_milliseconds(lambda: target.copy_(source)) * 1e3
