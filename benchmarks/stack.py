"""`specahead bench stack`: what a round costs without the models, through the real processes and real gRPC.

Target and draft run a scripted model (benchmarks/scripted.py); the client endpoints are the launch's own. The
clients stream over gRPC from this process.
"""

import asyncio
import contextlib
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

import grpc

from protos import inference_pb2, inference_pb2_grpc
from wire.server import OPTIONS

PROMPT_TOKENS = 2000
EXACTNESS = ("exact", "approximate")


@dataclass
class Row:
    """Milliseconds. A round is the time between two messages of one stream, as its client sees it."""

    sessions: int
    exactness: str
    rounds: int
    round_p50: float
    round_p95: float
    per_session_and_round: float  # wall time over the rounds of all sessions
    tokens_a_round: float
    announced_bytes_a_round: float


def run_stack_benchmark(sessions: list[int], tokens: int, gamma: int, json_file: str | None) -> list[Row]:
    with _stack(gamma) as address:
        asyncio.run(_measure(address, 1, 32, "exact"))  # warm-up
        rows = [asyncio.run(_measure(address, n, tokens, e)) for e in EXACTNESS for n in sessions]
    head = {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"specahead bench stack --sessions {' '.join(map(str, sessions))} --tokens {tokens} --gamma {gamma}",
    }
    for name, value in head.items():
        print(f"{name}: {value}")
    print(
        f"{'sessions':>8} {'exactness':>12} {'rounds':>7} {'round p50':>10} {'p95':>7} {'a session':>10} ",
        end="",
    )
    print(f"{'tokens':>7} {'announced':>10}")
    for row in rows:
        print(
            f"{row.sessions:>8} {row.exactness:>12} {row.rounds:>7} {row.round_p50:>7.2f} ms {row.round_p95:>7.2f} ",
            end="",
        )
        print(
            f"{row.per_session_and_round:>7.2f} ms {row.tokens_a_round:>7.2f} {row.announced_bytes_a_round:>8.1f} B"
        )
    print(
        "a session: milliseconds a session and round (wall time over all rounds); tokens, announced: a round"
    )
    if json_file:
        Path(json_file).write_text(
            json.dumps(head | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )
    return rows


async def _measure(address: str, sessions: int, tokens: int, exactness: str) -> Row:
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        started = time.perf_counter()
        streams = await asyncio.gather(*(_stream(stub, i, tokens, exactness) for i in range(sessions)))
    gaps = [gap for times, _ in streams for gap in times]
    # From the first round of any session to the last of all: prompts are not part of it.
    wall = max(end for _, (_, end, _) in streams) - max(started, min(begin for _, (begin, _, _) in streams))
    rounds = sum(summary.rounds for _, (_, _, summary) in streams)
    announced = sum(summary.announced_bytes for _, (_, _, summary) in streams)
    return Row(
        sessions,
        exactness,
        rounds,
        1e3 * median(gaps),
        1e3 * quantiles(gaps, n=20)[-1],
        1e3 * wall / rounds,
        sessions * tokens / rounds,
        announced / rounds,
    )


async def _stream(
    stub: inference_pb2_grpc.InferenceStub, index: int, tokens: int, exactness: str
) -> tuple[list[float], tuple[float, float, inference_pb2.SpeculationSummary]]:
    """Times between messages, and (time of the first message, of the last, the summary)."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[(index + i) % 4000 for i in range(PROMPT_TOKENS)]),
        max_tokens=tokens,
        temperature=0,
        exactness=f"EXACTNESS_{exactness.upper()}",
        ignore_eos=True,
    )
    times: list[float] = []
    summary = inference_pb2.SpeculationSummary()
    async for response in stub.Generate(request):
        times.append(time.perf_counter())
        summary = response.speculation
    return [b - a for a, b in itertools.pairwise(times)], (times[0], times[-1], summary)


@contextlib.contextmanager
def _stack(gamma: int) -> Iterator[str]:
    """Scripted target and draft, and the client endpoints over them; yields the gRPC address."""
    with contextlib.ExitStack() as processes:

        def start(pattern: str, *command: str) -> str:
            process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
            processes.callback(_stop, process)
            assert process.stdout is not None
            address = ""
            for line in process.stdout:
                found = re.search(pattern, line)
                address = found.group(1) if found else address
                if address and (line.strip() == "ready" or "launch" not in command[1]):
                    return address
            raise RuntimeError(f"{' '.join(command)} ended before it was ready")

        listening = r"at (\S+:\d+)"
        target = start(listening, "-m", "benchmarks.scripted", "target", "--gamma", str(gamma))
        draft = start(
            listening, "-m", "benchmarks.scripted", "draft", "--gamma", str(gamma), "--target", target
        )
        services = ("--target-address", target, "--draft-address", draft)
        ports = ("--grpc-port", "0", "--http-port", "0", "--gamma", str(gamma))
        yield start(r"gRPC endpoint: (\S+)", "-m", "orchestrator.launch", *services, *ports)


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found.group(1) if found else platform.processor()
