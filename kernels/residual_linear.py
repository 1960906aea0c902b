"""Linear layers of few rows that read a residual through its RMSNorm, or add to it, without a launch for the norm.

The residual is in float32. A layer that is cut into parts adds these to it, in no fixed order, so that results differ
in their last bits from run to run. The scale of an RMSNorm is one number a row: it is applied to what a layer gives.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.backends import check_backend
from specahead.kernels.few_rows_linear import LEAST_DEPTH, MOST_ROWS, PROCESSORS, Tuning, Weight, launch_few_rows
from specahead.kernels.gated_activation import silu_and_multiply

MOST_NORMED_ROWS = 32  # more have no room in shared memory, in float32


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


def add_linear(
    residual: Tensor,
    x: Tensor,
    weight: Weight,
    scale: float = 1.0,
    backend: str = "torch",
    tuning: Tuning | None = None,
) -> None:
    """Add scale * x @ weight.T to the residual, in place.

    residual: [rows, outputs] float32; x: [rows, inputs], of 16 bits; weight: [outputs, inputs]
    """
    _check("add_linear", x, MOST_ROWS, backend)
    if backend == "torch":
        values = weight if isinstance(weight, Tensor) else weight.in_order()
        residual += scale * F.linear(x.to(values.dtype), values).float()
        return
    launch_few_rows(x, weight, residual, tuning or cut(weight, len(x)), adds=True, scale=scale)


def gated_of_norm(
    residual: Tensor, norm: RmsNorm, weight: Tensor, backend: str = "torch", tuning: Tuning | None = None
) -> Tensor:
    """Return silu(gate) * up of a gated layer of the residual's RMSNorm: [rows, outputs / 2], in the weight's dtype.

    residual: [rows, inputs] float32; weight: [outputs, inputs], of 16 bits, the gates first
    """
    _check("gated_of_norm", residual, MOST_NORMED_ROWS, backend)
    if backend == "torch":
        return silu_and_multiply(_multiply_normed(residual, norm, weight).scaled()).to(weight.dtype)
    out = torch.empty(len(residual), len(weight) // 2, dtype=weight.dtype, device=residual.device)
    launch_few_rows(residual, weight, out, tuning or CUT_GATED, gated=True, norm=norm.weight, epsilon=norm.epsilon)
    return out


def parts_of_norm(
    residual: Tensor, norm: RmsNorm, weight: Tensor, backend: str = "torch", tuning: Tuning | None = None
) -> Unscaled:
    """Return a layer of the residual's RMSNorm, not scaled yet.

    residual: [rows, inputs] float32; weight: [outputs, inputs], of 16 bits
    """
    _check("parts_of_norm", residual, MOST_NORMED_ROWS, backend)
    if backend == "torch":
        return _multiply_normed(residual, norm, weight)
    rows, device = len(residual), residual.device
    tuning = tuning or cut(weight, rows)
    parts = torch.empty(tuning.parts, rows, len(weight), device=device)
    squares = torch.empty(tuning.parts, rows, device=device)
    launch_few_rows(residual, weight, parts, tuning, norm=norm.weight, squares=squares)
    return Unscaled(parts, squares, residual.shape[1], norm.epsilon)


def _multiply_normed(residual: Tensor, norm: RmsNorm, weight: Tensor) -> Unscaled:
    out = F.linear((residual * norm.weight).to(weight.dtype), weight).float()
    return Unscaled(out[None], residual.pow(2).sum(1)[None], residual.shape[1], norm.epsilon)


def _check(operation: str, x: Tensor, most_rows: int, backend: str) -> None:
    check_backend(operation, backend)
    rows, inputs = x.shape
    if backend == "triton" and (rows > most_rows or inputs % LEAST_DEPTH or not x.is_contiguous()):
        raise ValueError(
            f"{operation}: Triton takes up to {most_rows} contiguous rows of a multiple of {LEAST_DEPTH} inputs, got "
            f"{list(x.shape)} with strides {x.stride()}"
        )


# How layers are cut: among the fastest of those measured on an H200 with layers of 0.5B, 1B and 8B
# (docs/performance.md).

CUT_GATED = Tuning(64, LEAST_DEPTH, 4, 4)


def cut(weight: Weight, rows: int) -> Tuning:
    """One program for each multiprocessor, about; of weights in 8 bits up to two, that are shorter.

    Most parts of a layer take two turns or more: adding up what more parts give takes longer than a turn.
    """
    outputs, inputs = (weight if isinstance(weight, Tensor) else weight.values).shape
    if isinstance(weight, Tensor):
        units = inputs // LEAST_DEPTH
        parts = min(-(-units // 2), max(1, PROCESSORS // -(-outputs // 64)))
        return Tuning(64, LEAST_DEPTH, 4, min(6, -(-units // parts) + 2), parts)
    if inputs % (2 * LEAST_DEPTH) or (rows > 16 and inputs > 8192):
        return Tuning(64, LEAST_DEPTH, 4, 4, min(8, inputs // LEAST_DEPTH))
    return Tuning(64, 2 * LEAST_DEPTH, 4, 4, min(4, inputs // (2 * LEAST_DEPTH)))
