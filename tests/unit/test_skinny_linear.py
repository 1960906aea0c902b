"""Linear layers of few rows in Triton (on a GPU, or interpreted) against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.skinny_linear import MAX_ROWS, Tuning, skinny_linear

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 7, 64), (2, 33, 100), (MAX_ROWS, 16, 192)]  # rows, outputs, inputs: some fill no tile


def given(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows + outputs)
    x = torch.randn(rows, inputs, generator=random)
    weight = torch.randn(outputs, inputs, generator=random) / inputs**0.5
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype)


def check(out: Tensor, exact: Tensor) -> None:
    """To a rounding of the result."""
    assert out.shape == exact.shape
    precision = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=precision, atol=precision / 4)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_plain_with_bias_and_with_residual(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, backend: str
) -> None:
    x, weight = given(rows, outputs, inputs, dtype)
    exact = x.double() @ weight.double().T
    tuning = Tuning(columns=4, depth=64, warps=1)
    check(skinny_linear(x, weight, backend=backend, tuning=tuning), exact)
    if backend == "torch":
        return  # it rounds after each part
    bias, residual = weight[:, 0].contiguous(), (x[:, :1] * weight[:, 1]).contiguous()
    check(skinny_linear(x, weight, bias, backend=backend, tuning=tuning), exact + bias.double())
    out = skinny_linear(x, weight, residual=residual, backend=backend, tuning=tuning)
    check(out, exact + residual.double())
    out = skinny_linear(x, weight, bias, residual=residual, backend=backend, tuning=tuning, scale=0.3)
    check(out, 0.3 * (exact + bias.double()) + residual.double())


@pytest.mark.parametrize("depth", [32, 256])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_norm_and_gated_activation(rows: int, outputs: int, inputs: int, depth: int) -> None:
    x, weight = given(rows, 2 * outputs, inputs, torch.bfloat16)
    norm, wide = (1 + x[0] / 4).contiguous(), x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.double()
    gate, up = (normed @ weight.double().T).split(outputs, 1)
    tuning = Tuning(columns=2, depth=depth, warps=1)
    out = skinny_linear(x, weight, None, norm, 1e-5, gated=True, backend="triton", tuning=tuning)
    check(out, F.silu(gate) * up)
    out = skinny_linear(x, weight[:outputs].contiguous(), None, norm, 1e-5, backend="triton", tuning=tuning)
    check(out, gate)


def test_no_rows() -> None:
    x, weight = given(2, 8, 64, torch.bfloat16)
    assert skinny_linear(x[:0], weight, backend="triton").shape == (0, 8)


def test_what_it_takes() -> None:
    x, weight = given(2, 8, 64, torch.bfloat16)
    with pytest.raises(NotImplementedError, match="gated"):
        skinny_linear(x, weight, residual=x[:, :8], gated=True)
    for wrong in (x.repeat(MAX_ROWS, 1), x.float(), x.repeat(1, 2)[:, ::2]):
        with pytest.raises(ValueError, match="contiguous rows of 16-bit"):
            skinny_linear(wrong, weight.to(wrong.dtype), backend="triton")
