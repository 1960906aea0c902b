"""Weights with a scale for each group of inputs: how they are held, and linear layers over them, Triton and torch."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specahead.kernels.linear import GROUPS, MOST_ROWS, GroupedWeight, LinearWeight, group_weight, linear, split_words
from specahead.kernels.linear.few_rows import Tuning, few_rows_linear, grouped_tuning
from specahead.kernels.linear.many_rows import in_sixteen_bits, many_rows_linear
from specahead.kernels.linear.unpacking import UNPACK_FOUR_BITS

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's dot multiplies no bfloat16
BITS = pytest.mark.parametrize("bits", [4, 8])


def made(bits: int, outputs: int, inputs: int, group: int, seed: int = 0) -> tuple[GroupedWeight, Tensor]:
    """A weight, and the numbers that it stands for in float32."""
    how = torch.Generator().manual_seed(seed)
    values, zeros = torch.randn(outputs, inputs, generator=how).to(torch.float8_e4m3fn), None
    if bits == 4:
        values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=how)
        zeros = torch.randint(0, 17, (outputs, inputs // group), dtype=torch.uint8, generator=how)  # GPTQ: up to 16
    scales = (torch.rand(outputs, inputs // group, generator=how) + 0.5) / inputs**0.5 / (1 if bits == 8 else 8)
    scales = scales.to(torch.float32 if bits == 8 else torch.float16)
    plain = values.float() - (0 if zeros is None else zeros.float().repeat_interleave(group, 1))
    plain *= scales.float().repeat_interleave(group, 1)
    on_device = [None if each is None else each.to(DEVICE) for each in (values, scales, zeros)]
    return group_weight(*on_device, DTYPE), plain.to(DEVICE)


def inputs_of(rows: int, inputs: int) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(7)).to(DEVICE, DTYPE)


def check(out: Tensor, wanted: Tensor, bits: int = 8) -> None:
    torch.testing.assert_close(out.double(), wanted.double(), rtol=2**-bits, atol=2**-bits)


@given(
    st.sampled_from([4, 8]), st.integers(1, 40), st.integers(1, 5), st.sampled_from([*GROUPS, 0]), st.integers(0, 99)
)
def test_numbers_come_back_as_they_were(bits: int, outputs: int, blocks: int, group: int, seed: int) -> None:
    weight, plain = made(bits, outputs, 128 * blocks, group or 128 * blocks, seed)
    assert torch.equal(weight.in_order(), plain)
    assert torch.equal(in_sixteen_bits(weight), plain.to(DTYPE))
    assert weight.words.nbytes * 8 == plain.numel() * bits
    assert torch.equal(weight[outputs // 2 :].in_order(), plain[outputs // 2 :])


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9))
def test_integers_of_a_word_come_from_its_lowest_bits_on(words: list[int]) -> None:
    got = split_words(torch.tensor([words], dtype=torch.int32))
    assert got.tolist() == [[word >> 4 * place & 15 for word in words for place in range(8)]]


def in_ptx(asm: str, words: tuple[int, int], addend: float) -> list[float]:
    """What a GPU makes of two words by these instructions, as PTX's manual has them: two float16 numbers."""
    permuted, masked = re.search(r"prmt\.b32 two, \$1, \$2, (\d+);.*two, (0x\w+), 0x64006400, 0xea", asm).groups()
    octets = b"".join(word.to_bytes(4, "little") for word in words)
    two = int.from_bytes(bytes(octets[int(permuted) >> 4 * place & 7] for place in range(4)), "little")
    bits = two & int(masked, 16) | 0x64006400  # 0xea: of three numbers, the first and the second, or the third
    halves = np.array([bits & 0xFFFF, bits >> 16], np.uint16).view(np.float16)
    by = np.array([0x2C00], np.uint16).view(np.float16) if "fma.rn.f16x2 $0, two, by, $3" in asm else np.float16(1)
    assert ("mov.b32 by, 0x2c002c00" in asm) == ("fma" in asm) != ("add.f16x2 $0, two, $3" in asm)
    return list(map(float, halves * by + np.float16(addend)))


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 16), st.integers(0, 7))
def test_instructions_of_a_gpu_take_numbers_from_words(first: int, second: int, zero: int, number: int) -> None:
    got = in_ptx(UNPACK_FOUR_BITS.value[number], (first, second), -zero - (64 if number % 2 else 1024))
    assert got == [(word >> 4 * number & 15) - zero for word in (first, second)]


