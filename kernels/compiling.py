"""Compiles Triton's kernels before they are launched, many at a time.

Triton compiles a kernel at its first launch, which takes half a second, and a service needs hundreds of kernels before
its first request. Here launches are traced with tensors that have no memory (torch's FakeTensorMode), so that nothing
runs. Processes compile the kernels meanwhile, into the cache that Triton keeps on disk: threads of one process would
wait for each other, since much of the work is Python. A kernel that was not foreseen is compiled at its launch.
"""

import importlib
import logging
import os
import pickle
import queue
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    triton: Any = None
else:
    try:
        import triton
    except ImportError:
        triton = None

MOST_PROCESSES = 12
SAMPLED = 6  # functions that are traced in any case, about
log = logging.getLogger(__name__)


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
class _Placeless:
    """A tensor as a kernel is specialised for it, as if its storage began at a multiple of 16."""

    dtype: torch.dtype
    offset: int  # bytes after such a multiple

    def data_ptr(self) -> int:
        return self.offset

    def ptr_range(self) -> int:
        return 0


# The launches that were traced, in their order; None: launches run.
_foreseen: ContextVar[dict[Launch, None] | None] = ContextVar("launches that were traced", default=None)
_compilers: list["Compilers"] = []  # one, from `begin_compiling` or when it is needed, until `end_compiling`


def compile_ahead(makers: Sequence[Callable[[], Callable[[], None]]]) -> None:
    """Compile the kernels that functions launch, and launch nothing. makers: each makes one function.

    Some functions are traced first. If an earlier process has compiled all their kernels, the others are left out:
    tracing hundreds of functions takes seconds. In a traced function new tensors have no memory, and other tensors are
    not written. Raises the error of a compilation in this process, or RuntimeError with that of another.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # it takes a second to load

    began, foreseen, driver = time.monotonic(), dict[Launch, None](), triton.runtime.driver.active
    target, launcher = driver.get_current_target(), driver.launcher_cls
    without_memory = FakeTensorMode(allow_non_fake_inputs=True)
    some = range(0, len(makers), max(1, len(makers) // SAMPLED))
    others = sorted({*range(len(makers))} - {*some})
    handed: list[Future[None]] = []
    is_new = False
    try:
        for index in (*some, *others):
            if index in others and not is_new:
                break
            for launch in _trace(makers[index](), foreseen, without_memory):
                if is_new:
                    handed.append(_running_compilers().compile(launch, target, launcher))
                else:
                    before = _compiled()
                    launch.compile(launcher)
                    is_new = _compiled() != before
        for each in handed:
            each.result()
    except Exception:
        end_compiling()  # what else was handed over is of no use
        raise
    log.info(
        "kernels are compiled",
        extra={"launches": len(foreseen), "seconds": round(time.monotonic() - began, 1), "by_processes": len(handed)},
    )


def begin_compiling(device: str) -> None:
    """Start the processes that compile, so that they load while this one goes on, if nothing was compiled before."""
    if triton is not None and torch.device(device).type == "cuda" and not _compiled():
        _running_compilers()


def end_compiling() -> None:
    """End the processes that compile, if there are any: few kernels are compiled from here on."""
    while _compilers:
        _compilers.pop().close()


def compiles_only() -> bool:
    """Return whether launches are traced: compiled and not run."""
    return _foreseen.get() is not None


def note_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note a traced launch. Only where `compiles_only`."""
    foreseen = _foreseen.get()
    assert foreseen is not None
    named = tuple(kwargs), without_places(tuple(kwargs.values()))
    foreseen[Launch(kernel.__module__, kernel.__name__, without_places(args), tuple(zip(*named, strict=True)))] = None


def without_places(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments of a launch with tensors replaced by what a kernel is specialised for."""
    return tuple(map(_without_place, args))


def _without_place(value: Any) -> Any:
    if isinstance(value, tuple):
        parts = map(_without_place, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if not isinstance(value, Tensor):
        return value
    return _Placeless(value.dtype, int(value.storage_offset()) * value.element_size() % 16)


def _trace(launch: Callable[[], None], foreseen: dict[Launch, None], without_memory: Any) -> list[Launch]:
    """Trace a function; return its launches that were not foreseen, and add them to `foreseen`."""
    known = len(foreseen)
    token = _foreseen.set(foreseen)
    try:
        with without_memory:
            launch()
    finally:
        _foreseen.reset(token)
    return list(foreseen)[known:]


def _compiled() -> int:
    """Return how many results of compilations Triton keeps for later processes."""
    folder = Path(triton.knobs.cache.dir)
    return sum(1 for _ in folder.iterdir()) if folder.exists() else 0


def _running_compilers() -> "Compilers":
    if not _compilers:
        _compilers.append(Compilers(min(MOST_PROCESSES, len(os.sched_getaffinity(0)))))
    return _compilers[0]


class Compilers:
    """Processes that compile launches, without a GPU. They end when they are closed, or when this process ends."""

    def __init__(self, count: int) -> None:
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._processes = [_start_process() for _ in range(count)]
        for process in self._processes:
            self._idle.put(process)
        self._pool = ThreadPoolExecutor(count, "compiling")  # each thread waits for one process at a time

    def compile(self, launch: Launch, target: Any, launcher: Any) -> Future[None]:
        """Have a launch compiled; the result raises RuntimeError if that fails.

        target: the GPU that kernels are compiled for, as Triton names it. launcher: the driver's class of launchers.
        """
        return self._pool.submit(self._compile, launch, target, launcher)

    def close(self) -> None:
        """End all processes, busy ones after their compilation."""
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.communicate()  # closes what it reads from

    def _compile(self, launch: Launch, target: Any, launcher: Any) -> None:
        process = self._idle.get()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((launch, target, launcher), process.stdin)
            process.stdin.flush()
            error = pickle.load(process.stdout)
        except (EOFError, OSError) as what:
            error = f"the process that compiled it has ended: {what!r}"
        finally:
            self._idle.put(process)
        if error:
            raise RuntimeError(f"{launch.kernel} of {launch.module} does not compile: {error}")


def _start_process() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", f"from {__name__} import serve_compilations as serve; serve()"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # an interrupt from the terminal is for this process alone
    )


def serve_compilations() -> None:
    """Compile the launches that come pickled by standard input, with their target and launcher, until it is closed.

    Each is answered on standard output with a pickled error text, or None.
    """
    from triton.runtime.driver import driver

    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print must not come between answers
        importlib.import_module("specahead.kernels.backends")  # while the process that started this one loads a model
        while True:
            try:
                launch, target, launcher = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            stand_in = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _device: 0)
            stand_in.get_current_target = lambda target=target: target
            stand_in.utils = SimpleNamespace(launch=None)  # Triton 3.9's launchers share it and are not compiled
            driver.set_active(stand_in)
            error = None
            try:
                launch.compile(launcher)
            except Exception:  # whatever Triton raises goes into the answer
                error = traceback.format_exc()
            pickle.dump(error, answers)
            answers.flush()
