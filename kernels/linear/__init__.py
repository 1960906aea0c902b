"""Linear layers, and how a model's layers read its residual stream and add to it: one dispatch over all kernels.

A layer of up to MOST_ROWS rows takes about as long as its weight takes to read:

    up to MOST_ROWS rows              `few_rows`: tensor cores, over weights of 16 bits, 8 or 4
    to MOST_ROUNDED, weights of 8     `few_rows`, over inputs that are rounded to 8 bits as well
    more rows, weights of 8 bits      `many_rows`: inputs are rounded as well, then the activation by itself
    more rows, weights in groups      `many_rows`: the weights of a layer in 16 bits, then the activation by itself
    more rows, a CPU, other shapes    torch (cuBLAS), then the activation by itself

Which kernel runs depends on the number of rows, on the weight and on the backend, never on values. So the rows of a
pass that is repeated in the same shape are rounded alike.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.backends import Backend
from specahead.kernels.gated_activation import silu_and_multiply
from specahead.kernels.linear.few_rows import MOST_ROUNDED, MOST_ROWS, few_rows_linear, takes
from specahead.kernels.linear.grouped import GROUPS, GroupedWeight, group_weight, split_words
from specahead.kernels.linear.many_rows import many_rows_linear, round_rows
from specahead.kernels.linear.weights import BLOCK, EightBitWeight, LinearWeight, hold, quantize
from specahead.kernels.rms_norm import add_rms_norm, add_scaled

__all__ = [
    "BLOCK",
    "GROUPS",
    "MOST_ROWS",
    "EightBitWeight",
    "GroupedWeight",
    "LinearWeight",
    "Residual",
    "add_linear",
    "group_weight",
    "hold",
    "linear",
    "linear_of_residual",
    "norm_residual",
    "quantize",
    "split_words",
]


@dataclass(frozen=True)
class Residual:
    """The residual stream of a pass: total + scale * update. The layer that reads it next adds the update up."""

    total: Tensor
    """[rows, hidden]."""
    update: Tensor | None = None
    """The last layer's output: [rows, hidden], or [parts, rows, hidden] to be summed in float32."""
    scale: float = 1.0
    """The factor of each update (Granite)."""

    def plus(self, update: Tensor) -> "Residual":
        """Return the stream with an update that is not added up yet; the update before must be."""
        assert self.update is None
        return replace(self, update=update)

    def rows(self, index: Tensor) -> "Residual":
        """Return some rows, in the order of `index`; the last update must be added up."""
        assert self.update is None
        return replace(self, total=self.total[index])

    def added_up(self) -> "Residual":
        """Return the stream without an update."""
        if self.update is None:
            return self
        update = self.update if self.update.dim() == 2 else self.update.sum(0).to(self.total.dtype)
        return Residual(add_scaled(update, self.total, self.scale), None, self.scale)


def linear(
    x: Tensor, weight: LinearWeight, backend: Backend = "torch", gated: bool = False, in_parts: bool = False
) -> Tensor:
    """Return x @ weight.T + bias, [rows, outputs], in the weight's dtype.

    x: [rows, inputs], contiguous; where few rows read fewer than 16 bits, of numbers that float16 holds.
    gated: return silu(gate) * up of the two halves of the outputs, [rows, outputs / 2]; in the dtype of x where few
    rows read fewer than 16 bits.
    in_parts: whether the result may be [parts, rows, outputs] float32, which the caller sums.
    A gated layer has no bias and comes whole.
    """
    small = _read_by_few_rows(weight, len(x))
    if small is not None:
        dtype = x.dtype if gated else weight.dtype
        return few_rows_linear(x, small, weight.bias, gated, in_parts, backend, dtype)
    if backend == "triton" and takes(x):
        return few_rows_linear(x, weight.values, weight.bias, gated, in_parts, backend, weight.dtype)
    if backend == "triton" and isinstance(weight.values, EightBitWeight) and takes(x, MOST_ROUNDED):
        rounded, scales = round_rows(x, backend)
        return few_rows_linear(
            rounded, weight.values, weight.bias, gated, in_parts, backend, weight.dtype, x_scales=scales
        )
    assert not gated or (weight.bias is None and not in_parts)
    if isinstance(weight.values, Tensor):
        out = F.linear(x.to(weight.dtype), weight.values, weight.bias)
    else:
        out = many_rows_linear(x, weight.values, weight.bias, backend)
    return silu_and_multiply(out, backend) if gated else out


def linear_of_residual(
    residual: Residual,
    norm: Tensor | None,
    epsilon: float,
    weight: LinearWeight,
    backend: Backend = "torch",
    gated: bool = False,
    in_parts: bool = False,
) -> tuple[Tensor, Residual]:
    """Return a linear layer of the residual stream's RMSNorm, as `linear` gives it, and the stream, added up.

    norm: [hidden], the weight of the norm; None: the layer reads the stream as it is.
    """
    if norm is None:
        residual = residual.added_up()
        return linear(residual.total, weight, backend, gated, in_parts), residual
    # float16 is what the kernel multiplies weights of fewer bits in.
    in_half = backend == "triton" and _read_by_few_rows(weight, len(residual.total)) is not None
    normed, residual = norm_residual(residual, norm, epsilon, backend, torch.float16 if in_half else None)
    return linear(normed, weight, backend, gated, in_parts), residual


def norm_residual(
    residual: Residual, norm: Tensor, epsilon: float, backend: Backend = "torch", dtype: torch.dtype | None = None
) -> tuple[Tensor, Residual]:
    """Return the residual stream's RMSNorm, [rows, hidden], and the stream, added up.

    norm: [hidden], the weight of the norm. dtype: of the norm's result; None: that of the stream.
    """
    total, update = residual.total, residual.update
    if update is None:
        normed, total = add_rms_norm(total, None, norm, epsilon, backend, dtype=dtype)
    else:
        normed, total = add_rms_norm(update, total, norm, epsilon, backend, residual.scale, dtype)
    return normed, Residual(total, None, residual.scale)


def add_linear(residual: Residual, x: Tensor, weight: LinearWeight, backend: Backend = "torch") -> Residual:
    """Return the residual stream with a linear layer of x as its update. The update before must be added up."""
    return residual.plus(linear(x, weight, backend, in_parts=True))


def _read_by_few_rows(weight: LinearWeight, rows: int) -> EightBitWeight | GroupedWeight | None:
    """Return the weight of fewer than 16 bits that a pass of `rows` rows reads by `few_rows`; None if it does not."""
    if rows > MOST_ROWS:
        return None
    return weight.eight_bit if isinstance(weight.values, Tensor) else weight.values
