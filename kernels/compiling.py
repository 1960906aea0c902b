"""Compiling Triton's kernels before they are launched, many at a time.

Triton compiles a kernel at its first launch, which takes half a second, and a service needs hundreds of kernels before
its first request. Here launches are traced with tensors that have no memory (torch's FakeTensorMode), so that nothing
runs, and the kernels are compiled by processes meanwhile (`specahead.kernels.compilers`), into the cache that Triton
keeps on disk. A kernel that was not foreseen is compiled at its launch.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specahead.kernels.compilers import CompiledFor, Compilers, Launch

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

# The launches that were traced, in their order; None: launches run.
_foreseen: ContextVar[dict[Launch, None] | None] = ContextVar("launches that were traced", default=None)
_compilers: list[Compilers] = []  # one, from `begin_compiling` or when it is needed, until `end_compiling`


@dataclass(frozen=True)
class _Placeless:
    """A tensor as a kernel is specialised for it, as if its storage began at a multiple of 16."""

    dtype: torch.dtype
    offset: int  # bytes behind such a multiple

    def data_ptr(self) -> int:
        return self.offset

    def ptr_range(self) -> int:
        return 0


def compile_ahead(makers: Sequence[Callable[[], Callable[[], None]]]) -> None:
    """Compile the kernels that functions launch, and launch nothing. makers: each makes one function.

    Some functions are traced first. If an earlier process has compiled all their kernels, the others are left out:
    tracing hundreds of functions takes seconds. In a traced function new tensors have no memory, and other tensors are
    not written. Raises the error of a compilation in this process, or RuntimeError with that of another.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # it takes a second to load

    began, foreseen, compiled_for = time.monotonic(), dict[Launch, None](), _compiled_for()
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
                    handed.append(_running_compilers().compile(launch, compiled_for))
                else:
                    before = _compiled()
                    launch.compile(compiled_for.launcher)
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


def _running_compilers() -> Compilers:
    if not _compilers:
        _compilers.append(Compilers(min(MOST_PROCESSES, len(os.sched_getaffinity(0)))))
    return _compilers[0]


def _compiled_for() -> CompiledFor:
    active = triton.runtime.driver.active
    return CompiledFor(active.get_current_target(), active.launcher_cls)


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


def compiles_only() -> bool:
    """Return whether launches are traced: compiled and not run."""
    return _foreseen.get() is not None


def note_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note a traced launch. Only where `compiles_only`."""
    foreseen = _foreseen.get()
    assert foreseen is not None
    foreseen[Launch(kernel.__module__, kernel.__name__, without_places(args), tuple(kwargs.items()))] = None


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
