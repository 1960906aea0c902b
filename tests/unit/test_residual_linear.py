"""Layers that read a residual through its norm or add to it: Triton (on a GPU, or interpreted), torch and float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.embedding import embed_in_float32
from specahead.kernels.few_rows_linear import (
    LEAST_DEPTH,
    MOST_ROWS,
    EightBitWeight,
    Tuning,
    Weight,
    asked_ahead,
    quantize,
)
from specahead.kernels.residual_linear import (
    CUT_GATED,
    MOST_NORMED_ROWS,
    RmsNorm,
    add_linear,
    cut,
    gated_of_norm,
    parts_of_norm,
)
from tests.compiling import compile_for_a_gpu

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no arithmetic of bfloat16
EPSILON = 1e-5
EIGHT_BITS = pytest.mark.parametrize("in_eight_bits", [False, True], ids=["16 bits", "8 bits"])
CLOSE: dict[str, float] = {"rtol": 2**-6, "atol": 2**-6}
# rows, outputs, inputs, parts: outputs that fill no tile, and parts of which one is longer than another
SIZES = [(1, 40, 128, 1), (7, 64, 640, 3), (17, 130, 384, 2), (MOST_NORMED_ROWS, 16, 256, 2)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weight_of(outputs: int, inputs: int) -> Tensor:
    return (random(outputs, inputs, seed=1) / inputs**0.5).to(DTYPE)


def norm_of(size: int) -> RmsNorm:
    return RmsNorm(1 + random(size, seed=2) / 4, EPSILON)


def normed(residual: Tensor, norm: RmsNorm) -> Tensor:
    wide = residual.double()
    return wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + EPSILON) * norm.weight


@EIGHT_BITS
@pytest.mark.parametrize(("rows", "outputs", "inputs", "parts"), SIZES)
def test_a_layer_is_added_to_the_residual(
    rows: int, outputs: int, inputs: int, parts: int, in_eight_bits: bool
) -> None:
    x, weight, before = random(rows, inputs, dtype=DTYPE), weight_of(outputs, inputs), random(rows, outputs, seed=3)
    held: Weight = quantize(weight) if in_eight_bits else weight
    exact = weight.double() if isinstance(held, Tensor) else held.in_order().double()
    wanted = before.double() + 0.5 * x.double() @ exact.T
    for backend in ("triton", "torch"):
        residual = before.clone()
        add_linear(residual, x, held, 0.5, backend, Tuning(64, 128, 4, 3, parts))
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
        parts_of_norm(random(MOST_NORMED_ROWS + 1, 128), norm_of(128), weight_of(32, 128), "triton")
    with pytest.raises(ValueError, match=r"add_linear: .* with strides \(256, 2\)"):
        add_linear(random(2, 32), random(2, 256, dtype=DTYPE)[:, ::2], weight_of(32, 128), 1.0, "triton")


@pytest.mark.parametrize(("outputs", "inputs", "parts"), [(1152, 896, 4), (896, 4864, 9), (3072, 2048, 2), (9, 128, 1)])
def test_a_part_takes_two_turns_but_where_one_is_longer(outputs: int, inputs: int, parts: int) -> None:
    tuning = cut(torch.empty(outputs, inputs, dtype=DTYPE, device="meta"), 8)
    assert tuning.parts == parts
    turns = -(-inputs // tuning.depth // parts)
    assert turns >= 2 or inputs == tuning.depth
    assert tuning.stages == min(6, turns + 2)


def test_it_compiles_for_a_gpu_as_it_is_cut(tmp_path: Path) -> None:
    """In all three forms, with as many rows as it takes."""
    outputs, inputs = 3072, 2048
    types = {f"{name}_ptr": "*fp32" for name in ("x", "norm", "squares", "out")}
    types |= {"values_ptr": "*bf16", "rows": "i32"}
    shared: dict[str, Any] = {
        "bias_ptr": None,
        "outputs": outputs,
        "inputs": inputs,
        "epsilon": EPSILON,
        "scale": 1.0,
        "ROWS": MOST_NORMED_ROWS,
        "COLUMNS": 64,
        "PDL": True,
        "GATED": False,
        "ADD": False,
    }

    def variant(tuning: Tuning, **more: Any) -> dict[str, Any]:
        ahead = asked_ahead(max(LEAST_DEPTH, inputs // tuning.parts), 2)
        of_tuning = {"PARTS": tuning.parts, "STAGES": tuning.stages, "DEPTH": tuning.depth, "AHEAD": ahead}
        return shared | of_tuning | more

    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16)
    light = EightBitWeight(torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn), torch.empty(outputs))
    nothing, adds = {"scales_ptr": None}, {"ADD": True, "norm_ptr": None, "squares_ptr": None}
    adding = {"types": {"x_ptr": "*bf16"}} | adds
    adding_light = {"types": {"x_ptr": "*bf16", "values_ptr": "*i32", "scales_ptr": "*fp32"}, "ROWS": MOST_ROWS} | adds
    variants = [
        variant(cut(weight, MOST_NORMED_ROWS), **nothing),
        variant(CUT_GATED, GATED=True, squares_ptr=None, **nothing),
        variant(cut(weight, MOST_NORMED_ROWS), **adding, **nothing),
        variant(cut(light, MOST_ROWS), **adding_light),
    ]
    compile_for_a_gpu("specahead.kernels.few_rows_linear", "_few_rows_linear_kernel", types, variants, tmp_path)
