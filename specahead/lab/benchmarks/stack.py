"""`specahead bench stack`: what a round costs without the models, through the real processes and real gRPC.

Target and draft run a scripted model (lab/benchmarks/scripted.py); the client endpoints are the launch's own. The
clients stream over gRPC from this process. All four share the machine's cores.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import grpc

from protos import inference_pb2_grpc
from specahead.lab.benchmarks.processes import children, free_addresses, launch_endpoints, port_of, wait_for_endpoints
from specahead.lab.benchmarks.serving.clients import Stream, request_of
from specahead.lab.results import Columns, describe, describe_run, processor, text_table, write_json
from specahead.wire.options import OPTIONS

PROMPT_TOKENS = 2000
EXACTNESS = ("exact", "approximate")
PASSES = 3
SIDES = ("target", "draft", "endpoints", "clients")  # the processes, in the order in which they start


@dataclass(frozen=True)
class StackRow:
    """For a client a round is the time from one message of a stream to the next."""

    sessions: int
    exactness: str
    rounds: int
    """Of all sessions."""
    round_p50_ms: float
    round_p95_ms: float
    session_round_ms: float
    """Wall time over the rounds of all sessions."""
    messages: int
    """Of all streams."""
    tokens_a_round: float
    announced_bytes_a_round: float
    cpu_ms: dict[str, float]
    """CPU time of each process over the rounds of all sessions, prompts included."""


def run(flags: argparse.Namespace) -> list[StackRow]:
    """Measure, print the table, and write it to the JSON file if one is named. Returns the rows.

    Raises ValueError for numbers that give nothing to measure, OSError if a process does not start.
    """
    sessions, tokens, gamma = flags.sessions, flags.tokens, flags.gamma
    _check(sessions, tokens, gamma)
    head = describe_run(flags, processor())
    cases = list(itertools.product(EXACTNESS, sessions))
    with _stack(gamma) as (address, processes):
        # The first pass warms up: connections, prompts to reuse, code paths.
        passes = [
            [asyncio.run(_measure(address, processes, n, tokens, exactness)) for exactness, n in cases]
            for _ in range(1 + PASSES)
        ][1:]
    rows = [sorted(runs, key=lambda row: row.session_round_ms)[PASSES // 2] for runs in zip(*passes, strict=True)]
    print(f"{describe(head)}\n{text_table(_COLUMNS, rows)}\n{_LEGEND}")
    write_json(flags.json, head | {"rows": rows})
    return rows


def _check(sessions: list[int], tokens: int, gamma: int) -> None:
    if not sessions or min(sessions) < 1:
        raise ValueError(f"sessions must be 1 or more, got {sessions}")
    if not 1 <= gamma <= 64:
        raise ValueError(f"gamma must lie in 1 … 64, got {gamma}")
    least = 2 * (gamma + 1) + 1
    if tokens < least:
        raise ValueError(f"tokens {tokens}: with gamma {gamma} it takes {least} for two rounds to be timed")


def _cpu_of(side: str) -> Callable[[StackRow], str]:
    return lambda row: f"{row.cpu_ms[side]:.2f} ms"


_COLUMNS: Columns[StackRow] = {
    "sessions": lambda row: str(row.sessions),
    "exactness": lambda row: row.exactness,
    "rounds": lambda row: str(row.rounds),
    "round p50": lambda row: f"{row.round_p50_ms:.2f} ms",
    "p95": lambda row: f"{row.round_p95_ms:.2f} ms",
    "a session": lambda row: f"{row.session_round_ms:.2f} ms",
    "messages": lambda row: str(row.messages),
    "tokens": lambda row: f"{row.tokens_a_round:.2f}",
    "announced": lambda row: f"{row.announced_bytes_a_round:.1f} B",
    **{side: _cpu_of(side) for side in SIDES},
}
_LEGEND = f"""\
Each row is the middle one of {PASSES} passes. Round: as a client sees it. A session: wall time over
the rounds of all sessions. Tokens, announced: a round. By process: CPU time over the rounds of all sessions."""


async def _measure(address: str, processes: list[int], sessions: int, tokens: int, exactness: str) -> StackRow:
    before = [_cpu_seconds(pid) for pid in processes]
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        streams = await asyncio.gather(*(_stream(stub, i, tokens, exactness) for i in range(sessions)))
    cpu = [_cpu_seconds(pid) - earlier for pid, earlier in zip(processes, before, strict=True)]
    gaps = [1e3 * (b - a) for stream in streams for a, b in itertools.pairwise(stream.times)]
    # From the first message of any session to the last of all: prompts are not part of it.
    wall = 1e3 * (max(stream.times[-1] for stream in streams) - min(stream.times[0] for stream in streams))
    rounds = sum(stream.summary.rounds for stream in streams)
    return StackRow(
        sessions=sessions,
        exactness=exactness,
        rounds=rounds,
        round_p50_ms=median(gaps),
        round_p95_ms=quantiles(gaps, n=20)[-1],
        session_round_ms=wall / rounds,
        messages=sum(len(stream.times) for stream in streams),
        tokens_a_round=sessions * tokens / rounds,
        announced_bytes_a_round=sum(stream.summary.announced_bytes for stream in streams) / rounds,
        cpu_ms={side: 1e3 * seconds / rounds for side, seconds in zip(SIDES, cpu, strict=True)},
    )


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has taken, in user mode and in the kernel; NaN where there is no /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return math.nan
    values = stat.read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


async def _stream(stub: inference_pb2_grpc.InferenceStub, index: int, tokens: int, exactness: str) -> Stream:
    """Run one session to its end; `index` makes its prompt its own."""
    request, stream = request_of([(index + i) % 4000 for i in range(PROMPT_TOKENS)], tokens, exactness), Stream()
    async for response in stub.Generate(request):
        stream.take(response)
    return stream


@contextlib.contextmanager
def _stack(gamma: int) -> Iterator[tuple[str, list[int]]]:
    """Run a scripted target and draft, and client endpoints over them; yield the gRPC address, and the process ids of
    SIDES, the last of which is this process.
    """
    target, draft = free_addresses(2)
    processes: list[int] = []
    with children() as start:

        def start_noted(*command: str, **options: Any) -> "subprocess.Popen[str]":
            process = start(*command, **options)
            processes.append(process.pid)
            return process

        of_both = "--gamma", str(gamma)
        start_noted("specahead.lab.benchmarks.scripted", "target", "--port", port_of(target), *of_both)
        dials = "--target", target
        start_noted("specahead.lab.benchmarks.scripted", "draft", "--port", port_of(draft), *dials, *of_both)
        services = ("--target-address", target, "--draft-address", draft)
        endpoints = wait_for_endpoints(launch_endpoints(start_noted, *services))
        yield endpoints.grpc, [*processes, os.getpid()]
