"""Linear layers of few rows, which are bound by reading their weights: in 16 bits, or in 8, which are half the bytes.

In Triton a program makes COLUMNS outputs of all rows on tensor cores. Inputs are cut into parts where there are too few
outputs to fill a GPU; who reads the result adds them up. A launch begins before the one before it has ended
(programmatic dependent launch) and asks for its first weights, which depend on nothing.

Of 8-bit weights only these are rounded (to e4m3, a scale for each output): they are multiplied as 16-bit floats, which
hold every e4m3 number. Layers of less than five rows are those of kernels.skinny_linear.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backends import ask_for, check_backend, jit, overlapping_launch, power_of_two, tl
from kernels.gated_activation import silu_and_multiply

# Rows beyond which reading the weights is no longer what takes the time, of weights in 16 bits and in 8.
MOST_ROWS, MOST_ROWS_OF_EIGHT_BITS = 64, 128
LEAST_DEPTH = 128  # inputs that Triton takes at once: a layer has a multiple of them
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_MOST_AHEAD = 512  # bytes of an output's weights asked for before the wait: more are slower (docs/performance.md)
_PROGRAMS = 96  # that a layer in parts is cut into, at least, if it can be
_SHORTEST = 512  # inputs of a part that comes of cutting one in two for more programs than these


@dataclass(frozen=True)
class EightBitWeight:
    """A weight of a linear layer: row i is values[i] * scales[i].

    values: [outputs, inputs] float8_e4m3fn; scales: [outputs] float32.
    """

    values: Tensor
    scales: Tensor


Weight = Tensor | EightBitWeight


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut. columns: outputs of a program, gates and ups counted once. depth: inputs at once. parts:
    stretches of inputs, where the result may come in parts.
    """

    columns: int
    depth: int
    warps: int
    stages: int
    parts: int = 1


def quantize(weight: Tensor) -> EightBitWeight:
    """Return a weight [outputs, inputs] in 8 bits: each row is scaled so that its largest number is e4m3's largest."""
    weight = weight.detach()  # else autograd keeps a parameter's float32 numbers for as long as there is the result
    scales = weight.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / _LARGEST
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for rows in torch.arange(len(weight)).split(4096):  # a part at a time: float32 is four times as large
        here = slice(int(rows[0]), int(rows[-1]) + 1)
        values[here] = (weight[here].float() / scales[here]).clamp(-_LARGEST, _LARGEST).to(values.dtype)
    return EightBitWeight(values, scales[:, 0].contiguous())


def takes(x: Tensor, weight: Weight) -> bool:
    """Return whether the Triton kernel takes inputs [rows, inputs] of this weight."""
    most = MOST_ROWS_OF_EIGHT_BITS if isinstance(weight, EightBitWeight) else MOST_ROWS
    return len(x) <= most and x.shape[1] % LEAST_DEPTH == 0 and x.dtype in (torch.bfloat16, torch.float16)


