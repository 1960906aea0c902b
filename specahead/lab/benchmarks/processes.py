"""The real processes that a benchmark runs: services and client endpoints, stopped in order at the end."""

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

_STOP_SECONDS = 15.0  # for all processes of a benchmark together
_START_SECONDS = 300.0
# Has the kernel kill this process when the thread that started it has ended (PR_SET_PDEATHSIG of Linux), and becomes
# `python -m` with the arguments. It isn't Popen's `preexec_fn`, because that forks: gRPC's handlers of forks abort the
# child now and then.
_END_WITH_PARENT = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
"""

Start = Callable[..., "subprocess.Popen[str]"]


class Endpoints(NamedTuple):
    """Where clients find running services."""

    grpc: str
    """HOST:PORT."""
    http: str
    """http://HOST:PORT."""


@contextlib.contextmanager
def children() -> Iterator[Start]:
    """Yield start(module, *arguments, stdout=…, gpus=…), which runs `python -m module`.

    gpus: the GPUs that the process sees; (): those that this process sees.
    At the end of the block all are stopped, the last started first; SIGTERM ends the block as Ctrl-C does. On Linux
    they also end if this process is killed.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    deadline: list[float] = []

    def stop_in_time(process: "subprocess.Popen[str]") -> None:
        deadline.append(time.monotonic() + _STOP_SECONDS)
        stop(process, deadline[0] - time.monotonic())

    try:
        with contextlib.ExitStack() as processes:

            def start(
                *command: str, stdout: int = subprocess.DEVNULL, gpus: Sequence[int] = ()
            ) -> "subprocess.Popen[str]":
                environment = dict(os.environ)
                if gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
                # In a session of its own: Ctrl-C is for this process, which stops the others in order.
                module = ["-I", "-c", _END_WITH_PARENT] if sys.platform == "linux" else ["-m"]
                process = subprocess.Popen(
                    [sys.executable, *module, *command],
                    stdout=stdout,
                    text=True,
                    env=environment,
                    start_new_session=True,
                )
                processes.callback(stop_in_time, process)
                return process

            yield start
    finally:
        signal.signal(signal.SIGTERM, before)


def launch_endpoints(start: Start, *flags: str) -> "subprocess.Popen[str]":
    """Start the client endpoints over running services, without waiting for them."""
    ports = ("--grpc-port", "0", "--port", "0")
    return start("orchestrator.launch", "--logging", '{"level": "warning"}', *flags, *ports, stdout=subprocess.PIPE)


def wait_for_endpoints(process: "subprocess.Popen[str]", seconds: float = _START_SECONDS) -> Endpoints:
    """Return the addresses of client endpoints that were launched, once they are ready.

    Raises ChildProcessError if they end before, or are not ready in time.
    """
    assert process.stdout is not None
    with _killed_after(process, seconds):
        said = list(itertools.takewhile(lambda line: line.strip() != "ready", process.stdout))
    found = re.search(r"gRPC endpoint: (\S+)\nHTTP endpoint: (\S+)", "".join(said))
    if found is None:
        raise ChildProcessError("the client endpoints did not start")
    return Endpoints(*found.groups())


def wait_for_service(process: "subprocess.Popen[str]", seconds: float = _START_SECONDS) -> None:
    """Wait until a service that was started with stdout=PIPE says where it listens.

    Raises ChildProcessError if it ends before, or does not say so in time.
    """
    assert process.stdout is not None
    with _killed_after(process, seconds):
        if not any(" service, pid " in line for line in process.stdout):
            raise ChildProcessError("a service did not start")


@contextlib.contextmanager
def _killed_after(process: "subprocess.Popen[str]", seconds: float) -> Iterator[None]:
    """Kill the process if the block takes longer, which ends its output."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def stop(process: "subprocess.Popen[str]", seconds: float = _STOP_SECONDS) -> None:
    """Ask a process to end, and kill it after some seconds."""
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, seconds))
    finally:
        process.kill()  # does nothing to one that has ended
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def free_addresses(count: int) -> list[str]:
    """Return addresses of this machine at which nothing listens."""
    with contextlib.ExitStack() as probes:
        sockets = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in sockets]


def port_of(address: str) -> str:
    """Return the port of HOST:PORT."""
    return address.rpartition(":")[2]
