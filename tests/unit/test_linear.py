"""Linear layers, alone and over a residual stream: Triton (on a GPU, or interpreted) and torch against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.backends import Backend
from specahead.kernels.linear import (
    MOST_ROWS,
    EightBitWeight,
    LinearWeight,
    Residual,
    add_linear,
    few_rows,
    linear,
    linear_of_residual,
    quantize,
    weights,
)
from specahead.kernels.linear.many_rows import many_rows_linear, round_rows
from specahead.kernels.linear.weights import BLOCK

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's dot multiplies no bfloat16
EPSILON = 1e-5
EIGHT_BITS = pytest.mark.parametrize("in_eight_bits", [False, True], ids=["16 bits", "8 bits"])
BACKENDS: tuple[Backend, ...] = ("triton", "torch")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weight_of(outputs: int, inputs: int, in_eight_bits: bool = False, biased: bool = False) -> LinearWeight:
    bias = torch.linspace(-3, 3, outputs, device=DEVICE, dtype=DTYPE) if biased else None
    weight = LinearWeight((random(outputs, inputs, seed=1) / inputs**0.5).to(DTYPE), bias)
    return weight.with_eight_bit() if in_eight_bits else weight


def exactly(x: Tensor, weight: LinearWeight, gated: bool = False) -> Tensor:
    """The layer in float64, by the weights that it is read by."""
    read = weight.eight_bit or weight.values
    values = read if isinstance(read, Tensor) else read.in_order()
    out = F.linear(x.double(), values.double(), None if weight.bias is None else weight.bias.double())
    gate, up = out.chunk(2, 1)
    return F.silu(gate) * up if gated else out


def normed(x: Tensor, norm: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + EPSILON) * norm.double()


def check(out: Tensor, wanted: Tensor, bits: int = 7) -> None:
    assert out.shape == wanted.shape
    torch.testing.assert_close(out.double(), wanted, rtol=2**-bits, atol=2**-bits)


# The dispatch


@EIGHT_BITS
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "inputs"), [(2, 96), (7, 640), (17, 384), (MOST_ROWS, 256), (70, 128)])
def test_a_layer(rows: int, inputs: int, gated: bool, in_eight_bits: bool) -> None:
    # No kernel takes inputs that are no whole blocks in 8 bits.
    weight = weight_of(40, inputs, in_eight_bits and inputs % BLOCK == 0, biased=not gated)
    x = random(rows, inputs)
    read = LinearWeight(weight.values, weight.bias) if rows > MOST_ROWS else weight
    for backend in BACKENDS:
        out = linear(x, weight, backend, gated)
        assert out.dtype == DTYPE
        check(out, exactly(x, read, gated), 6)


@EIGHT_BITS
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_layers_over_a_residual_stream(rows: int, scale: float, backend: Backend, in_eight_bits: bool) -> None:
    """A part of a model: a gated layer of the stream's norm, a layer that adds to it, and one that reads the sum."""
    hidden, inner = 128, 256
    stream, norm = Residual(random(rows, hidden, seed=2), scale=scale), 1 + random(hidden, seed=3) / 4
    first = weight_of(2 * inner, hidden, in_eight_bits)
    second, head = weight_of(hidden, inner, in_eight_bits), weight_of(20, hidden, in_eight_bits, biased=True)
    half, read = linear_of_residual(stream, norm, EPSILON, first, backend, gated=True)
    assert torch.equal(read.total, stream.total)
    added = add_linear(read, half, second, backend)
    out, total = linear_of_residual(added, norm, EPSILON, head, backend)
    plain, summed = linear_of_residual(added, None, EPSILON, head, backend)

    def held(weight: LinearWeight) -> LinearWeight:
        return weight if rows <= MOST_ROWS else LinearWeight(weight.values, weight.bias)

    after = stream.total.double() + scale * exactly(
        exactly(normed(stream.total, norm), held(first), True), held(second)
    )
    check(total.total, after, 6)
    check(summed.total, after, 6)
    check(out, exactly(normed(after, norm), held(head)), 5)
    check(plain, exactly(after, held(head)), 5)
    index = torch.tensor([0, rows - 1, 0], device=DEVICE)
    check(total.rows(index).total, after[index], 6)


