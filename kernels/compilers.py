"""Processes that compile kernels: threads of one process would wait for each other, since much of the work is Python.

One process loads torch and Triton, and forks the others, which need no GPU. (multiprocessing would import the main
module of the service in each of them.) They all end when this process ends or closes them.
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
    """A launch as a kernel is compiled for it. The kernel is named by its module and its name there."""

    module: str
    kernel: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def compile(self, launcher: Any) -> None:
        """Compile the kernel and its launcher, unless Triton has kept them. Raises the error of the compilation.

        launcher: the driver's class of launchers. Triton 3.6 compiles one from C for each signature.
        """
        kernel = getattr(importlib.import_module(self.module), self.kernel)
        compiled = kernel.run(*self.args, grid=(1,), warmup=True, **dict(self.kwargs))
        launcher(compiled.src, compiled.metadata)


@dataclass(frozen=True)
class CompiledFor:
    """The target that kernels are compiled for, as Triton names it, and the class of its driver's launchers."""

    target: Any
    launcher: Any


class Compilers:
    """Up to `most` processes, each forked when all others are busy."""

    def __init__(self, most: int) -> None:
        self._pool = ThreadPoolExecutor(most, "compiling")  # a thread hands one process one launch after the other
        self._of_thread = threading.local()
        self._sockets, theirs = socket.socketpair()
        self._forks = _start(theirs)
        self._processes: list[Any] = []  # by what is written to and read from them

    def compile(self, launch: Launch, compiled_for: CompiledFor) -> Future[None]:
        """Have a launch compiled; the result raises RuntimeError if that fails."""
        return self._pool.submit(self._compile, launch, compiled_for)

    def close(self) -> None:
        """End all processes, busy ones after their compilation."""
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
        """Return the stream to and from the process of this thread."""
        if not hasattr(self._of_thread, "process"):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                socket.send_fds(self._sockets, [b"."], [theirs.fileno()])
                self._of_thread.process = ours.makefile("rwb")
            self._processes.append(self._of_thread.process)
        return self._of_thread.process


def _start(sockets: socket.socket) -> "subprocess.Popen[bytes]":
    """Start the process that forks another for each socket that it receives over `sockets`, which is closed here."""
    with sockets:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "specahead.kernels.compiler_process", str(sockets.fileno())],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            pass_fds=[sockets.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the terminal is for this process alone
        )
