"""The real processes that a benchmark runs: services and client endpoints, stopped in order at the end."""

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

_STOP_SECONDS = 15.0

Start = Callable[..., "subprocess.Popen[str]"]


@contextlib.contextmanager
def children() -> Iterator[Start]:
    """Yields start(module, *arguments, stdout=…, gpu=…), which runs `python -m module`.

    All are stopped at the end, the last started first, however it comes: SIGTERM ends the block as Ctrl-C does.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.ExitStack() as processes:

            def start(
                *command: str, stdout: int = subprocess.DEVNULL, gpu: int | None = None
            ) -> "subprocess.Popen[str]":
                environment = dict(os.environ)
                if gpu is not None:
                    environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
                # In a session of its own: Ctrl-C is for this process, which stops the others in order.
                process = subprocess.Popen(
                    [sys.executable, "-m", *command], stdout=stdout, text=True, env=environment, start_new_session=True
                )
                processes.callback(stop, process)
                return process

            yield start
    finally:
        signal.signal(signal.SIGTERM, before)


def start_endpoints(start: Start, *flags: str) -> str:
    """Start the client endpoints over running services; their gRPC address, once they are ready."""
    ports = ("--grpc-port", "0", "--http-port", "0")
    launch = start("orchestrator.launch", *flags, *ports, stdout=subprocess.PIPE)
    assert launch.stdout is not None
    said = list(itertools.takewhile(lambda line: line.strip() != "ready", launch.stdout))
    found = re.search(r"gRPC endpoint: (\S+)", "".join(said))
    if found is None:
        raise ChildProcessError("the client endpoints did not start")
    return found.group(1)


def wait_for_service(process: "subprocess.Popen[str]") -> None:
    """Until a service started with stdout=PIPE says where it listens."""
    assert process.stdout is not None
    if not any(" service, pid " in line for line in process.stdout):
        raise ChildProcessError("a service did not start")


def stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    finally:
        process.kill()  # does nothing to one that has ended
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as probes:
        sockets = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in sockets]


def port_of(address: str) -> str:
    return address.rpartition(":")[2]
