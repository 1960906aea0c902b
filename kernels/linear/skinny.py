"""Linear layers of one or two rows, whose time is that of reading their weights: norm, activation, residual included.

In Triton a program computes a few outputs of all rows on plain lanes: tensor cores, which take 16 rows, are faster from
three rows on. The scale of an RMSNorm is one number a row, so it is applied to the sums; the squares are added up
beside the products. A launch begins before the one before it has ended (programmatic dependent launch) and loads its
first weights, which depend on nothing.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.backends import jit, overlapping_launch, tl
from specahead.kernels.gated_activation import silu_and_multiply
from specahead.kernels.rms_norm import add_rms_norm

MAX_ROWS = 2  # beyond it, tensor cores and a launch for the norm are faster (kernels.linear.few_rows)


@dataclass(frozen=True)
class Tuning:
    """How the kernel cuts a layer; columns and depth are powers of two."""

    columns: int
    """Outputs of a program."""
    depth: int
    """Inputs that a program takes at once; for speed 256 a warp, eight a lane."""
    warps: int


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    backend: str = "torch",
    tuning: Tuning | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Return a linear layer of x, or of its RMSNorm: residual + scale * (x @ weight.T + bias), [rows, outputs].

    x: [rows, inputs]; for Triton up to MAX_ROWS rows of bfloat16 or float16, contiguous.
    weight: [outputs, inputs], or gated: [2 * outputs, inputs], the gates first; bias: [outputs].
    norm: [inputs], the weight of an RMSNorm of x with `epsilon`; None: no norm. residual: [rows, outputs]; None: zeros.
    gated: return silu(gate) * up of the two halves of the outputs.
    Triton adds in float32 and rounds once; torch rounds after each part. A gated layer has no bias, residual or scale.
    """
    assert not gated or (bias is None and residual is None and scale == 1.0)
    if backend == "torch":
        out = F.linear(x if norm is None else add_rms_norm(x, None, norm, epsilon)[0], weight, bias)
        out = silu_and_multiply(out) if gated else out
        out = out if scale == 1.0 else scale * out
        return out if residual is None else residual + out
    assert is_skinny(x) and x.is_contiguous()
    rows, inputs = x.shape
    outputs = len(weight) // 2 if gated else len(weight)
    tuning = tuning or default_tuning(rows, outputs, inputs, gated, norm is not None)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    _skinny_linear_kernel[(-(-outputs // tuning.columns),)](
        x,
        weight,
        bias,
        norm,
        residual,
        out,
        outputs=outputs,
        inputs=inputs,
        epsilon=epsilon,
        SCALE=scale,
        ROWS=rows,
        COLUMNS=tuning.columns,
        DEPTH=tuning.depth,
        GATED=gated,
        num_warps=tuning.warps,
        **overlapping_launch(x.device),
    )
    return out


def is_skinny(x: Tensor) -> bool:
    """Return whether the Triton kernel takes x: [rows, inputs]."""
    return len(x) <= MAX_ROWS and x.dtype in (torch.bfloat16, torch.float16)


def default_tuning(rows: int, outputs: int, inputs: int, gated: bool, normed: bool) -> Tuning:
    """Return the fastest cut of those measured on an H200 with the layers of 1B and 8B models."""
    warps = 4 if rows == 1 else 2  # the more rows, the fewer weights that registers hold
    if outputs > 65536:
        return Tuning(4, 256 * warps, warps)
    if gated:
        return Tuning(2, 256 * warps, warps)
    if inputs >= 8192:
        return Tuning(4, 2048, 8)
    return Tuning(2 * rows if normed else 2, 1024, 4)


@jit
def _load(ptrs, inside, inputs: tl.constexpr, DEPTH: tl.constexpr):
    values = tl.load(ptrs) if inputs % DEPTH == 0 else tl.load(ptrs, mask=inside, other=0.0)
    return values.to(tl.float32)


@jit
def _eighths(values, shape: tl.constexpr):
    """Split values in eight by their last dimension; shape: the values', the last dimension as [..., 2, 2, 2]."""
    a, b = tl.split(tl.reshape(values, shape))
    a0, a1 = tl.split(a)
    b0, b1 = tl.split(b)
    a00, a01 = tl.split(a0)
    a10, a11 = tl.split(a1)
    b00, b01 = tl.split(b0)
    b10, b11 = tl.split(b1)
    return a00, a01, a10, a11, b00, b01, b10, b11


@jit
def _add_products(
    x_ptr,
    norm_ptr,
    weights,
    ups,
    here,
    totals,
    inputs: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
):
    """Add a stretch of inputs to `totals`: sums, sums of the gated half and squares, a tuple of rows each.

    Each of the eight neighbours that a thread holds is a chain of multiply-adds of its own: adding them up would be a
    tree with twice as many instructions.
    """
    sums, up_sums, squares = totals
    weight = _eighths(weights, (COLUMNS, DEPTH // 8, 2, 2, 2))
    up = _eighths(ups, (COLUMNS, DEPTH // 8, 2, 2, 2)) if GATED else weight
    if norm_ptr is not None:
        norm = _eighths(_load(norm_ptr + here, here < inputs, inputs, DEPTH), (DEPTH // 8, 2, 2, 2))
    new_sums = ()
    new_up_sums = ()
    new_squares = ()
    for row in tl.static_range(ROWS):
        x = _load(x_ptr + row * inputs + here, here < inputs, inputs, DEPTH)
        eighths = _eighths(x, (DEPTH // 8, 2, 2, 2))
        sum, up_sum, square = sums[row], up_sums[row], squares[row]
        for i in tl.static_range(8):
            each = eighths[i]
            if norm_ptr is not None:
                square += each * each
                each = each * norm[i]
            sum += weight[i] * each[None, :]
            if GATED:
                up_sum += up[i] * each[None, :]
        new_sums = new_sums + (sum,)  # type: ignore[assignment]
        new_up_sums = new_up_sums + (up_sum,)  # type: ignore[assignment]
        new_squares = new_squares + (square,)  # type: ignore[assignment]
    return new_sums, new_up_sums, new_squares


@jit
def _skinny_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    epsilon: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = tl.arange(0, DEPTH)
    weight_at = weight_ptr + (tl.minimum(column, outputs - 1).to(tl.int64) * inputs)[:, None] + here[None, :]
    if PDL:
        # Before its own wait: the launches that may follow, a rotation or a layer, read only constants before theirs.
        tl.extra.cuda.gdc_launch_dependents()
    weights = _load(weight_at, (here < inputs)[None, :], inputs, DEPTH)
    ups = weights
    if GATED:
        ups = _load(weight_at + outputs * inputs, (here < inputs)[None, :], inputs, DEPTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = (tl.zeros([COLUMNS, DEPTH // 8], tl.float32),) * ROWS
    squares = (tl.zeros([DEPTH // 8], tl.float32),) * ROWS
    totals = (sums, sums, squares)
    totals = _add_products(x_ptr, norm_ptr, weights, ups, here, totals, inputs, ROWS, COLUMNS, DEPTH, GATED)
    for start in tl.range(DEPTH, inputs, DEPTH):
        here = start + tl.arange(0, DEPTH)
        weights = _load(weight_at + start, (here < inputs)[None, :], inputs, DEPTH)
        ups = weights
        if GATED:
            ups = _load(weight_at + start + outputs * inputs, (here < inputs)[None, :], inputs, DEPTH)
        totals = _add_products(x_ptr, norm_ptr, weights, ups, here, totals, inputs, ROWS, COLUMNS, DEPTH, GATED)
    sums, up_sums, squares = totals
    there = column < outputs
    for row in tl.static_range(ROWS):
        out = tl.sum(sums[row], 1)
        up = tl.sum(up_sums[row], 1)
        if norm_ptr is not None:
            scale = tl.rsqrt(tl.sum(squares[row], 0) / inputs + epsilon)
            out = out * scale
            up = up * scale
        if bias_ptr is not None:
            out += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)
        if GATED:
            out = out * tl.sigmoid(out) * up
        if SCALE != 1.0:
            out = out * SCALE
        if residual_ptr is not None:
            out += tl.load(residual_ptr + row * outputs + column, mask=there, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * outputs + column, out.to(out_ptr.dtype.element_ty), mask=there)
