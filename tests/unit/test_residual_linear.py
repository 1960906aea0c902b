"""Layers that read a residual through its norm or add to it: Triton (on a GPU, or interpreted), torch and float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.embedding import embed_in_float32
from kernels.few_rows_linear import LEAST_DEPTH, Tuning, asked_ahead
from kernels.residual_linear import MOST_ROWS, RmsNorm, add_linear, cut, cut_gated, gated_of_norm, parts_of_norm
from tests.compiling import compile_for_a_gpu

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no arithmetic of bfloat16
EPSILON = 1e-5
CLOSE: dict[str, float] = {"rtol": 2**-6, "atol": 2**-6}
# rows, outputs, inputs, parts: outputs that fill no tile, and parts of which one is longer than another
SIZES = [(1, 40, 128, 1), (7, 64, 640, 3), (17, 130, 384, 2), (MOST_ROWS, 16, 256, 2)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weight_of(outputs: int, inputs: int) -> Tensor:
    return random(outputs, inputs, seed=1, dtype=torch.float32).div(inputs**0.5).to(DTYPE)


def norm_of(size: int) -> RmsNorm:
    return RmsNorm(1 + random(size, seed=2) / 4, EPSILON)


def normed(residual: Tensor, norm: RmsNorm) -> Tensor:
    wide = residual.double()
    return wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + EPSILON) * norm.weight


@pytest.mark.parametrize(("rows", "outputs", "inputs", "parts"), SIZES)
def test_a_layer_is_added_to_the_residual(rows: int, outputs: int, inputs: int, parts: int) -> None:
    x, weight = random(rows, inputs, dtype=DTYPE), weight_of(outputs, inputs)
    before = random(rows, outputs, seed=3)
    wanted = before.double() + 0.5 * x.double() @ weight.double().T
    for backend in ("triton", "torch"):
        residual = before.clone()
        add_linear(residual, x, weight, 0.5, backend, Tuning(64, 128, 4, 3, parts))
        torch.testing.assert_close(residual.double(), wanted, **CLOSE)


@pytest.mark.parametrize(("rows", "outputs", "inputs", "parts"), SIZES)
def test_a_layer_of_a_norm_is_given_in_parts_that_are_not_scaled(
    rows: int, outputs: int, inputs: int, parts: int
) -> None:
    residual, weight, norm = 3 * random(rows, inputs), weight_of(outputs, inputs), norm_of(inputs)
    for backend in ("triton", "torch"):
        given = parts_of_norm(residual, norm, weight, backend, Tuning(64, 128, 4, 3, parts))
        assert len(given.parts) == len(given.squares) == (parts if backend == "triton" else 1)
        torch.testing.assert_close(given.squares.sum(0), residual.pow(2).sum(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(given.scaled().double(), normed(residual, norm) @ weight.double().T, **CLOSE)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(3, 40, 128), (17, 64, 640)])
def test_a_gated_layer_of_a_norm(rows: int, outputs: int, inputs: int) -> None:
    residual, weight, norm = 3 * random(rows, inputs), weight_of(2 * outputs, inputs), norm_of(inputs)
    gate, up = (normed(residual, norm) @ weight.double().T).split(outputs, 1)
    for backend in ("triton", "torch"):
        out = gated_of_norm(residual, norm, weight, backend)
        assert out.dtype == DTYPE
        torch.testing.assert_close(out.double(), F.silu(gate) * up, **CLOSE)


@pytest.mark.parametrize("hidden", [16, 40])
def test_embeddings_in_float32(hidden: int) -> None:
    embedding, tokens = random(9, hidden, dtype=DTYPE), torch.tensor([8, 0, 3, 3], device=DEVICE)
    for backend in ("triton", "torch"):
        out = embed_in_float32(tokens, embedding, 1.5, backend)
        torch.testing.assert_close(out, 1.5 * embedding[tokens].float())


def test_what_triton_does_not_take_is_refused() -> None:
    norm, weight = norm_of(96), weight_of(32, 96)
    with pytest.raises(ValueError, match=r"gated_of_norm: .* multiple of 128 inputs, got \[4, 96\]"):
        gated_of_norm(random(4, 96), norm, weight, "triton")
    with pytest.raises(ValueError, match=r"parts_of_norm: Triton takes up to 32 contiguous rows"):
        parts_of_norm(random(MOST_ROWS + 1, 128), norm_of(128), weight_of(32, 128), "triton")
    with pytest.raises(ValueError, match=r"add_linear: .* with strides \(256, 2\)"):
        add_linear(random(2, 32), random(2, 256, dtype=DTYPE)[:, ::2], weight_of(32, 128), 1.0, "triton")


def test_it_compiles_for_a_gpu_as_it_is_cut(tmp_path: Path) -> None:
    """In all three forms, with as many rows as it takes."""
    outputs, inputs = 3072, 2048
    types = {"x_ptr": "*fp32", "norm_ptr": "*fp32", "values_ptr": "*bf16", "squares_ptr": "*fp32", "out_ptr": "*fp32"}
    nothing = {"scales_ptr": None, "bias_ptr": None}
    shared: dict[str, Any] = nothing | {
        "outputs": outputs,
        "inputs": inputs,
        "epsilon": EPSILON,
        "scale": 1.0,
        "ROWS": MOST_ROWS,
        "COLUMNS": 64,
        "DEPTH": LEAST_DEPTH,
        "PDL": True,
        "GATED": False,
        "ADD": False,
    }

    def variant(tuning: Tuning, **more: Any) -> dict[str, Any]:
        ahead = asked_ahead(max(LEAST_DEPTH, inputs // tuning.parts), 2)
        return shared | {"PARTS": tuning.parts, "STAGES": tuning.stages, "AHEAD": ahead} | more

    plain, gated = cut(outputs, inputs), cut_gated(inputs)
    variants = [variant(plain), variant(gated, GATED=True, squares_ptr=None)]
    where = "kernels.few_rows_linear", "_few_rows_linear_kernel"
    compile_for_a_gpu(*where, types | {"rows": "i32"}, variants, tmp_path)
    adding = variant(plain, ADD=True, norm_ptr=None, squares_ptr=None)
    compile_for_a_gpu(*where, types | {"rows": "i32", "x_ptr": "*bf16"}, [adding], tmp_path)
