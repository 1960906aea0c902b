"""RMSNorm (Zhang & Sennrich 2019), with the addition to a residual before it."""

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, follow, jit, overlapping_launch, power_of_two, tl


def add_rms_norm(
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    epsilon: float,
    backend: Backend = "torch",
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of residual + scale * hidden, and that sum in the weight's dtype: [rows, size] each.

    hidden, residual: [rows, size]; without a residual the sum is `hidden`, not scaled. Beside a residual, hidden may be
        [parts, rows, size], whose sum in float32 is rounded to the weight's dtype.
    weight: [size].
    dtype: of the norm; None: the weight's.
    Statistics are in float32. As in transformers, the normalised row is rounded to the weight's dtype before it is
    multiplied by the weight.
    """
    if backend == "torch":
        hidden = hidden if hidden.dim() == 2 else hidden.sum(0).to(weight.dtype)
        total = hidden if residual is None else add_scaled(hidden, residual, scale)
        wide = total.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        return (weight * wide.to(hidden.dtype)).to(dtype or weight.dtype), total
    rows, size = hidden.shape[-2:]
    out = torch.empty(rows, size, dtype=dtype or weight.dtype, device=hidden.device)
    total = hidden if residual is None else torch.empty_like(out, dtype=weight.dtype)
    _add_rms_norm_kernel[(rows,)](
        hidden,
        residual,
        weight,
        out,
        total,
        stride=hidden.stride(-2),
        size=size,
        epsilon=epsilon,
        SCALE=scale,
        rows=rows,
        PARTS=1 if hidden.dim() == 2 else len(hidden),
        SIZE=power_of_two(size),
        num_warps=8 if size >= 2048 else 4,
        **overlapping_launch(hidden.device),
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
    rows,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    inside = at < size
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    follow(PDL)
    total = tl.load(hidden_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(hidden_ptr + (part * rows + row) * stride + at, mask=inside, other=0.0)
    total = total.to(weight.dtype)
    if residual_ptr is not None:
        if SCALE != 1.0:
            total = (total.to(tl.float32) * SCALE).to(total.dtype)
        total = total + tl.load(residual_ptr + row * size + at, mask=inside, other=0.0)
        tl.store(total_ptr + row * size + at, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    tl.store(out_ptr + row * size + at, weight * (wide * scale).to(total.dtype), mask=inside)