# Few rows, and weights in 8 bits


def cut_in(parts: int) -> few_rows.Tuning:
    return few_rows.Tuning(columns=16, depth=128, warps=4, stages=2, parts=parts)


@EIGHT_BITS
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "parts"), [(1, 40, 1), (7, 16, 4), (17, 33, 2), (MOST_ROWS, 16, 1)])
def test_parts_of_a_layer_add_up(rows: int, outputs: int, parts: int, biased: bool, in_eight_bits: bool) -> None:
    x, weight = random(rows, 128 * parts), weight_of(outputs, 128 * parts, in_eight_bits, biased)
    for backend in BACKENDS:
        out = few_rows.few_rows_linear(
            x, weight.eight_bit or weight.values, weight.bias, in_parts=parts > 1, backend=backend, tuning=cut_in(parts)
        )
        assert out.shape == ((parts, rows, outputs) if parts > 1 and backend == "triton" else (rows, outputs))
        check(out.sum(0) if out.dim() == 3 else out, exactly(x, weight))


@pytest.mark.parametrize("inputs", [24, 256])
def test_a_weight_is_rounded_by_a_sixteenth_at_most_whatever_its_rows_scales(
    inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_AT_ONCE", 2**17)
    weight = random(5000, inputs, dtype=torch.float32) * torch.logspace(-6, 6, 5000, device=DEVICE)[:, None]
    weight[7] = 0
    rounded = quantize(weight)
    back = rounded.in_order()
    smallest = rounded.scales[:, None] * 2**-6  # below it, steps are even
    assert ((back - weight).abs() <= (weight.abs() / 16).maximum(smallest / 16)).all()
    assert (back[7] == 0).all()


def test_a_rows_scale_is_the_one_that_changes_it_least() -> None:
    weight = random(50, 256, dtype=torch.float32)
    chosen = quantize(weight).in_order()
    for factor in (1.0, 1.25, 1.625):
        scales = weight.abs().amax(1, keepdim=True) / 448 * factor
        other = (weight / scales).to(torch.float8_e4m3fn).float() * scales
        assert ((chosen - weight).square().sum(1) <= (other - weight).square().sum(1) * (1 + 1e-4)).all()
    assert len(set((quantize(weight).scales / weight.abs().amax(1) * 448 * 8).round().tolist())) > 2


# Many rows over weights in 8 bits

SHAPES = [(65, 48, 256), (130, 16, 128), (90, 40, 384), (67, 176, 640), (1, 32, 128)]


def held_in_eight_bits(outputs: int, inputs: int, dtype: torch.dtype, biased: bool = False) -> LinearWeight:
    bias = torch.linspace(-3, 3, outputs, device=DEVICE, dtype=dtype) if biased else None
    return LinearWeight(quantize(random(outputs, inputs, seed=1, dtype=dtype) / inputs**0.5), bias)


def read_in_eight_bits(x: Tensor) -> Tensor:
    """The numbers that rows are rounded to, in float32."""
    values, scales = round_rows(x)
    return EightBitWeight(values, scales[:, 0], x.dtype).in_order()


@pytest.mark.parametrize("inputs", [24, 100, 128, 640])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_rounded_alike_by_kernel_and_reference(inputs: int, dtype: torch.dtype) -> None:
    x = random(9, inputs, dtype=dtype) * torch.logspace(-6, 6, 9, device=DEVICE)[:, None].to(dtype)
    x[4] = 0
    values, scales = round_rows(x, "triton")
    wanted, of_wanted = round_rows(x)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8)) and torch.equal(scales, of_wanted)
    assert (read_in_eight_bits(x) - x.float()).abs().max(1).values.le(x.float().abs().amax(1) / 16).all()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_many_rows_over_8_bits(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    """Against float64 over the numbers that are multiplied. 40 outputs are no multiple of 16: few rows at a time."""
    dtype = torch.bfloat16 if outputs % 16 == 0 or DEVICE == "cuda" else torch.float16
    weight, x = held_in_eight_bits(outputs, inputs, dtype, biased), random(rows, inputs, dtype=dtype)
    for backend in BACKENDS:
        in_slices = backend == "triton" and outputs % 16
        read = x if in_slices else read_in_eight_bits(x)
        out = many_rows_linear(x, weight.values, weight.bias, backend)
        assert out.dtype == dtype
        check(out, exactly(read, weight), 6)


@pytest.mark.parametrize(("rows", "outputs", "parts"), [(70, 40, 2), (few_rows.MOST_ROUNDED, 33, 1)])
def test_rounded_rows_over_8_bits(rows: int, outputs: int, parts: int) -> None:
    """A layer alone, and two as gate and up."""
    x, biased = random(rows, 256), held_in_eight_bits(outputs, 256, DTYPE, biased=True)
    pair, (values, scales) = held_in_eight_bits(2 * outputs, 256, DTYPE), round_rows(x)
    for backend in BACKENDS:
        for weight, gated in ((biased, False), (pair, True)):
            out = few_rows.few_rows_linear(
                values,
                weight.values,
                weight.bias,
                gated,
                in_parts=not gated,
                backend=backend,
                dtype=DTYPE,
                tuning=cut_in(1 if gated else parts),
                x_scales=scales,
            )
            in_parts = parts > 1 and not gated and backend == "triton"
            assert out.shape == ((parts, rows, outputs) if in_parts else (rows, outputs))
            check(out.sum(0) if out.dim() == 3 else out, exactly(read_in_eight_bits(x), weight, gated))


def test_a_layer_held_in_8_bits_is_cut_into_parts_for_rounded_rows() -> None:
    x, weight = random(MOST_ROWS + 6, 1024), held_in_eight_bits(64, 1024, DTYPE)
    out = linear(x, weight, "triton", in_parts=True)
    assert out.shape[1:] == (MOST_ROWS + 6, 64) and len(out) > 1
    check(out.sum(0), exactly(read_in_eight_bits(x), weight), 6)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1, few_rows.MOST_ROUNDED + 1])
