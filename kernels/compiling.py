"""Compiling Triton's kernels before they are launched, many at a time.

A kernel is compiled where it is first launched, which takes half a second, and a service needs hundreds before its
first request. Here launches are gone through with tensors that have no memory (torch's FakeTensorMode), so that nothing
runs, and what they would launch is compiled by threads meanwhile. What was not foreseen is compiled where it is
launched.
"""

import logging
import os
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
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

MOST_THREADS = 32
SAMPLED = 6  # launches that are gone through in any case, about
log = logging.getLogger(__name__)
# The launches that were gone through, by all that kernels are specialised for; None: launches run.
_foreseen: ContextVar[set[Hashable] | None] = ContextVar("launches that were gone through", default=None)


@dataclass(frozen=True)
class _Placeless:
    """What a kernel is specialised for of a tensor, as if its storage began at a multiple of 16."""

    dtype: torch.dtype
    offset: int  # bytes, of what comes behind such a multiple

    def data_ptr(self) -> int:
        return self.offset

    def ptr_range(self) -> int:
        return 0


def compile_ahead(makers: Sequence[Callable[[], Callable[[], None]]]) -> None:
    """Compile what functions launch, and launch nothing. makers: each makes one of them, with what it takes.

    Some of them are gone through first. Where all that these launch was compiled by an earlier process, so were the
    others, which are left out: going through hundreds takes seconds. In a function that is gone through, tensors that
    are made have no memory, and others are not written. Raises what a compilation raises.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # it takes a second to load

    began, before, foreseen = time.monotonic(), _compiled(), set[Hashable]()
    without_memory = FakeTensorMode(allow_non_fake_inputs=True)
    some = set(range(0, len(makers), max(1, len(makers) // SAMPLED)))
    for part in (some, {*range(len(makers))} - some):
        if part is not some and _compiled() == before:
            break
        with ThreadPoolExecutor(_threads(), "compiling") as pool, triton.AsyncCompileMode(pool):
            for index in sorted(part):
                _go_through(makers[index](), foreseen, without_memory)
    extra = {"launches": len(foreseen), "seconds": round(time.monotonic() - began, 1), "threads": _threads()}
    log.info("kernels are compiled", extra=extra)


def _go_through(launch: Callable[[], None], foreseen: set[Hashable], without_memory: Any) -> None:
    token = _foreseen.set(foreseen)
    try:
        with without_memory:
            launch()
    finally:
        _foreseen.reset(token)


def _threads() -> int:
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def _compiled() -> int:
    """Return how many kernels and other results of compilations Triton keeps for later processes."""
    folder = Path(triton.knobs.cache.dir)
    return sum(1 for _ in folder.iterdir()) if folder.exists() else 0


def compiles_only() -> bool:
    """Return whether launches are gone through: compiled and not run."""
    return _foreseen.get() is not None


def placeless(kernel: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the arguments by which a kernel is compiled for a launch; None if it is in the making already.

    Only where `compiles_only`.
    """
    foreseen = _foreseen.get()
    assert foreseen is not None
    without_place = tuple(map(_without_place, args))
    launch = kernel, without_place, tuple(kwargs.items())
    if launch in foreseen:
        return None
    foreseen.add(launch)
    return without_place


def _without_place(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Placeless(value.dtype, int(value.storage_offset()) * value.element_size() % 16)
