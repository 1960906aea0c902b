"""Linear layers of few rows: Triton (on a GPU, or interpreted) and torch against float64."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.few_rows_linear import (
    LEAST_DEPTH,
    MOST_ROWS,
    Tuning,
    Weight,
    asked_ahead,
    default_tuning,
    few_rows_linear,
    quantize,
)
from tests.compiling import compile_for_a_gpu

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no arithmetic of bfloat16
EIGHT_BITS = pytest.mark.parametrize("in_eight_bits", [False, True], ids=["16 bits", "8 bits"])


def small(parts: int = 1) -> Tuning:
    return Tuning(columns=16, depth=128, warps=4, stages=2, parts=parts)


def given(rows: int, outputs: int, inputs: int, in_eight_bits: bool) -> tuple[Tensor, Weight, Tensor]:
    """Return inputs, a weight, and the weight as it is rounded, in float64."""
    random = torch.Generator().manual_seed(rows + outputs)
    x = torch.randn(rows, inputs, generator=random).to(DEVICE, DTYPE)
    weight = (torch.randn(outputs, inputs, generator=random) / inputs**0.5).to(DEVICE, DTYPE)
    if not in_eight_bits:
        return x, weight, weight.double()
    rounded = quantize(weight)
    return x, rounded, rounded.in_order().double()


@pytest.mark.parametrize("inputs", [24, 256])
def test_a_weight_is_rounded_by_a_sixteenth_at_most_whatever_its_rows_scales(inputs: int) -> None:
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(5000, inputs, generator=random) * torch.logspace(-6, 6, 5000)[:, None]
    weight[7] = 0
    rounded = quantize(weight)
    back = rounded.in_order()
    smallest = rounded.scales[:, None] * 2**-6  # below it, steps are even
    assert ((back - weight).abs() <= (weight.abs() / 16).maximum(smallest / 16)).all()
    assert (back[7] == 0).all()


@EIGHT_BITS
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "parts"), [(1, 40, 1), (7, 16, 4), (17, 33, 2), (MOST_ROWS, 16, 1)])
def test_a_layer_and_its_parts(rows: int, outputs: int, parts: int, biased: bool, in_eight_bits: bool) -> None:
    x, weight, exact = given(rows, outputs, 128 * parts, in_eight_bits)
    bias = torch.linspace(-3, 3, outputs, device=DEVICE, dtype=DTYPE) if biased else None
    wanted = x.double() @ exact.T + (0 if bias is None else bias.double())
    for backend in ("triton", "torch"):
        out = few_rows_linear(x, weight, bias, in_parts=parts > 1, backend=backend, tuning=small(parts))
        assert out.shape == ((parts, rows, outputs) if parts > 1 and backend == "triton" else (rows, outputs))
        total = out.sum(0) if out.dim() == 3 else out
        torch.testing.assert_close(total.double(), wanted, rtol=2**-7, atol=2**-7)


@EIGHT_BITS
@pytest.mark.parametrize(("rows", "outputs"), [(5, 16), (32, 24)])
def test_a_gated_layer(rows: int, outputs: int, in_eight_bits: bool) -> None:
    x, weight, exact = given(rows, 2 * outputs, 256, in_eight_bits)
    gate, up = (x.double() @ exact.T).split(outputs, 1)
    for backend in ("triton", "torch"):
        out = few_rows_linear(x, weight, gated=True, backend=backend, tuning=small())
        torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=2**-7, atol=2**-8)
        assert few_rows_linear(x, weight, backend=backend, dtype=torch.float32, tuning=small()).dtype == torch.float32


@EIGHT_BITS
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (3072, 2048), (1152, 896), (896, 4864), (151936, 896)])
@pytest.mark.parametrize("rows", [5, 16, 17, 64])
def test_a_layer_is_cut_so_that_it_fills_a_gpu(rows: int, outputs: int, inputs: int, in_eight_bits: bool) -> None:
    """In parts of whole depths, where that is of use, and never in parts where it is not asked for."""
    cut = default_tuning(rows, outputs, inputs, False, True, in_eight_bits)
    assert inputs % (cut.parts * cut.depth) == 0
    programs = -(-outputs // cut.columns) * cut.parts
    assert programs >= 64
    assert cut.parts == 1 or programs <= 300
    assert default_tuning(rows, outputs, inputs, False, False, in_eight_bits).parts == 1
    assert default_tuning(rows, outputs, inputs, True, False, in_eight_bits).parts == 1


def test_a_gated_layer_of_a_program_a_processor_takes_it_with_more_warps() -> None:
    """That of 1B in 8 bits, 128 programs; not that of 8B."""
    assert default_tuning(8, 8192, 2048, True, False, True).warps == 8
    assert default_tuning(8, 14336, 4096, True, False, True).warps == 4
    assert default_tuning(8, 8192, 2176, True, False, True).depth == LEAST_DEPTH  # which is what such inputs are cut in


def test_what_is_not_built_is_refused() -> None:
    x, weight, _ = given(4, 32, 128, True)
    with pytest.raises(NotImplementedError, match="gated layer in parts"):
        few_rows_linear(x, weight, gated=True, in_parts=True)
    with pytest.raises(NotImplementedError, match="or with a bias"):
        few_rows_linear(x, weight, x[0, :16], gated=True)
    with pytest.raises(ValueError, match="a multiple of 1024 inputs, got \\[4, 128\\]"):
        few_rows_linear(x, weight, in_parts=True, backend="triton", tuning=small(8))
    with pytest.raises(ValueError, match="a multiple of 128 inputs, got \\[4, 96\\]"):
        few_rows_linear(x[:, :96].contiguous(), weight, backend="triton", tuning=small())
    with pytest.raises(ValueError, match="up to 64 contiguous rows"):
        few_rows_linear(x[:1].repeat(MOST_ROWS + 1, 1), weight, backend="triton", tuning=small())
    with pytest.raises(ValueError, match="float32"):
        few_rows_linear(x.float(), weight, backend="triton", tuning=small())


def test_it_compiles_for_a_gpu_whatever_the_length_of_a_part(tmp_path: Path) -> None:
    """Also where the weights that are asked for first are no power of two, and with a bias."""
    types = {"x_ptr": "*fp16", "values_ptr": "*i32", "scales_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*fp32"}
    variants = []
    for length in (128, 256, 384, 640):
        sizes = {"outputs": 64, "inputs": 2 * length, "ROWS": 16, "COLUMNS": 64, "DEPTH": LEAST_DEPTH, "PARTS": 2}
        ahead = asked_ahead(length, 1)
        nothing = {"norm_ptr": None, "squares_ptr": None, "epsilon": 0.0, "scale": 1.0, "ADD": False}
        variants.append(sizes | nothing | {"GATED": False, "AHEAD": ahead, "STAGES": 3, "PDL": True})
    where = "specahead.kernels.few_rows_linear", "_few_rows_linear_kernel", types | {"rows": "i32"}
    compile_for_a_gpu(*where, variants, tmp_path)
    types |= {"x_ptr": "*bf16", "values_ptr": "*bf16"}
    where = *where[:2], types | {"rows": "i32"}
    compile_for_a_gpu(*where, [each | {"scales_ptr": None, "ROWS": 64} for each in variants[2:]], tmp_path)