def test_a_layer_held_in_8_bits_goes_by_its_rows(rows: int, gated: bool) -> None:
    weight, x = held_in_eight_bits(64, 256, DTYPE if rows <= MOST_ROWS else torch.bfloat16), random(rows, 256)
    x = x.to(weight.dtype)
    # The interpreter has no arithmetic of bfloat16.
    computes = DEVICE == "cuda" or rows <= few_rows.MOST_ROUNDED or not gated
    for backend in BACKENDS if computes else ["torch"]:
        out = linear(x, weight, backend, gated)
        read = x if rows <= MOST_ROWS else read_in_eight_bits(x)
        check(out, exactly(read, weight, gated), 6)
        assert (rows <= MOST_ROWS) == torch.allclose(out.double(), exactly(x, weight, gated), rtol=2**-6, atol=2**-6)


def test_a_layer_held_in_8_bits_is_half_as_large_and_can_be_cut() -> None:
    whole = held_in_eight_bits(64, 256, DTYPE)
    assert whole.values.nbytes == 64 * 256 + 64 * 4 and whole.outputs == 64 and whole.dtype == DTYPE
    x = random(3, 256)
    assert torch.equal(linear(x, LinearWeight(whole.values[:40])), linear(x, whole)[:, :40])


def test_numbers_that_float16_does_not_hold_become_its_largest() -> None:
    weight = LinearWeight(quantize(torch.ones(32, 128, device=DEVICE, dtype=DTYPE) * 100))
    out = linear(random(2, 128).abs().half() * 4, weight, "triton", gated=True)
    assert out.dtype == torch.float16 and (out == 65504).all()
