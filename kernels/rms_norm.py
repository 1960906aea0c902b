"""Root-mean-square normalisation, with the residual addition before it."""

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, power_of_two, tl


def add_rms_norm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, backend: str = "torch", scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm (Zhang & Sennrich 2019) of residual + scale * hidden, and that sum, in `hidden`'s dtype.

    hidden, residual: [rows, size]; without a residual the sum is `hidden`, not scaled. weight: [size].
    Statistics are in float32; the normalised row is rounded to the dtype before it is multiplied by the weight, as
    transformers does it.
    """
    check_backend("add_rms_norm", backend)
    if backend == "torch":
        total = hidden if residual is None else add_scaled(hidden, residual, scale)
        wide = total.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        return weight * wide.to(hidden.dtype), total
    rows, size = hidden.shape
    out = torch.empty_like(hidden)
    total = hidden if residual is None else torch.empty_like(hidden)
    _add_rms_norm_kernel[(rows,)](
        *(hidden, residual, weight, out, total),
        *(hidden.stride(0), size, epsilon, scale),
        SIZE=power_of_two(size),
        num_warps=8 if size >= 2048 else 4,
    )
    return out, total


def add_scaled(hidden: Tensor, residual: Tensor, scale: float) -> Tensor:
    """Return residual + scale * hidden."""
    return residual + hidden if scale == 1.0 else residual + scale * hidden


@jit
def _add_rms_norm_kernel(
    hidden_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    stride: tl.constexpr,
    size: tl.constexpr,
    epsilon: tl.constexpr,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    inside = at < size
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    total = tl.load(hidden_ptr + row * stride + at, mask=inside, other=0.0)
    if residual_ptr is not None:
        if SCALE != 1.0:
            total = (total.to(tl.float32) * SCALE).to(total.dtype)
        total = total + tl.load(residual_ptr + row * size + at, mask=inside, other=0.0)
        tl.store(total_ptr + row * size + at, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    tl.store(out_ptr + row * size + at, weight * (wide * scale).to(total.dtype), mask=inside)
