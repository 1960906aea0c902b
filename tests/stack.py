"""Starting the real thing for tests: Ray, services and gateways in their own processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from protos import inference_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 120


@dataclass
class Stack:
    """A running launch. `output` is all that it printed."""

    process: subprocess.Popen[str]
    output: Path
    grpc: str = ""
    http: str = ""
    target_pid: int = 0
    draft_pid: int = 0
    channels: list[grpc.Channel] = field(default_factory=list)

    def stub(self) -> inference_pb2_grpc.InferenceStub:
        channel = grpc.insecure_channel(self.grpc)
        self.channels.append(channel)
        return inference_pb2_grpc.InferenceStub(channel)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        for channel in self.channels:
            channel.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_stack(*flags: str, environment: dict[str, str] | None = None) -> Stack:
    """Launch with ports of its own choosing; returns when it says ready."""
    output = Path(tempfile.mkdtemp(prefix="specahead-test-")) / "launch.txt"
    with output.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.launch", "--grpc-port", "0", "--http-port", "0", *flags],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | (environment or {}),
        )
    stack = Stack(process, output)
    deadline = time.monotonic() + START_SECONDS
    while "\nready" not in output.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"launch {' '.join(flags)} did not become ready:\n{output.read_text()}")
        time.sleep(0.1)
    text = output.read_text()

    def find(pattern: str) -> str:
        match = re.search(pattern, text)
        assert match is not None, f"{pattern} not in:\n{text}"
        return match.group(1)

    stack.grpc, stack.http = find(r"gRPC endpoint: (\S+)"), find(r"HTTP endpoint: (\S+)")
    stack.target_pid, stack.draft_pid = int(find(r"target service: pid (\d+)")), int(find(r"draft service: pid (\d+)"))
    return stack
