"""Every number of rows and of query heads a KV head that a pass may have: Triton (on a GPU, or interpreted) and torch.

1 to 16 rows, and groups of 1 to 8 query heads a KV head (Qwen2.5 has 7, Llama-3.2-3B and SmolLM2 have 3).
"""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import specahead.engine.model.decoder
from specahead.engine.loading.any_order import with_sums_in_any_order
from specahead.engine.loading.eight_bit import with_eight_bit_weights
from specahead.engine.loading.opening import EightBit, decoders_of
from specahead.engine.model.decoder import Decoder, DecoderLayer
from specahead.kernels.backends import Backend
from specahead.kernels.paged_attention import (
    Batch,
    BlockLists,
    add_listed_weights,
    paged_attention,
    paged_attention_with_block_weights,
    paged_attention_with_read_weights,
)
from specahead.kernels.residual_linear import MOST_NORMED_ROWS
from specahead.kernels.skinny_linear import MAX_ROWS, is_skinny, skinny_linear

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, KV_HEADS, DIM = 16, 1, 16
VOCAB = 20
SCALE = DIM**-0.5
# Each number of rows and each group at least once.
SHAPES = [*((rows, 9 - rows) for rows in range(1, 9)), *((rows, 1) for rows in range(9, 17))]
shapes = pytest.mark.parametrize(("rows", "group"), SHAPES)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def decoder_of(group: int, hidden: int = 16, inner: int = 24) -> Decoder:
    """Return one layer of random float16 weights (the interpreter multiplies no bfloat16), with biases."""
    heads, dtype = KV_HEADS * group, torch.float16

    def weight(outputs: int, inputs: int) -> Tensor:
        return random(outputs, inputs, dtype=dtype) / inputs**0.5

    def norm() -> Tensor:
        return 1 + random(hidden, dtype=dtype) / 4

    layer = DecoderLayer(
        input_norm=norm(),
        qkv=weight((heads + 2 * KV_HEADS) * DIM, hidden),
        qkv_bias=random((heads + 2 * KV_HEADS) * DIM, dtype=dtype),
        out=weight(hidden, heads * DIM),
        mlp_norm=norm(),
        gate_up=weight(2 * inner, hidden),
        down=weight(hidden, inner),
    )
    angles = torch.rand(64, DIM // 2, device=DEVICE) * 6
    return Decoder(
        embedding=random(VOCAB, hidden, dtype=dtype),
        layers=[layer],
        norm=norm(),
        lm_head=weight(VOCAB, hidden),
        cosines=angles.cos(),
        sines=angles.sin(),
        heads=heads,
        kv_heads=KV_HEADS,
        epsilon=1e-5,
        attention_scale=SCALE,
    )


@pytest.mark.parametrize(("rows", "group"), [*SHAPES, (10, 7)])  # the last fills more than a tile of 64
def test_a_pass(rows: int, group: int) -> None:
    """Norms, linear layers, rotation, KV writes, attention and activation of a decoder, one row of them not written."""
    decoder = decoder_of(group)
    for ours, wanted in zip(run(decoder, rows, "triton"), run(decoder, rows, "torch"), strict=True):
        torch.testing.assert_close(ours, wanted, atol=0.06, rtol=0.03)


@pytest.mark.parametrize(
    ("rows", "in_eight_bits"),
    [*((rows, False) for rows in (1, 2, MOST_NORMED_ROWS, MOST_NORMED_ROWS + 1)), (1, True), (40, True)],
)
def test_a_pass_that_adds_sums_in_any_order(rows: int, in_eight_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives what another pass gives, but for rounding; where there are few or many rows it is that pass."""
    plain, used = decoder_of(8, hidden=256, inner=384), Mock(wraps=specahead.engine.model.decoder._run_in_any_order)
    monkeypatch.setattr(specahead.engine.model.decoder, "_run_in_any_order", used)
    plain = with_eight_bit_weights(plain) if in_eight_bits else plain
    ours = run(with_sums_in_any_order(plain), rows, "triton")
    assert used.called == (in_eight_bits or 1 < rows <= MOST_NORMED_ROWS)
    for one, other in zip(ours, run(plain, rows, "torch"), strict=True):
        torch.testing.assert_close(one, other, atol=0.06, rtol=0.03)


def run(decoder: Decoder, rows: int, backend: Backend) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits of tokens behind others, all but one of which are written, and the pages of KV."""
    random_ = torch.Generator(DEVICE).manual_seed(rows)
    k_pages = torch.randn(5, KV_HEADS, PAGE, DIM, generator=random_, device=DEVICE).half()
    v_pages = k_pages.flip(0).clone()
    before = 21  # tokens with KV before the pass
    ids = torch.randint(VOCAB, (rows,), generator=random_, device=DEVICE)
    positions = before + torch.arange(rows, device=DEVICE)
    tables = torch.tensor([[2, 0, 1, 4, 3]], dtype=torch.int32, device=DEVICE)
    slots = tables[0, positions // PAGE].long() * PAGE + positions % PAGE
    slots[rows // 2] = -1
    lengths = torch.tensor([before + rows], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)

    def attend(_: int, queries: Tensor) -> Tensor:
        batch = Batch(queries, k_pages, v_pages, tables, lengths, starts, SCALE, rows)
        return paged_attention(batch, backend=backend)

    logits = decoder.run(ids, positions, slots, [k_pages], [v_pages], attend, backend=backend)
    return logits, k_pages, v_pages


@pytest.mark.parametrize("rows", range(1, 17))
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 24), (8192, 4)])
def test_linear_layers_with_the_tuning_of_their_shape(rows: int, inputs: int, outputs: int) -> None:
    x, weight = random(rows, inputs, dtype=torch.bfloat16), random(outputs, inputs, dtype=torch.bfloat16)
    weight, norm = weight / inputs**0.5, 1 + x[0] / 4
    assert is_skinny(x) == (rows <= MAX_ROWS)
    if not is_skinny(x):
        with pytest.raises(ValueError, match=f"got .{rows}, {inputs}"):
            skinny_linear(x, weight, backend="triton")
        return
    residual = random(rows, outputs, dtype=torch.bfloat16)
    for options in ({}, {"residual": residual}, {"norm": norm}, {"norm": norm, "gated": True}):
        ours, wanted = (skinny_linear(x, weight, backend=name, **options) for name in ("triton", "torch"))  # type: ignore[arg-type]
        torch.testing.assert_close(ours, wanted, atol=0.03, rtol=0.02)


@shapes
def test_attention_that_gives_weights(rows: int, group: int) -> None:
    """Dense with weights of blocks, over lists with weights of what was read, and their addition."""
    heads, blocks = KV_HEADS * group, 4
    queries = random(rows, heads, DIM)
    pool = random(blocks, KV_HEADS, PAGE, DIM), random(blocks, KV_HEADS, PAGE, DIM)
    tables = torch.randperm(blocks, device=DEVICE).int()[None]
    lengths = torch.tensor([blocks * PAGE - 3], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    lists = torch.tensor([[[1, 3, 9]]], dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([[2]], dtype=torch.int32, device=DEVICE)
    listed = BlockLists(lists, counts, PAGE)
    batch = Batch(queries, *pool, tables, lengths, starts, SCALE, rows)

    def run(backend: Backend) -> tuple[Tensor, ...]:
        sums = torch.ones(1, heads, blocks, device=DEVICE)
        dense = paged_attention_with_block_weights(batch, PAGE, 1, backend, width=blocks)
        sparse = paged_attention_with_read_weights(batch, listed, backend=backend)
        added = add_listed_weights(batch, listed, sums, 0.25, backend)
        return *dense, *sparse, added, sums

    for ours, wanted in zip(run("triton"), run("torch"), strict=True):
        torch.testing.assert_close(ours, wanted, atol=3e-5, rtol=1e-4)


def test_only_what_is_proposed_is_added_in_any_order() -> None:
    """A draft's passes on a GPU, and those of few rows in which a target drafts for itself or screens; no others."""
    plain = decoder_of(8, hidden=256, inner=384)

    def in_any_order(eight_bit: EightBit, proposes: bool, on_gpu: bool = True) -> tuple[bool, bool | None]:
        decoder, drafting = decoders_of(plain, eight_bit, proposes, on_gpu)
        assert isinstance(decoder, Decoder)
        assert (decoder.eight_bit_head is not None) == (eight_bit == "all")
        return decoder.in_any_order, None if drafting is None else drafting.in_any_order

    assert in_any_order("none", proposes=True) == in_any_order("all", proposes=True) == (True, None)
    assert in_any_order("none", proposes=False) == (False, None)
    assert in_any_order("drafting", proposes=False) == (False, True)
    assert in_any_order("drafting", proposes=True, on_gpu=False) == (False, False)


def test_layers_that_it_is_not_built_for_add_as_they_did() -> None:
    plain = decoder_of(8, hidden=256, inner=384)
    normed = replace(plain.layers[0], attention_out_norm=plain.norm)
    for layer in (normed, replace(plain.layers[0], out_bias=plain.norm), replace(plain.layers[0], input_norm=None)):
        decoder = replace(plain, layers=[layer])
        assert with_sums_in_any_order(decoder) is decoder
    assert not with_sums_in_any_order(decoder_of(1)).in_any_order  # 16 inputs
