"""Linear layers of few rows, whose time is that of reading their weights, in 16 bits, 8 or 4.

In Triton a program computes COLUMNS outputs of all rows on tensor cores. Where a layer has too few outputs to fill a
GPU, its inputs are cut into parts, which the reader of the result adds up. A launch begins before the one before it has
ended (programmatic dependent launch) and asks for its first weights, which depend on nothing.

8-bit weights are rounded to e4m3, with a scale for each output, and multiplied as 16-bit floats, which hold every e4m3
number; inputs are not rounded. A word of four weights has one of each quarter of a block of inputs. So the inputs of a
quarter stand side by side, and a lane takes whole words from shared memory, which is much faster than single bytes.

More rows than MOST_ROWS are rounded to 8 bits as well, with a scale for each row: their products take half as long, and
a program reads half as much of x. torch's own product (`many_rows`) does not cut inputs into parts, so that 4,096
outputs fill a part of a GPU.

Weights with a scale for each group of inputs (GroupedWeight) lie alike, in words of four or of eight numbers. Products
of a group are added up by themselves, and then scaled.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.backends import Backend, ask_for, jit, overlapping_launch, power_of_two, tl
from specahead.kernels.gated_activation import silu_and_multiply
from specahead.kernels.linear.grouped import GroupedWeight
from specahead.kernels.linear.summing import Sums, WeightItems, gate, sum_products
from specahead.kernels.linear.weights import BLOCK, EightBitWeight

MOST_ROWS = 64  # beyond it, products take longer than reading the weights
MOST_ROUNDED = 128  # rows of inputs in 8 bits, beyond which torch's own product fills a GPU
_MOST_AHEAD = 512  # bytes of an output's weights that are asked for before the wait: more are slower
_PROCESSORS = 132  # multiprocessors of an H100 or H200
_PROGRAMS = 96  # that a layer in parts is cut into, at least, if it can be
_LONG = 3072  # inputs of a part from which on twice as many outputs a program read x half as often
_SHORTEST = 512  # inputs of a part; shorter parts are not cut in two to have more than _PROGRAMS programs


@dataclass(frozen=True)
class Tuning:
    """How the kernel cuts a layer."""

    columns: int
    """Outputs of a program; a gate and its up count as one."""
    depth: int
    """Inputs that a program takes at once."""
    warps: int
    stages: int
    parts: int = 1
    """Stretches of inputs, of equal length; more than one only where the result may come in parts."""


def takes(x: Tensor, most: int = MOST_ROWS) -> bool:
    """Return whether the Triton kernel takes inputs [rows, inputs] of 16 bits.

    most: MOST_ROUNDED where they are rounded to 8 bits before.
    """
    return len(x) <= most and x.shape[1] % BLOCK == 0 and x.dtype in (torch.bfloat16, torch.float16)


def few_rows_linear(
    x: Tensor,
    weight: Tensor | EightBitWeight | GroupedWeight,
    bias: Tensor | None = None,
    gated: bool = False,
    in_parts: bool = False,
    backend: Backend = "torch",
    dtype: torch.dtype | None = None,
    tuning: Tuning | None = None,
    x_scales: Tensor | None = None,
) -> Tensor:
    """Return x @ weight.T + bias, [rows, outputs].

    x: [rows, inputs], contiguous. Triton takes what `takes` says; with weights of fewer than 16 bits, numbers that
        float16 holds (float16 itself is fastest). Over an EightBitWeight it may be rounded by `round_rows` before.
    x_scales: [rows, 1] float32, of rows that are rounded.
    weight: [outputs, inputs]; bias: [outputs].
    gated: return silu(gate) * up of the two halves of the outputs, the gates first: [rows, outputs / 2].
    in_parts: whether the result may be [parts, rows, outputs] float32, which the caller sums.
    dtype: of a result that is not in parts; None: the dtype of x.
    Triton adds in float32 and rounds once. A gated layer has no bias and comes whole.
    """
    assert not gated or (bias is None and not in_parts)
    if backend == "torch":
        values = weight if isinstance(weight, Tensor) else weight.in_order()
        x = x if x_scales is None else EightBitWeight(x, x_scales[:, 0], values.dtype).in_order()
        out = F.linear(x.to(values.dtype), values, None if bias is None else bias.to(values.dtype))
        return (silu_and_multiply(out) if gated else out).to(dtype or x.dtype)
    rows, inputs = x.shape
    outputs = len(weight) // 2 if gated else len(weight)
    items, word, group = as_kernels_take(weight)
    if x_scales is not None:
        assert isinstance(weight, EightBitWeight)
        items, word = items._replace(numbers=weight.values), 1
        tuning = tuning or rounded_tuning(outputs, inputs, gated, in_parts)
    tuning = tuning or (
        grouped_tuning(rows, outputs, inputs, gated, in_parts, weight.span)
        if isinstance(weight, GroupedWeight)
        else default_tuning(rows, outputs, inputs, gated, in_parts, items.scales is not None)
    )
    assert takes(x) if x_scales is None else len(x) <= MOST_ROUNDED and inputs % BLOCK == 0
    assert x.is_contiguous() and inputs % (tuning.parts * tuning.depth) == 0
    shape = (rows, outputs) if tuning.parts == 1 else (tuning.parts, rows, outputs)
    out = torch.empty(shape, dtype=(dtype or x.dtype) if tuning.parts == 1 else torch.float32, device=x.device)
    _few_rows_linear_kernel[(-(-outputs // tuning.columns), tuning.parts)](
        *(x, x_scales, items, bias, out, rows, outputs, inputs),
        ROWS=max(16, power_of_two(rows)),
        COLUMNS=tuning.columns,
        SUMS=Sums(inputs // tuning.parts, tuning.depth, word, group, tuning.stages),
        GATED=gated,
        AHEAD=asked_ahead(max(BLOCK, inputs // tuning.parts), items.numbers.nbytes / len(items.numbers) / inputs),
        num_warps=tuning.warps,
        **overlapping_launch(x.device),
    )
    return out


def as_kernels_take(weight: Tensor | EightBitWeight | GroupedWeight) -> tuple[WeightItems, int, int | None]:
    """Return a weight for kernels, the numbers of an item, and the inputs of a group; None: it has no groups."""
    if isinstance(weight, GroupedWeight):
        return WeightItems(weight.words, weight.scales, weight.zeros), weight.numbers, weight.group
    if isinstance(weight, EightBitWeight):
        return WeightItems(weight.values.view(torch.int32), weight.scales, None), 4, None
    return WeightItems(weight, None, None), 1, None


def default_tuning(rows: int, outputs: int, inputs: int, gated: bool, in_parts: bool, in_eight_bits: bool) -> Tuning:
    """Return one of the fastest cuts measured on an H200 with layers of 0.5B, 1B and 8B models.

    inputs: a multiple of BLOCK.
    """
    is_large, is_few = outputs > 65536, rows <= 16
    if gated and in_eight_bits and inputs % 256 == 0 and outputs <= 64 * _PROCESSORS:
        return Tuning(64, 256, 8, 4)  # a program has a multiprocessor to itself
    parts = _parts(inputs, -(-outputs // 64), in_eight_bits or is_few) if in_parts else 1
    fits = in_eight_bits and inputs // parts % 256 == 0
    if fits and not is_few and in_parts and inputs // parts >= _LONG:
        return Tuning(128, 256, 8, 4, parts)
    deep = fits and (rows <= 32 or not (in_parts or gated or is_large))
    if is_large and (in_eight_bits or rows > 32):
        return Tuning(128, 256, 8, 3, parts) if deep else Tuning(128, 128, 8, 4 if in_eight_bits else 3, parts)
    if deep:
        return Tuning(64, 256, 4, 4 if not gated and (is_few or rows > 32) else 3, parts)
    if gated:
        return Tuning(64, 128, 4 if in_eight_bits else 8, 4)
    return Tuning(64, 128, 4, 4 if in_eight_bits or is_few or is_large else 5, parts)


def rounded_tuning(outputs: int, inputs: int, gated: bool, in_parts: bool) -> Tuning:
    """Return a cut for rows of 8 bits, up to MOST_ROUNDED of them.

    A program that computes many outputs reads x for all of them once, which takes about as long as their weights.
    """
    if not in_parts and outputs <= 64 * _PROCESSORS:
        return Tuning(64, 128, 8, 4)
    if not in_parts:
        return Tuning(128, 128, 8, 4 if gated else 3)
    return Tuning(128, 128, 8, 5, _parts(inputs, -(-outputs // 128), False))


def grouped_tuning(rows: int, outputs: int, inputs: int, gated: bool, in_parts: bool, span: int) -> Tuning:
    """Return a cut for weights in groups, by spans of their words. It was taken over from 8 bits, not measured."""
    parts = _parts(inputs, -(-outputs // 64), True, span) if in_parts else 1
    return Tuning(64, span, 8 if gated and rows > 32 else 4, 4 if rows <= 32 else 3, parts)


def _parts(inputs: int, tiles: int, doubled: bool, unit: int = BLOCK) -> int:
    """Return into how many parts to cut the inputs of a layer whose outputs take `tiles` programs.

    The least number that gives _PROGRAMS programs; if `doubled`, twice that number where parts stay long. unit: inputs
    that parts are multiples of.
    """
    units = inputs // unit
    enough = (each for each in range(1, units + 1) if units % each == 0 and tiles * each >= _PROGRAMS)
    parts = next(enough, units)
    stay_long = units % (2 * parts) == 0 and inputs // (2 * parts) >= _SHORTEST
    return 2 * parts if doubled and stay_long else parts


def asked_ahead(inputs: int, itemsize: float) -> int:
    """Return how many of a part's inputs have their weights asked for before the wait: a power of two.

    itemsize: bytes of a weight.
    """
    return 1 << min(int(_MOST_AHEAD / itemsize), inputs).bit_length() - 1


@jit
def _few_rows_linear_kernel(
    x_ptr,
    x_scales_ptr,
    weight,
    bias_ptr,
    out_ptr,
    rows,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    GATED: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one part of COLUMNS outputs.

    The weights are the left side of the product, which registers may hold. Gates and the ups below them are one
    product: two would wait for one another.
    """
    HEIGHT: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    LINES: tl.constexpr = HEIGHT // COLUMNS * outputs
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.arange(0, HEIGHT)
    part = tl.program_id(1)
    begin = part * SUMS.LENGTH
    row = tl.arange(0, ROWS)
    there = row < rows
    known = tl.minimum(tl.program_id(0) * COLUMNS + line % COLUMNS, outputs - 1).to(tl.int64)
    known += line // COLUMNS * outputs
    first = known * (inputs // SUMS.WORD) + begin // SUMS.WORD
    if PDL:
        # Before its own wait: the launches that may follow, a norm or a layer, read only constants before theirs.
        tl.extra.cuda.gdc_launch_dependents()
        ask_for(weight.numbers, first, AHEAD // SUMS.WORD)
        tl.extra.cuda.gdc_wait()
    weights_at, x_at = weight.numbers + first, x_ptr + row * inputs + begin
    sums = sum_products(weight, weights_at, x_at, there, known, LINES, begin, SUMS, PDL)
    if x_scales_ptr is not None:
        sums = sums * tl.load(x_scales_ptr + row, mask=there, other=0.0)[None, :]
    if bias_ptr is not None:
        sums += tl.where(part == 0, tl.load(bias_ptr + known).to(tl.float32), 0.0)[:, None]
    if GATED:
        sums = gate(sums, out_ptr.dtype.element_ty)
    inside = there[None, :] & (column < outputs)[:, None]
    out_at = out_ptr + (part * rows + row[None, :]).to(tl.int64) * outputs + column[:, None]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=inside)
