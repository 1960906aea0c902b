"""Processes that compile kernels: threads of one process would wait for one another, as much of it is Python.

One process loads what compiling takes, and forks the others, which need no GPU. They all end when this process does, or
when it closes them.
"""

import importlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """All that a kernel, named by its module and its name there, is compiled for. kwargs: names and values."""

    module: str
    kernel: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def compile(self, launcher: Any) -> None:
        """Compile the kernel and what launches it, unless Triton keeps them. Raises what their compilation raises.

        launcher: the driver's, of a compiled kernel. Triton 3.6 compiles it from C for each signature.
        """
        kernel = getattr(importlib.import_module(self.module), self.kernel)
        compiled = kernel.run(*self.args, grid=(1,), warmup=True, **dict(self.kwargs))
        launcher(compiled.src, compiled.metadata)


@dataclass(frozen=True)
class CompiledFor:
    """What kernels are compiled for: a target as Triton names it, and the class of its driver's launchers."""

    target: Any
    launcher: Any


class Compilers:
    """Up to `most` processes, each forked when there is more to compile than the others are busy with."""

    def __init__(self, most: int) -> None:
        self._pool = ThreadPoolExecutor(most, "compiling")  # a thread hands one process one launch after the other
        self._of_thread = threading.local()
        self._sockets, theirs = socket.socketpair()
        self._forks = _start(theirs)
        self._processes: list[Any] = []  # by what is written to and read from them

    def compile(self, launch: Launch, compiled_for: CompiledFor) -> Future[None]:
        """Have a launch compiled; waiting for it raises RuntimeError if that fails."""
        return self._pool.submit(self._compile, launch, compiled_for)

    def close(self) -> None:
        """End all processes, those that compile once they are through with it."""
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()
        self._sockets.close()
        self._forks.wait()

    def _compile(self, launch: Launch, compiled_for: CompiledFor) -> None:
        try:
            process = self._process()
            pickle.dump((compiled_for, launch), process)
            process.flush()
            error = pickle.load(process)
        except (EOFError, OSError) as what:
            error = f"the process that compiled it has ended: {what!r}"
        if error:
            raise RuntimeError(f"{launch.kernel} of {launch.module} does not compile: {error}")

    def _process(self) -> Any:
        """Return what the process of this thread reads and writes."""
        if not hasattr(self._of_thread, "process"):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                socket.send_fds(self._sockets, [b"."], [theirs.fileno()])
                self._of_thread.process = ours.makefile("rwb")
            self._processes.append(self._of_thread.process)
        return self._of_thread.process


def _start(sockets: socket.socket) -> "subprocess.Popen[bytes]":
    """Start what forks a process for each socket that it is sent over `sockets`, which is closed here."""
    with sockets:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "specahead.kernels.compiler_process", str(sockets.fileno())],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            pass_fds=[sockets.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the terminal is for this process alone
        )
