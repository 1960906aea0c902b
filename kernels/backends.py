"""Which implementation of an operation runs: `torch`, the reference, anywhere; `triton` on a GPU.

With TRITON_INTERPRET=1 in the environment when this is imported, Triton's kernels run on CPU tensors too, slowly:
that is how they are tested without a GPU.
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch

from specahead.kernels.compiling import compiles_only, note_launch

if TYPE_CHECKING:
    triton: Any = None
    tl: Any = None
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # torch alone serves a CPU; kernels are still defined, with their annotations
        triton, tl = None, SimpleNamespace(constexpr=None)

Backend = Literal["torch", "triton"]
# Pointers that may begin anywhere: tensors of one layer or pass among all.
_ANYWHERE = {
    *("counts_ptr", "first_items_ptr", "following_ptr", "lengths_ptr", "lists_ptr", "memory_ptr", "pieces_ptr"),
    *(
        "kv_scales_ptr",
        "positions_ptr",
        "read_weights_ptr",
        "slots_ptr",
        "tile_starts_ptr",
        "running_sums_ptr",
        "uniforms_ptr",
        "unread_ptr",
    ),
}


def jit(function: Callable[..., Any]) -> Any:
    """triton.jit; without Triton, an object that raises when it is launched.

    Kernels are not specialised for plain numbers (that are 1 or a multiple of 16), nor for the alignment of some
    pointers: shapes change with every batch, and each variant would be compiled while requests wait. A number that is
    worth a variant is a constexpr. A NamedTuple of tensors may be one argument; its tensors begin at multiples of 16.
    """
    if triton is None:
        return _Missing(function.__name__)
    parameters = inspect.signature(function).parameters.values()
    plain = [p.name for p in parameters if p.annotation is inspect.Parameter.empty and not p.name.endswith("_ptr")]
    anywhere = [p.name for p in parameters if p.name in _ANYWHERE]
    make = triton.jit if triton.knobs.runtime.interpret else _Kernel
    return make(function, do_not_specialize=plain, do_not_specialize_on_alignment=anywhere)


def constant(value: Any) -> Any:
    """Return a module's constant as kernels take it."""
    return value if triton is None else tl.constexpr(value)


class _Kernel(object if triton is None else triton.JITFunction):  # type: ignore[misc]
    """A kernel that is compiled at its first launch, or before (specahead.kernels.compiling)."""

    hash: str | None  # of its source, once that was asked for

    @property
    def cache_key(self) -> str:
        """The key by which any process finds the compiled kernel again.

        In Triton 3.6 it covers the constants of called functions only if their keys were asked for before; so it is
        made twice.
        """
        if self.hash is None:
            _ = super().cache_key  # asks for those of all functions that are called
            self.hash = None
        return super().cache_key

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not compiles_only():
            return super().run(*args, grid=grid, warmup=warmup, **kwargs)
        note_launch(self, args, kwargs)
        return None


class _Missing:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError(f"{self.name}: Triton is not installed; install it or use backend='torch'")


def overlapping_launch(device: torch.device) -> dict[str, bool]:
    """Return arguments of a launch that may begin before the one before it has ended (programmatic dependent launch).

    The kernel takes PDL as a constexpr, and calls `follow(PDL)` first of all; or `precede(PDL)`, or their parts, where
    it knows better. A launch whose results other kernels read before their wait (a plan of the work, lists, positions)
    must not overlap, unless a launch that calls `follow` stands between.
    """
    return {"PDL": True, "launch_pdl": True} if device.type == "cuda" else {"PDL": False}


@jit
def follow(PDL: tl.constexpr):
    """Wait until the launch before has ended; then let the next one begin.

    In this order, so that the next kernel may read, before its own wait, what was there before the launch before this.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def precede(PDL: tl.constexpr):
    """Let the next launch begin at once, and wait until the one before has ended.

    Before its own wait that launch may read only what was there before the last one that called `follow`, or that does
    not overlap.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@jit
def ask_for(ptr, at, LENGTH: tl.constexpr):
    """Have rows of LENGTH numbers, from the places `at` on, brought to the second-level cache."""
    LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    lines = ptr + at[:, None] + (tl.arange(0, max(1, LENGTH // LINE)) * LINE)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


def power_of_two(n: int) -> int:
    """Return the power of two at or above n, at least 1: Triton's tiles have such sizes."""
    return 1 << max(0, n - 1).bit_length()


def default_backend(device: torch.device) -> Backend:
    """Return `triton` for a GPU, `torch` for a CPU."""
    return "triton" if device.type == "cuda" else "torch"


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy values from the host to a device. Unlike a copy from pageable memory it does not wait for the device."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
