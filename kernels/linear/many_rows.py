"""Linear layers of many rows over weights of fewer than 16 bits.

Weights in 8 bits with a scale for each output: inputs are rounded to e4m3 as well, with a scale for each row. On a GPU
one launch rounds the inputs, and the product runs on its 8-bit tensor cores (torch._scaled_mm, rows scaled). A layer
whose number of outputs these do not take, as a head that is cut to a tokenizer's ids, goes in slices through
`few_rows`, whose inputs are not rounded.

Weights with a scale for each group of inputs are turned into 16 bits, one layer at a time, and torch multiplies these.
Up to _MOST_IN_SLICES rows go through `few_rows` as well: it reads the weights once a slice, which is less than writing
and reading them in 16 bits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.backends import Backend, follow, jit, overlapping_launch, power_of_two, tl
from specahead.kernels.linear.few_rows import MOST_ROWS, few_rows_linear
from specahead.kernels.linear.grouped import GroupedWeight
from specahead.kernels.linear.unpacking import number_of
from specahead.kernels.linear.weights import BLOCK, LARGEST, LEAST_SCALE, EightBitWeight, in_blocks

_MULTIPLE = 16  # of inputs and outputs, that 8-bit tensor cores take
_MOST_IN_SLICES = 4 * MOST_ROWS
_LINES = 64  # rows of a weight that a program turns into 16 bits
_INVERSE = 1 / LARGEST  # to multiply by: torch divides by a constant otherwise on a GPU than on a CPU


def many_rows_linear(
    x: Tensor, weight: EightBitWeight | GroupedWeight, bias: Tensor | None = None, backend: Backend = "torch"
) -> Tensor:
    """Return x @ weight.T + bias, [rows, outputs], in the weight's dtype, which is bfloat16 with Triton.

    x: [rows, inputs]; bias: [outputs]. Neither backend waits for the device.
    """
    in_groups = isinstance(weight, GroupedWeight)
    if backend == "triton" and (len(x) <= _MOST_IN_SLICES if in_groups else len(weight) % _MULTIPLE):
        how: dict[str, Any] = {"backend": backend, "dtype": weight.dtype}
        slices = x.tensor_split(-(-len(x) // MOST_ROWS))  # of about one size: each is one more kernel to compile
        return torch.cat([few_rows_linear(rows, weight, bias, **how) for rows in slices])
    if isinstance(weight, GroupedWeight):
        return F.linear(x.to(weight.dtype), in_sixteen_bits(weight, backend), bias)
    values, scales = round_rows(x, backend)
    if backend == "torch":  # the reference: the same numbers, multiplied in float32
        out = F.linear(values.float() * scales, weight.values.float() * weight.scales[:, None])
        return (out if bias is None else out + bias).to(weight.dtype)
    factors = weight.values.t(), scales, weight.scales[None, :]
    return torch._scaled_mm(values, *factors, bias=bias, out_dtype=weight.dtype, use_fast_accum=True)


def round_rows(x: Tensor, backend: Backend = "torch") -> tuple[Tensor, Tensor]:
    """Return rows in 8 bits, [rows, inputs] float8_e4m3fn in the order of EightBitWeight, and scales [rows, 1] float32.

    x: [rows, inputs]. A row's scale takes its largest number to the largest of e4m3.
    """
    rows, inputs = x.shape
    if backend == "torch":
        scales = x.abs().amax(1, keepdim=True).float().clamp(min=LEAST_SCALE) * _INVERSE
        values = (x.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return in_blocks(values), scales
    x = x.contiguous()
    values = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    _round_rows_kernel[(rows,)](
        x,
        values,
        scales,
        inputs,
        SIZE=power_of_two(inputs),
        BLOCK=BLOCK if inputs % BLOCK == 0 else 4,  # the order of whole blocks; of four, as it is
        LARGEST=LARGEST,
        INVERSE=_INVERSE,
        LEAST=LEAST_SCALE,
        num_warps=8 if inputs >= 2048 else 4,
        **overlapping_launch(x.device),
    )
    return values, scales


def in_sixteen_bits(weight: GroupedWeight, backend: Backend = "torch") -> Tensor:
    """Return a weight in the dtype of its results, [outputs, inputs], inputs in order."""
    if backend == "torch":
        return weight.in_order().to(weight.dtype)
    out = torch.empty(len(weight), weight.inputs, dtype=weight.dtype, device=weight.words.device)
    _in_sixteen_bits_kernel[(-(-len(weight) // _LINES), weight.inputs // weight.span)](
        weight.words,
        weight.scales,
        weight.zeros,
        out,
        len(weight),
        weight.inputs,
        LINES=_LINES,
        SPAN=weight.span,
        GROUP=weight.group,
        num_warps=4,
        **overlapping_launch(out.device),
    )
    return out


@jit
def _in_sixteen_bits_kernel(
    words_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    LINES: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Turn a span of LINES rows into 16 bits."""
    follow(PDL)
    WORD: tl.constexpr = 4 if zeros_ptr is None else 8
    WORDS: tl.constexpr = SPAN // WORD
    line = (tl.program_id(0) * LINES + tl.arange(0, LINES)).to(tl.int64)
    inside = (line < outputs)[:, None]
    begin = tl.program_id(1) * SPAN
    at = tl.arange(0, WORDS)
    words = tl.load(words_ptr + line[:, None] * (inputs // WORD) + begin // WORD + at[None, :], mask=inside, other=0)
    for number in tl.static_range(WORD):
        source = begin + number * WORDS
        of_group = source // GROUP * outputs + tl.minimum(line, outputs - 1)
        numbers = number_of(words, zeros_ptr, of_group, number, WORD, PDL)
        scaled = numbers.to(tl.float32) * tl.load(scales_ptr + of_group).to(tl.float32)[:, None]
        out_at = out_ptr + line[:, None] * inputs + source + at[None, :]
        tl.store(out_at, scaled.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _round_rows_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    inputs: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    INVERSE: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Round one row. Numbers are read in the order in which they are written, which is another within blocks."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    source = at // BLOCK * BLOCK + at % 4 * (BLOCK // 4) + at % BLOCK // 4
    x = tl.load(x_ptr + row * inputs + source, mask=at < inputs, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), LEAST) * INVERSE
    rounded = tl.clamp(tl.div_rn(x, scale), -LARGEST, LARGEST)
    tl.store(values_ptr + row * inputs + at, rounded.to(tl.float8e4nv), mask=at < inputs)
    tl.store(scales_ptr + row, scale)
