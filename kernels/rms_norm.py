"""Root-mean-square normalisation, with the residual addition before it."""

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, power_of_two, tl


def add_rms_norm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of hidden + residual (Zhang & Sennrich 2019), and that sum, in `hidden`'s dtype.

    hidden, residual: [rows, size]; weight: [size]; None as the residual adds nothing. Both results are [rows, size].
    Statistics are float32; the normalised row is rounded to the dtype before it is scaled, as transformers does it.
    """
    check_backend("add_rms_norm", backend, ("torch", "triton"))
    if backend == "torch":
        total = hidden if residual is None else hidden + residual
        wide = total.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        return weight * wide.to(hidden.dtype), total
    rows, size = hidden.shape
    out = torch.empty_like(hidden)
    total = hidden if residual is None else torch.empty_like(hidden)
    _add_rms_norm_kernel[(rows,)](
        *(hidden, hidden if residual is None else residual, weight, out, total),
        *(hidden.stride(0), size, epsilon),
        ADD=residual is not None,
        SIZE=power_of_two(size),
        num_warps=8 if size >= 2048 else 4,
    )
    return out, total


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
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    inside = at < size
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    total = tl.load(hidden_ptr + row * stride + at, mask=inside, other=0.0)
    if ADD:
        total = total + tl.load(residual_ptr + row * size + at, mask=inside, other=0.0)
        tl.store(total_ptr + row * size + at, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    tl.store(out_ptr + row * size + at, weight * (wide * scale).to(total.dtype), mask=inside)
