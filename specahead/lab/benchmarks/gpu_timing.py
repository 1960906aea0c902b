"""Timing work on a GPU without the cost of launching it: captured once in a CUDA graph, replayed many times."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from specahead.lab.results import Columns, describe, describe_run, text_table, write_json

AWAKE = 0.1  # seconds of work before the clocks of an idle GPU are up
COPIES = 20


def graph_milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median milliseconds of one replay of `work`, which must only launch kernels."""
    graph = capture(work)
    began = time.perf_counter()
    while time.perf_counter() < began + AWAKE:
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


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture `work` as a CUDA graph, after three runs on a side stream, in which kernels compile and load."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def copy_bandwidth() -> float:
    """Return the bytes that copies of 4 GiB on the device read and write a second: the bound of memory-bound work."""
    source = torch.empty(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / copy_milliseconds(source, target) * 1e3


def copy_milliseconds(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the milliseconds of one copy among COPIES in a row. A source on the host must be pinned.

    Not in a graph: there a copy on the device becomes a memcpy node, which ran at two thirds of the speed on an H200.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(COPIES):
        target.copy_(source, non_blocking=True)
    begin.record()
    for _ in range(COPIES):
        target.copy_(source, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / COPIES


@dataclass(frozen=True)
class TimedRow:
    """One thing that was timed."""

    what: str
    milliseconds: float
    floor: float
    """Milliseconds in which its memory is read once, as fast as copies on the device read and write."""
    rival: float | None = None
    """Milliseconds of what it is compared with."""

    def against(self, rival: float) -> "TimedRow":
        return replace(self, rival=rival)

    def named(self, prefix: str) -> "TimedRow":
        return replace(self, what=prefix + self.what)


def require_gpu() -> None:
    """Raise ValueError without a CUDA device."""
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a CUDA device; torch sees none")


def graphics_processor() -> str:
    """Return this machine's GPU, and what runs on it."""
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


def report(flags: argparse.Namespace, bandwidth: float, rows: list[TimedRow], legend: str) -> None:
    """Print the table, and write it to the JSON file if one is named. bandwidth: as of `copy_bandwidth`."""
    columns: Columns[TimedRow] = {
        "": lambda row: row.what,
        "time": lambda row: f"{row.milliseconds:.4f} ms",
        "floor": lambda row: f"{row.floor:.4f} ms",
        "to floor": lambda row: f"{row.milliseconds / row.floor:.2f}",
        "TB/s": lambda row: f"{row.floor / row.milliseconds * bandwidth / 1e12:.3f}",
        "rival": lambda row: "" if row.rival is None else f"{row.rival:.4f} ms",
        "rival/ours": lambda row: "" if row.rival is None else f"{row.rival / row.milliseconds:.2f}",
    }
    head = describe_run(flags, graphics_processor())
    head["copy bandwidth"] = f"{bandwidth / 1e12:.2f} TB/s, read and written"
    print(f"{describe(head)}\n{text_table(columns, rows, left=1)}\n{legend}")
    write_json(flags.json, head | {"bandwidth": bandwidth, "rows": rows})
