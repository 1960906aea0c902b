"""Linear layers with 8-bit weights: Triton (on a GPU, or interpreted) and torch against float64."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.eight_bit_linear import MAX_ROWS, EightBitWeight, Tuning, asked_ahead, eight_bit_linear, quantize
from tests.compiling import compile_for_a_gpu

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tuning(columns=16, depth=32, warps=4, stages=2)


def given(rows: int, outputs: int, inputs: int) -> tuple[Tensor, EightBitWeight, Tensor]:
    """Return inputs, a weight, and the weight as it is rounded, in float64."""
    random = torch.Generator().manual_seed(rows + outputs)
    x = torch.randn(rows, inputs, generator=random).to(DEVICE, torch.bfloat16)
    weight = quantize((torch.randn(outputs, inputs, generator=random) / inputs**0.5).to(DEVICE, torch.bfloat16))
    return x, weight, weight.values.double() * weight.scales.double()[:, None]


def test_a_weight_is_rounded_by_a_sixteenth_at_most_whatever_its_rows_scales() -> None:
    weight = torch.randn(5000, 24, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 5000)[:, None]
    weight[7] = 0
    rounded = quantize(weight)
    back = rounded.values.float() * rounded.scales[:, None]
    smallest = rounded.scales[:, None] * 2**-6  # below it, steps are even
    assert ((back - weight).abs() <= (weight.abs() / 16).maximum(smallest / 16)).all()
    assert (back[7] == 0).all()


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(("rows", "outputs", "parts"), [(1, 40, 1), (7, 16, 4), (17, 33, 2), (MAX_ROWS, 16, 1)])
def test_a_layer_and_its_parts(rows: int, outputs: int, parts: int, backend: str) -> None:
    x, weight, exact = given(rows, outputs, 128)
    out = eight_bit_linear(x, weight, parts, backend=backend, tuning=SMALL)
    assert out.shape == ((parts, rows, outputs) if parts > 1 else (rows, outputs))
    total = out.sum(0) if parts > 1 else out
    torch.testing.assert_close(total.double(), x.double() @ exact.T, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(("rows", "outputs"), [(5, 16), (32, 24)])
def test_a_gated_layer(rows: int, outputs: int, backend: str) -> None:
    x, weight, exact = given(rows, 2 * outputs, 64)
    gate, up = (x.double() @ exact.T).split(outputs, 1)
    out = eight_bit_linear(x, weight, gated=True, backend=backend, tuning=SMALL)
    torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=2**-7, atol=2**-9)


def test_what_is_not_built_is_refused() -> None:
    x, weight, _ = given(4, 32, 64)
    with pytest.raises(NotImplementedError, match="gated layer in parts"):
        eight_bit_linear(x, weight, 2, gated=True)
    with pytest.raises(ValueError, match="a multiple of 128 inputs, got \\[4, 64\\]"):
        eight_bit_linear(x, weight, 4, backend="triton", tuning=SMALL)
    with pytest.raises(ValueError, match="up to 128 contiguous rows"):
        eight_bit_linear(x.repeat(40, 1), weight, backend="triton", tuning=SMALL)


def test_it_compiles_for_a_gpu_whatever_the_length_of_a_part(tmp_path: Path) -> None:
    """Also where the weights that are asked for first are no power of two."""
    types = {"x_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "out_ptr": "*fp32", "rows": "i32"}
    variants = []
    for length in (128, 256, 384, 640):
        sizes = {"outputs": 64, "inputs": 2 * length, "ROWS": 16, "COLUMNS": 64, "DEPTH": 128, "PARTS": 2}
        fixed = sizes | {"GATED": False, "AHEAD": asked_ahead(length), "STAGES": 3, "PDL": True}
        variants.append(fixed)
    compile_for_a_gpu("kernels.eight_bit_linear", "_eight_bit_linear_kernel", types, variants, tmp_path)
