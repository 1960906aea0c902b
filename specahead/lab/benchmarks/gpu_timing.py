"""Timing work on a GPU without the cost of launching it: captured once in a CUDA graph, replayed many times."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import torch

AWAKE = 0.1  # seconds of work before the clocks of an idle GPU are up


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
    return 2 * source.nbytes / copy_milliseconds(source, target, 20) * 1e3


def copy_milliseconds(source: torch.Tensor, target: torch.Tensor, copies: int) -> float:
    """Return the milliseconds of one copy among many in a row. A source on the host must be pinned.

    Not in a graph: there a copy on the device becomes a memcpy node, which ran at two thirds of the speed on an H200.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(copies):
        target.copy_(source, non_blocking=True)
    begin.record()
    for _ in range(copies):
        target.copy_(source, non_blocking=True)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / copies


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


@dataclass(frozen=True)
class Head:
    """Where and how a table was made."""

    machine: str
    date: str
    command: str
    bandwidth: float
    """Bytes a second that copies on the device read and write."""

    @staticmethod
    def here(command: str, bandwidth: float) -> "Head":
        import triton

        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
        return Head(machine, datetime.now(UTC).date().isoformat(), command, bandwidth)

    def write(self, file: str, rows: list[TimedRow]) -> None:
        content = asdict(self) | {"rows": [asdict(row) for row in rows]}
        Path(file).write_text(json.dumps(content, indent=1) + "\n")


def require_gpu() -> None:
    """Raise ValueError without a CUDA device."""
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a CUDA device; torch sees none")


def report(head: Head, rows: list[TimedRow], note: str) -> str:
    width = max(len(row.what) for row in rows)
    lines = [
        f"machine: {head.machine}",
        f"date: {head.date}",
        f"command: {head.command}",
        f"copy bandwidth: {head.bandwidth / 1e12:.2f} TB/s, read and written",
        f"{'':<{width}} {'time':>11} {'floor':>11} {'to floor':>8} {'TB/s':>6} {'rival':>11} {'rival/ours':>10}",
    ]
    for row in rows:
        speed = row.floor / row.milliseconds * head.bandwidth / 1e12
        other = "" if row.rival is None else f"{row.rival:>8.4f} ms {row.rival / row.milliseconds:>10.2f}"
        lines.append(
            f"{row.what:<{width}} {row.milliseconds:>8.4f} ms {row.floor:>8.4f} ms "
            f"{row.milliseconds / row.floor:>8.2f} {speed:>6.3f} {other}"
        )
    lines.append(note)
    return "\n".join(lines)
