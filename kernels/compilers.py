"""Processes that compile kernels: threads of one process would wait for one another, as much of it is Python.

They need no GPU, and end when this process does, or when it closes them.
"""

import importlib
import os
import pickle
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

    def compile(self) -> None:
        """Compile the kernel, unless Triton keeps it already. Raises what its compilation raises."""
        kernel = getattr(importlib.import_module(self.module), self.kernel)
        kernel.run(*self.args, grid=(1,), warmup=True, **dict(self.kwargs))


class Compilers:
    """Up to `most` processes, each started when there is more to compile than the others are busy with.

    target: what they compile for, as Triton names it.
    """

    def __init__(self, most: int, target: Any) -> None:
        self._target = target
        self._pool = ThreadPoolExecutor(most, "compiling")  # a thread hands one process one launch after the other
        self._of_thread = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []

    def compile(self, launch: Launch) -> Future[None]:
        """Have a launch compiled; waiting for it raises RuntimeError if that fails."""
        return self._pool.submit(self._compile, launch)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.communicate()  # closes what it reads, at whose end it ends

    def _compile(self, launch: Launch) -> None:
        process = self._process()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(launch, process.stdin)
            process.stdin.flush()
            error = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            error = f"the process that compiled it ended with {process.wait()}"
        if error:
            raise RuntimeError(f"{launch.kernel} of {launch.module} does not compile: {error}")

    def _process(self) -> subprocess.Popen[bytes]:
        """Return the process of this thread."""
        if not hasattr(self._of_thread, "process"):
            self._of_thread.process = process = _start()
            assert process.stdin is not None
            pickle.dump(self._target, process.stdin)
            self._processes.append(process)
        process = self._of_thread.process
        return process


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "kernels.compiler_process"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # an interrupt from the terminal is for this process alone
    )