def few_rows_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    gated: bool = False,
    in_parts: bool = False,
    backend: str = "torch",
    tuning: Tuning | None = None,
) -> Tensor:
    """Return x @ weight.T + bias, [rows, outputs] in the dtype of x.

    x: [rows, inputs], contiguous; for Triton such as `takes` says, and with 8-bit weights of numbers that float16 holds
    weight: [outputs, inputs]; bias: [outputs]
    gated: silu(gate) * up of the two halves of the outputs, the gates first: [rows, outputs / 2]
    in_parts: whether the result may be [parts, rows, outputs] float32, to be added up
    Triton adds in float32 and rounds once. Raises NotImplementedError for a gated layer in parts or with a bias,
    ValueError for an x that Triton does not take.
    """
    check_backend("few_rows_linear", backend)
    if gated and (in_parts or bias is not None):
        raise NotImplementedError("few_rows_linear: a gated layer in parts or with a bias")
    if backend == "torch":
        values = weight if isinstance(weight, Tensor) else weight.values.float() * weight.scales[:, None]
        out = F.linear(x.to(values.dtype), values, None if bias is None else bias.to(values.dtype))
        return (silu_and_multiply(out) if gated else out).to(x.dtype)
    values, scales = (weight, None) if isinstance(weight, Tensor) else (weight.values, weight.scales)
    rows, inputs = x.shape
    outputs = len(values) // 2 if gated else len(values)
    tuning = tuning or default_tuning(rows, outputs, inputs, gated, in_parts, scales is not None)
    if not takes(x, weight) or inputs % (tuning.parts * tuning.depth) or not x.is_contiguous():
        raise ValueError(
            f"few_rows_linear: Triton takes up to {MOST_ROWS} contiguous rows of 16-bit numbers "
            f"({MOST_ROWS_OF_EIGHT_BITS} with 8-bit weights), of a multiple of "
            f"{max(LEAST_DEPTH, tuning.parts * tuning.depth)} inputs, got {list(x.shape)} of {x.dtype} with strides "
            f"{x.stride()}"
        )
    shape = (rows, outputs) if tuning.parts == 1 else (tuning.parts, rows, outputs)
    out = torch.empty(shape, dtype=x.dtype if tuning.parts == 1 else torch.float32, device=x.device)
    _few_rows_linear_kernel[(-(-outputs // tuning.columns), tuning.parts)](
        *(x, values, scales, bias, out, rows),
        *(outputs, inputs),
        ROWS=max(16, power_of_two(rows)),
        COLUMNS=tuning.columns,
        DEPTH=tuning.depth,
        PARTS=tuning.parts,
        GATED=gated,
        AHEAD=asked_ahead(inputs // tuning.parts, values.itemsize),
        STAGES=tuning.stages,
        num_warps=tuning.warps,
        **overlapping_launch(x.device),
    )
    return out


def default_tuning(rows: int, outputs: int, inputs: int, gated: bool, in_parts: bool, in_eight_bits: bool) -> Tuning:
    """Return one of the fastest of those measured on an H200 with layers of 0.5B, 1B and 8B models
    (docs/performance.md).

    inputs: a multiple of LEAST_DEPTH.
    """
    is_large, is_few = outputs > 65536, rows <= 16
    if in_eight_bits:
        columns = 32 if is_few else 64
        parts = _parts(inputs, -(-outputs // columns), 2) if in_parts else 1
        if is_large:
            return Tuning(128, 128, 4, 3, parts)
        if is_few and inputs // parts % 256 == 0:
            return Tuning(32, 256, 4, 5, parts)
        return Tuning(64, 128, 8 if gated else 4, 3 if gated else 4, parts)
    if gated:
        return Tuning(64, 128, 8, 4)
    parts = _parts(inputs, -(-outputs // 64), is_few) if in_parts else 1
    if is_large and rows > 32:
        return Tuning(128, 128, 8, 3, parts)
    return Tuning(64, 128, 4, 4 if is_few or is_large else 5, parts)


def _parts(inputs: int, tiles: int, doubled: int) -> int:
    """Return into how many parts to cut the inputs of a layer whose outputs are so many tiles: as many as give enough
    programs, and twice as many, so often, where parts stay long.
    """
    units = inputs // LEAST_DEPTH
    enough = (each for each in range(1, units + 1) if units % each == 0 and tiles * each >= _PROGRAMS)
    parts = next(enough, units)
    for _ in range(doubled):
        if units % (2 * parts) == 0 and inputs // (2 * parts) >= _SHORTEST:
            parts *= 2
    return parts


def asked_ahead(inputs: int, itemsize: int) -> int:
    """Return the inputs of a part whose weights are asked for before the wait: a power of two.

    itemsize: bytes of a weight.
    """
    return 1 << min(_MOST_AHEAD // itemsize, inputs).bit_length() - 1


@jit
def _few_rows_linear_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
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
        x = tl.load(x_at + at, mask=there[None, :], other=0.0)
        x = x if scales_ptr is None else x.to(tl.float16)
        sums = tl.dot(tl.load(weights_at + at).to(x.dtype), x, sums)
        if GATED:
            ups = tl.dot(tl.load(weights_at + at + outputs * inputs).to(x.dtype), x, ups)
    if scales_ptr is not None:
        sums = sums * tl.load(scales_ptr + known)[:, None]
        if GATED:
            ups = ups * tl.load(scales_ptr + outputs + known)[:, None]
    if GATED:
        sums = sums * tl.sigmoid(sums) * ups
    if bias_ptr is not None:
        sums += tl.where(part == 0, tl.load(bias_ptr + known).to(tl.float32), 0.0)[:, None]
    out_at = out_ptr + (part * rows + row[None, :]).to(tl.int64) * outputs + column[:, None]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=there[None, :] & (column < outputs)[:, None])
