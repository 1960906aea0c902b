"""Norms and rotation of queries and keys, and their write: Triton against torch, and torch against formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specahead.kernels import rotary
from specahead.kernels.kv_scales import KVScales, keys_to_pages, values_by_token, values_to_pages
from specahead.kernels.rotary import rotate_and_write_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, DIM, PAGE = 5, 32, 4


def given(heads: int, kv_heads: int, turned: int, dtype: torch.dtype, normed: bool) -> tuple[Any, ...]:
    """Arguments but the pages; one token is not written."""
    random = torch.Generator().manual_seed(heads + turned)
    qkv = torch.randn(TOKENS, (heads + 2 * kv_heads) * DIM, generator=random)
    angles = 6 * torch.rand(9, turned // 2, generator=random)
    positions = torch.tensor([3, 0, 8, 8, 1])
    slots = torch.tensor([7, 2, -1, 0, 5])
    norms = 1 + 0.3 * torch.randn(2, DIM, generator=random)
    tensors = qkv.to(dtype), angles.cos(), angles.sin(), positions, slots
    return *(tensor.to(DEVICE) for tensor in tensors), norms.to(DEVICE, dtype) if normed else None


def run(
    arguments: tuple[Any, ...],
    heads: int,
    kv_heads: int,
    backend: str,
    scales: KVScales | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    qkv, *others, norms = arguments
    shape, held = (2, kv_heads, PAGE, DIM), qkv.dtype if scales is None else torch.float8_e4m3fn
    keys, values = (torch.zeros(shape, dtype=held, device=DEVICE) for _ in range(2))
    how = backend, norms, 1e-5, scales, dtype
    values = values_by_token(values).contiguous()  # as they lie in pages
    return rotate_and_write_kv(qkv, *others, keys, values, heads, *how), keys, values_by_token(values)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "turned"), [(2, 2, 32), (3, 1, 24), (7, 1, 0)])
def test_triton_gives_what_torch_gives(
    heads: int,
    kv_heads: int,
    turned: int,
    dtype: torch.dtype,
    normed: bool,
    many: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(rotary, "MANY_TOKENS", TOKENS if many else TOKENS + 1)
    arguments = given(heads, kv_heads, turned, dtype, normed)
    # The interpreter rounds to bfloat16 otherwise, and a GPU fuses float32 into multiply-adds.
    exact = DEVICE == "cuda" and dtype == torch.bfloat16 and not normed
    precision = 0.0 if exact else torch.finfo(dtype).eps
    for one, other in zip(
        run(arguments, heads, kv_heads, "triton"), run(arguments, heads, kv_heads, "torch"), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2 * precision, atol=4 * precision)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(2, 2, torch.float32), (7, 1, torch.bfloat16)])
def test_pages_in_8_bits_hold_what_others_do_but_rounded(
    heads: int, kv_heads: int, dtype: torch.dtype, backend: str
) -> None:
    """By scales and centers of each head, with numbers beyond the largest, in parts or whole."""
    qkv, *others = given(heads, kv_heads, 24, dtype, normed=False)
    arguments = qkv * 3, *others
    scales = torch.exp2(-torch.arange(2.0 * kv_heads).view(2, kv_heads) - 6).to(DEVICE)  # 448 / 2^7 is 3.5
    of = KVScales(scales, torch.randn(2, kv_heads, DIM, generator=torch.Generator().manual_seed(0)).to(DEVICE))
    parts = torch.stack((arguments[0].float(), torch.zeros_like(qkv, dtype=torch.float32))), *others
    queries, *pages = run(arguments, heads, kv_heads, "torch")
    wanted = [
        to_pages(each.transpose(1, 2), of).transpose(1, 2).float()
        for to_pages, each in zip((keys_to_pages, values_to_pages), pages, strict=True)
    ]
    assert pages[1].float().abs().max() > 448 * scales[1].max()
    for given_qkv in (arguments, parts):
        got, *rounded = run(given_qkv, heads, kv_heads, backend, of, dtype)
        precision = torch.finfo(dtype).eps  # the interpreter rounds to bfloat16 otherwise
        torch.testing.assert_close(got, queries, rtol=4 * precision, atol=16 * precision)
        for eight_bit, each in zip(rounded, wanted, strict=True):
            written = eight_bit.float() != 0
            assert written.sum() > (TOKENS - 1) * kv_heads * DIM * 0.9
            torch.testing.assert_close(eight_bit.float()[written], each[written], rtol=2**-3, atol=2048 * precision)
            if dtype == torch.float32:
                assert (eight_bit.float() != each)[written].sum() <= 2  # keys that rounding of a product moved


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_parts_are_added_up(backend: str) -> None:
    qkv, *others, norms = given(3, 1, 24, torch.float32, normed=True)
    wanted = run((qkv, *others, norms), 3, 1, "torch")
    got = run((torch.stack((qkv * 0.75, qkv * 0.25)), *others, norms), 3, 1, backend)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("turned", [32, 24, 0])
def test_torch_gives_what_the_formulas_say(turned: int) -> None:
    """x turned by an angle is x * e^(i * angle), of pairs of dimensions as complex numbers."""
    heads, kv_heads, half = 3, 1, turned // 2
    arguments = given(heads, kv_heads, turned, torch.float32, normed=True)
    qkv, cosines, sines, positions, slots, norms = (tensor.cpu() for tensor in arguments)
    x = qkv.view(TOKENS, heads + 2 * kv_heads, DIM).clone()
    for head in range(heads + kv_heads):
        rows = x[:, head]
        rows = norms[int(head >= heads)] * rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        pairs = torch.complex(rows[:, :half], rows[:, half:turned])
        pairs = pairs * torch.complex(cosines[positions], sines[positions])
        x[:, head] = torch.cat([pairs.real, pairs.imag, rows[:, turned:]], 1)
    queries, keys, values = (out.cpu() for out in run(arguments, heads, kv_heads, "torch"))
    torch.testing.assert_close(queries, x[:, :heads])
    for pages, wanted in ((keys, x[:, heads : heads + kv_heads]), (values, x[:, heads + kv_heads :])):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                torch.testing.assert_close(pages[slot // PAGE, :, slot % PAGE], wanted[token])
        assert pages.count_nonzero() == (TOKENS - 1) * kv_heads * DIM
