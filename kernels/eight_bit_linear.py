"""Linear layers of few rows whose weights are read as 8-bit numbers: half the bytes of what such layers are bound by.

Only the weights are rounded (to e4m3, a scale for each output); inputs and sums keep their precision. In Triton a
program makes COLUMNS outputs of all rows on tensor cores, with the weights as 16-bit floats, which hold every e4m3
number. Inputs are cut into stretches where there are too few outputs to fill a GPU; who reads the result adds them up.
A launch begins before the one before it has ended (programmatic dependent launch) and asks for its first weights, which
depend on nothing.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backends import ask_for, check_backend, jit, overlapping_launch, power_of_two, tl
from kernels.gated_activation import silu_and_multiply

MAX_ROWS = 128  # beyond it, reading the weights is no longer what takes the time
LEAST_DEPTH = 128  # inputs of a part are a multiple of it
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_MOST_AHEAD = 512  # inputs of a part whose weights are asked for before the wait: more are slower (docs/performance.md)


@dataclass(frozen=True)
class EightBitWeight:
    """A weight of a linear layer: row i is values[i] * scales[i].

    values: [outputs, inputs] float8_e4m3fn; scales: [outputs] float32.
    """

    values: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut. columns: outputs of a program, gates and ups counted once. depth: inputs at once."""

    columns: int
    depth: int
    warps: int
    stages: int


def quantize(weight: Tensor) -> EightBitWeight:
    """Return a weight [outputs, inputs] in 8 bits: each row is scaled so that its largest number is e4m3's largest."""
    weight = weight.detach()  # else autograd keeps a parameter's float32 numbers for as long as there is the result
    scales = weight.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / _LARGEST
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for rows in torch.arange(len(weight)).split(4096):  # a part at a time: float32 is four times as large
        here = slice(int(rows[0]), int(rows[-1]) + 1)
        values[here] = (weight[here].float() / scales[here]).clamp(-_LARGEST, _LARGEST).to(values.dtype)
    return EightBitWeight(values, scales[:, 0].contiguous())


def eight_bit_linear(
    x: Tensor,
    weight: EightBitWeight,
    parts: int = 1,
    gated: bool = False,
    backend: str = "torch",
    tuning: Tuning | None = None,
) -> Tensor:
    """Return x @ weight.T, [rows, outputs] in the dtype of x; or [parts, rows, outputs] float32, to be added up.

    x: [rows, inputs], contiguous; for Triton up to MAX_ROWS rows, whose numbers float16 can hold, and `inputs` a
        multiple of parts and of a part's depth
    parts: stretches that the inputs are cut into, more than 1 for few outputs
    gated: silu(gate) * up of the two halves of the outputs, the gates first: [rows, outputs / 2]
    Raises NotImplementedError for a gated layer in parts, ValueError for an x that Triton does not take.
    """
    check_backend("eight_bit_linear", backend)
    if gated and parts > 1:
        raise NotImplementedError("eight_bit_linear: a gated layer in parts")
    rows, inputs = x.shape
    if backend == "torch":
        values = weight.values.float() * weight.scales[:, None]
        stretches = zip(x.float().chunk(parts, 1), values.chunk(parts, 1), strict=True)
        sums = torch.stack([F.linear(*stretch) for stretch in stretches])
        if parts > 1:
            return sums
        return (silu_and_multiply(sums[0]) if gated else sums[0]).to(x.dtype)
    outputs = len(weight.values) // 2 if gated else len(weight.values)
    tuning = tuning or default_tuning(rows, outputs, inputs // parts, gated)
    if rows > MAX_ROWS or inputs % (parts * tuning.depth) or not x.is_contiguous():
        raise ValueError(
            f"eight_bit_linear: Triton takes up to {MAX_ROWS} contiguous rows of a multiple of {parts * tuning.depth} "
            f"inputs, got {list(x.shape)} with strides {x.stride()}"
        )
    shape = (rows, outputs) if parts == 1 else (parts, rows, outputs)
    out = torch.empty(shape, dtype=x.dtype if parts == 1 else torch.float32, device=x.device)
    _eight_bit_linear_kernel[(-(-outputs // tuning.columns), parts)](
        *(x, weight.values, weight.scales, out, rows),
        *(outputs, inputs),
        ROWS=max(16, power_of_two(rows)),
        COLUMNS=tuning.columns,
        DEPTH=tuning.depth,
        PARTS=parts,
        GATED=gated,
        AHEAD=asked_ahead(inputs // parts),
        STAGES=tuning.stages,
        num_warps=tuning.warps,
        **overlapping_launch(x.device),
    )
    return out


def default_tuning(rows: int, outputs: int, inputs: int, gated: bool) -> Tuning:
    """Return the fastest of those measured on an H200 with the layers of a 1B model (docs/performance.md).

    inputs: of a part.
    """
    if outputs > 65536:
        return Tuning(128, 128, 4, 3)
    if rows <= 16 and inputs % 256 == 0:
        return Tuning(32, 256, 4, 5)
    return Tuning(64, 128, 8 if gated else 4, 3 if gated else 4)


def asked_ahead(inputs: int) -> int:
    """Return the inputs of a part whose weights are asked for before the wait: a power of two."""
    return 1 << min(_MOST_AHEAD, inputs).bit_length() - 1


@jit
def _eight_bit_linear_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    out_ptr,
    rows,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of COLUMNS outputs; the weights are the left side of the product, which registers may hold."""
    LENGTH: tl.constexpr = inputs // PARTS
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    there = row < rows
    known = tl.minimum(column, outputs - 1).to(tl.int64)
    weights_at = values_ptr + known[:, None] * inputs + depth[None, :] + part * LENGTH
    x_at = x_ptr + row[None, :] * inputs + depth[:, None] + part * LENGTH
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    ups = sums
    if PDL:
        # At once, before its own wait: what may follow, a norm or a layer like this, reads only constants before its.
        tl.extra.cuda.gdc_launch_dependents()
        ask_for(values_ptr, known * inputs + part * LENGTH, AHEAD)
        if GATED:
            ask_for(values_ptr, (known + outputs) * inputs, AHEAD)
        tl.extra.cuda.gdc_wait()
    for at in tl.range(0, LENGTH, DEPTH, num_stages=STAGES):
        x = tl.load(x_at + at, mask=there[None, :], other=0.0).to(tl.float16)
        sums = tl.dot(tl.load(weights_at + at).to(tl.float16), x, sums)
        if GATED:
            ups = tl.dot(tl.load(weights_at + at + outputs * inputs).to(tl.float16), x, ups)
    sums = sums * tl.load(scales_ptr + known)[:, None]
    if GATED:
        ups = ups * tl.load(scales_ptr + outputs + known)[:, None]
        sums = sums * tl.sigmoid(sums) * ups
    out_at = out_ptr + (part * rows + row[None, :]).to(tl.int64) * outputs + column[:, None]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=there[None, :] & (column < outputs)[:, None])