SHAPES = [(1, 40, 128, 128), (7, 33, 512, 128), (16, 70, 384, 64), (17, 16, 256, 32), (MOST_ROWS, 24, 640, 640)]


@BITS
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "group"), SHAPES)
def test_few_rows(rows: int, outputs: int, inputs: int, group: int, gated: bool, bits: int) -> None:
    """Against float64 over the numbers that the weight stands for."""
    weight, plain = made(bits, outputs * (2 if gated else 1), inputs, group)
    bias = None if gated else torch.linspace(-3, 3, outputs, device=DEVICE, dtype=DTYPE)
    x = inputs_of(rows, inputs)
    wanted = F.linear(x.double(), plain.double(), None if bias is None else bias.double())
    if gated:
        gates, ups = wanted.chunk(2, 1)
        wanted = F.silu(gates) * ups
    for backend in ("triton", "torch"):
        check(linear(x, LinearWeight(weight, bias), backend, gated), wanted)


@BITS
@pytest.mark.parametrize("parts", [2, 5])
def test_parts_of_inputs_add_up(bits: int, parts: int) -> None:
    weight, plain = made(bits, 33, 640 if parts == 5 else 1024, 64 if parts == 5 else 1024)
    x, bias = inputs_of(3, weight.inputs), torch.ones(33, device=DEVICE, dtype=DTYPE)
    cut = Tuning(16, weight.span, 4, 2, parts)
    out = few_rows_linear(x, weight, bias, in_parts=True, backend="triton", tuning=cut)
    assert out.shape == (parts, 3, 33)
    check(out.sum(0), F.linear(x.double(), plain.double(), bias.double()), 9)


@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (896, 4864), (4096, 18944), (1024, 1152)])
def test_parts_are_whole_spans(outputs: int, inputs: int) -> None:
    for span in (128, 256):
        if inputs % span == 0:
            parts = grouped_tuning(8, outputs, inputs, False, True, span).parts
            assert inputs % (parts * span) == 0 and (parts > 1) == (outputs // 64 < 96)


@BITS
@pytest.mark.parametrize("rows", [MOST_ROWS + 6, 4 * MOST_ROWS, 4 * MOST_ROWS + 1])
def test_many_rows(bits: int, rows: int) -> None:
    """By slices of few rows, or over the weight in 16 bits."""
    weight, plain = made(bits, 36, 256, 128)
    x = inputs_of(rows, 256)
    for backend in ("triton", "torch"):
        out = many_rows_linear(x, weight, None, backend)
        assert out.dtype == DTYPE
        check(out, F.linear(x.double(), plain.double()), 7)


@BITS
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(70, 384, 64), (40, 512, 32), (1, 128, 128), (64, 640, 640)])
def test_a_weight_in_16_bits(bits: int, outputs: int, inputs: int, group: int) -> None:
    weight, plain = made(bits, outputs, inputs, group)
    assert torch.equal(in_sixteen_bits(weight, "triton"), plain.to(DTYPE))


def test_it_has_no_second_copy() -> None:
    weight = LinearWeight(made(4, 16, 128, 128)[0])
    assert weight.with_eight_bit() is weight and weight.dtype == DTYPE and weight.outputs == 16


@pytest.mark.parametrize(("inputs", "groups"), [(192, 3), (256, 16), (384, 2), (512, 2)])
def test_other_groups_are_refused(inputs: int, groups: int) -> None:
    values = torch.zeros(8, inputs, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"{inputs} inputs in {groups} groups: expected a multiple of 128"):
        group_weight(values, torch.ones(8, groups), torch.zeros(8, groups, dtype=torch.uint8), DTYPE)
