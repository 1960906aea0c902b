"""The inner loop of linear layers within kernels: lines of a weight in 16 bits, 8 or 4, times rows of inputs."""

from typing import Any, NamedTuple

from specahead.kernels.backends import jit, tl
from specahead.kernels.linear.unpacking import in_order, number_of


class Sums(NamedTuple):
    """What a kernel's sums are compiled for."""

    LENGTH: int  # inputs that are summed over
    DEPTH: int  # inputs that are taken at once; words take whole steps of them
    WORD: int  # numbers of an item: 1, 4 (8-bit floats) or 8 (4-bit integers), in the order of kernels.linear.grouped
    GROUP: int | None  # inputs that share a scale; None: all inputs do
    STAGES: int  # steps in flight


class WeightItems(NamedTuple):
    """A weight as kernels take it: its numbers or words, its scales and its zeros; None: it has none."""

    numbers: Any
    scales: Any
    zeros: Any


@jit
def sum_products(weight, weights_at, x_at, there, line, lines, begin, SUMS: tl.constexpr, PDL: tl.constexpr):
    """Return LENGTH inputs' products of some lines of a weight and some rows of inputs, scaled: [lines, rows] float32.

    weight: `WeightItems`. weights_at: [lines] pointers to each line's first item. x_at: [rows] pointers to each row's
    first input, read where `there`. line: [lines], the places of these lines among the weight's `lines`. begin: the
    first input.
    """
    WORD: tl.constexpr = SUMS.WORD
    LINE: tl.constexpr = SUMS.DEPTH // WORD  # inputs that one number of each word of a span stands for
    # Inputs of one group within a span.
    UNIT: tl.constexpr = SUMS.DEPTH if SUMS.GROUP is None else min(SUMS.GROUP, SUMS.DEPTH)
    depth = tl.arange(0, SUMS.DEPTH if SUMS.GROUP is None else LINE)
    weights_at = weights_at[:, None] + tl.arange(0, LINE)[None, :]
    x_at = x_at[None, :] + depth[:, None]
    sums = tl.zeros([line.shape[0], there.shape[0]], tl.float32)
    for at in tl.range(0, SUMS.LENGTH, SUMS.DEPTH, num_stages=SUMS.STAGES):
        if WORD == 1 and SUMS.LENGTH % SUMS.DEPTH > 0:
            inside = at + depth < SUMS.LENGTH
            weights = tl.load(weights_at + at, mask=inside[None, :], other=0.0)
            x = tl.load(x_at + at, mask=inside[:, None] & there[None, :], other=0.0)
            sums = tl.dot(weights, x, sums, input_precision="ieee")
        elif WORD == 1:
            weights = tl.load(weights_at + at)
            x = tl.load(x_at + at, mask=there[None, :], other=0.0)
            sums = tl.dot(weights, x, sums, input_precision="ieee")
        elif SUMS.GROUP is None:
            weights = in_order(tl.load(weights_at + at // WORD), PDL)
            x = tl.load(x_at + at, mask=there[None, :], other=0.0).to(tl.float16)
            sums = tl.dot(weights, x, sums)
        else:
            weights = tl.load(weights_at + at // WORD)
            for number in tl.static_range(WORD):
                x = tl.load(x_at + at + LINE * number, mask=there[None, :], other=0.0).to(tl.float16)
                if number * LINE % UNIT == 0:  # a group begins, or goes on from the last span
                    of_group = (begin + at + number * LINE) // SUMS.GROUP * lines + line
                    scale = tl.load(weight.scales + of_group).to(tl.float32)  # before the products, which hide its way
                    products = tl.zeros([line.shape[0], there.shape[0]], tl.float32)
                products = tl.dot(number_of(weights, weight.zeros, of_group, number, WORD, PDL), x, products)
                if (number + 1) * LINE % UNIT == 0:
                    sums += products * scale[:, None]
    if weight.scales is not None and SUMS.GROUP is None:
        sums = sums * tl.load(weight.scales + line)[:, None]
    return sums


@jit
def gate(sums, dtype: tl.constexpr):
    """Return silu(gate) * up of sums [2 * columns, rows], the gates above the ups, [columns, rows]; of finite numbers
    of `dtype` if that is float16.
    """
    gates, ups = tl.split(tl.permute(tl.reshape(sums, [2, sums.shape[0] // 2, sums.shape[1]]), [1, 2, 0]))
    gated = gates * tl.sigmoid(gates) * ups
    return tl.clamp(gated, -65504.0, 65504.0) if dtype == tl.float16 else gated
