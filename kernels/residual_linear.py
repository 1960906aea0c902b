"""Linear layers of few rows that read a residual through its RMSNorm, or add to it, without a launch for the norm.

The residual is in float32. A layer that is cut into parts adds these to it, in no fixed order, so that results differ
in their last bits from run to run. The scale of an RMSNorm is one number a row: it is applied to what a layer gives.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backends import check_backend
from kernels.few_rows_linear import LEAST_DEPTH, Tuning, launch_few_rows
from kernels.gated_activation import silu_and_multiply

MOST_ROWS = 32  # more have no room in shared memory, in float32
_PROGRAMS = 132  # the multiprocessors of an H100 or H200


@dataclass(frozen=True)
class RmsNorm:
    """An RMSNorm (Zhang & Sennrich 2019). weight: [size] float32"""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True)
class Unscaled:
    """What a layer gives of an RMSNorm of which its rows have not been scaled yet.

    parts: [parts, rows, outputs] float32, to be added up. squares: [parts, rows] float32, which added up are those of
    the row. size: numbers of a row; epsilon: of the norm.
    """

    parts: Tensor
    squares: Tensor
    size: int
    epsilon: float

    def scaled(self) -> Tensor:
        """Return the layer's outputs: [rows, outputs] float32."""
        return self.parts.sum(0) * torch.rsqrt(self.squares.sum(0) / self.size + self.epsilon)[:, None]


def takes(rows: int, inputs: int) -> bool:
    """Return whether Triton takes so many rows of so many inputs."""
    return rows <= MOST_ROWS and inputs % LEAST_DEPTH == 0


def add_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: float = 1.0,
    backend: str = "torch",
    tuning: Tuning | None = None,
) -> None:
    """Add scale * x @ weight.T to the residual, in place.

    residual: [rows, outputs] float32; x: [rows, inputs], weight: [outputs, inputs], of 16 bits
    """
    _check("add_linear", x, backend)
    if backend == "torch":
        residual += scale * F.linear(x, weight).float()
        return
    launch_few_rows(x, weight, residual, tuning or cut(*weight.shape), adds=True, scale=scale)


def gated_of_norm(
    residual: Tensor, norm: RmsNorm, weight: Tensor, backend: str = "torch", tuning: Tuning | None = None
) -> Tensor:
    """Return silu(gate) * up of a gated layer of the residual's RMSNorm: [rows, outputs / 2], in the weight's dtype.

    residual: [rows, inputs] float32; weight: [outputs, inputs], of 16 bits, the gates first
    """
    _check("gated_of_norm", residual, backend)
    if backend == "torch":
        normed = _multiply_normed(residual, norm, weight).scaled()
        return silu_and_multiply(normed).to(weight.dtype)
    out = torch.empty(len(residual), len(weight) // 2, dtype=weight.dtype, device=weight.device)
    tuning = tuning or cut_gated(weight.shape[1])
    launch_few_rows(residual, weight, out, tuning, gated=True, norm=norm.weight, epsilon=norm.epsilon)
    return out


def parts_of_norm(
    residual: Tensor, norm: RmsNorm, weight: Tensor, backend: str = "torch", tuning: Tuning | None = None
) -> Unscaled:
    """Return a layer of the residual's RMSNorm, not scaled yet.

    residual: [rows, inputs] float32; weight: [outputs, inputs], of 16 bits
    """
    _check("parts_of_norm", residual, backend)
    if backend == "torch":
        return _multiply_normed(residual, norm, weight)
    tuning = tuning or cut(*weight.shape)
    rows, device = len(residual), residual.device
    parts = torch.empty(tuning.parts, rows, len(weight), device=device)
    squares = torch.empty(tuning.parts, rows, device=device)
    launch_few_rows(residual, weight, parts, tuning, norm=norm.weight, squares=squares)
    return Unscaled(parts, squares, residual.shape[1], norm.epsilon)


def _multiply_normed(residual: Tensor, norm: RmsNorm, weight: Tensor) -> Unscaled:
    out = F.linear((residual * norm.weight).to(weight.dtype), weight).float()
    return Unscaled(out[None], residual.pow(2).sum(1)[None], residual.shape[1], norm.epsilon)


def _check(operation: str, x: Tensor, backend: str) -> None:
    check_backend(operation, backend)
    if backend == "triton" and (not takes(*x.shape) or not x.is_contiguous()):
        raise ValueError(
            f"{operation}: Triton takes up to {MOST_ROWS} contiguous rows of a multiple of {LEAST_DEPTH} inputs, got "
            f"{list(x.shape)} with strides {x.stride()}"
        )


# How layers are cut: among the fastest of those measured on an H200 with layers of 0.5B and 1B (docs/performance.md).


def cut(outputs: int, inputs: int) -> Tuning:
    """One program for each multiprocessor, about."""
    columns = 64
    parts = min(inputs // LEAST_DEPTH, max(1, _PROGRAMS // -(-outputs // columns)))
    return Tuning(columns, LEAST_DEPTH, 4, 6, parts)


def cut_gated(inputs: int) -> Tuning:
    return Tuning(64, LEAST_DEPTH, 4, 4 if inputs > 8 * LEAST_DEPTH else 3)
