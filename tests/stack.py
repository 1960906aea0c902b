"""Starting the real thing for tests: Ray, services and gateways in their own processes."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc import Channel

from protos import inference_pb2_grpc
from specahead.models import DRAFT, TARGET
from tests.plans import sparse_plan_file

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 120
QUIET_SECONDS = 15  # that a launch takes at most on two cores that have nothing else to do


class Orphan:
    """A process whose parent has ended, as under nohup, used like a Popen. Nobody learns its exit status: it is 0."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return 0 once the process has ended, else None."""
        return 0 if select.select([self._descriptor], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """Return 0 when the process has ended. Raises TimeoutExpired after so many seconds."""
        if timeout is not None and not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass
class Stack:
    """A running launch. `output` is all that it printed; `services`: address and process id of those that it placed.

    seconds: what it took to be ready.
    """

    process: subprocess.Popen[str] | Orphan
    output: Path
    grpc: str = ""
    http: str = ""
    target_pid: int = 0
    draft_pid: int = 0
    services: dict[str, tuple[str, int]] = field(default_factory=dict)
    channels: list[Channel] = field(default_factory=list)
    seconds: float = 0.0

    def patience(self, seconds: float) -> float:
        """Return how long something may take here that is promised within so many seconds on a quiet machine.

        A machine on which the launch itself took longer than there is given as much more.
        """
        return seconds * max(1.0, self.seconds / QUIET_SECONDS)

    def stub(self) -> inference_pb2_grpc.InferenceStub:
        channel = grpc.insecure_channel(self.grpc)
        self.channels.append(channel)
        return inference_pb2_grpc.InferenceStub(channel)

    def end(self) -> None:
        """Tell the launch to end, and do not wait for that."""
        for channel in self.channels:
            channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 30) -> int:
        """Return the exit status of a launch that was told to end. Raises TimeoutExpired after so many seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def stop(self, timeout: float = 30) -> int:
        """End the launch; return its exit status."""
        self.end()
        return self.wait(timeout)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Services:
    """A target and a draft process without Ray, started by their own command lines or by stand-ins for them.

    draft: empty where the target is alone.
    """

    target: str
    draft: str
    processes: list[subprocess.Popen[str]]

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(20)


def start_service(*command: str) -> tuple[subprocess.Popen[str], str]:
    """Run `python COMMAND…` with one thread until it says where it listens."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=variables)
    line = process.stdout.readline()
    match = re.search(r"at (\S+:\d+)", line)
    if match is None:
        process.kill()
        raise RuntimeError(f"{command} said {line!r}")
    return process, match.group(1)


def _stating_gamma(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return flags with a γ of 4 and without audits, unless they state speculation: a machine's speed then decides over
    no round.
    """
    return flags if "--speculation" in flags else (*flags, "--speculation", '{"gamma": 4, "audit_share": 0}')


def start_services(
    *flags: str,
    target_command: tuple[str, ...] = ("-m", "target_service"),
    dial: Callable[[str], str] = lambda address: address,
    drafted: bool = True,
) -> Services:
    """The bundled pair, by a plan that reads short texts sparsely, too.

    `flags` go to both; `dial` may put something between draft and target. drafted: whether there is a draft; else the
    target proposes nothing.
    """
    sizes = ("--plan", sparse_plan_file(), "--kv-tokens", "40000", "--port", "0")
    shared = (*sizes, *_stating_gamma(flags))
    of_target = (*sizes, *flags) if "--speculation" in target_command else shared
    target, target_address = start_service(
        *target_command, "--model", str(TARGET), *of_target, *(() if drafted else ("--draft", "none"))
    )
    if not drafted:
        return Services(target_address, "", [target])
    draft, draft_address = start_service(
        "-m", "draft_service", "--model", str(DRAFT), "--target", dial(target_address), *shared
    )
    return Services(target_address, draft_address, [target, draft])


def start_gateway(services: Services, *flags: str) -> Stack:
    """The client endpoints over services that run already."""
    draft = ("--draft-address", services.draft) if services.draft else ("--draft", "none")
    return start_stack("--target-address", services.target, *draft, "--plan", sparse_plan_file(), *flags)


def start_stack(
    *flags: str,
    environment: dict[str, str] | None = None,
    patience: float = START_SECONDS,
    command: tuple[str, ...] = ("-m", "orchestrator.launch"),
    orphaned: bool = False,
) -> Stack:
    """Launch with ports of its own choosing; returns when it says ready. Raises RuntimeError after so many seconds.

    command: what launches. orphaned: whether its parent ends at once, as under nohup, instead of being this process.
    """
    output = Path(tempfile.mkdtemp(prefix="specahead-test-")) / "launch.txt"
    arguments = [sys.executable, *command, "--grpc-port", "0", "--port", "0", *_stating_gamma(flags)]
    variables = os.environ | (environment or {})
    process: subprocess.Popen[str] | Orphan
    if orphaned:
        shell = ["sh", "-c", '"$@" > "$0" 2>&1 & echo $!', str(output), *arguments]
        process = Orphan(int(subprocess.check_output(shell, cwd=ROOT, env=variables)))
    else:
        with output.open("w") as log:
            process = subprocess.Popen(
                arguments, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True, env=variables
            )
    stack = Stack(process, output)
    began = time.monotonic()
    deadline = began + patience
    while "\nready" not in output.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"launch {' '.join(flags)} did not become ready:\n{output.read_text()}")
        time.sleep(0.1)
    stack.seconds = time.monotonic() - began
    text = output.read_text()

    def find(pattern: str) -> str:
        match = re.search(pattern, text)
        assert match is not None, f"{pattern} not in:\n{text}"
        return match.group(1)

    stack.grpc, stack.http = find(r"gRPC endpoint: (\S+)"), find(r"HTTP endpoint: (\S+)")
    stack.services = {name: (at, int(pid)) for name, pid, at in re.findall(r"(\S+) service: pid (\d+), (\S+)", text)}
    stack.target_pid, stack.draft_pid = (stack.services.get(side, ("", 0))[1] for side in ("target", "draft"))
    return stack
