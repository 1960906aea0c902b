"""Every number of rows and of query heads a KV head that a pass may have: Triton (on a GPU, or interpreted) and torch.

1 to 16 rows, and groups of 1 to 8 query heads a KV head (Qwen2.5 has 7, Llama-3.2-3B and SmolLM2 have 3).
"""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.model.decoder import Decoder, DecoderLayer, PassTokens
from specahead.kernels.backends import Backend
from specahead.kernels.linear import LinearWeight
from specahead.kernels.paged_attention import Batch, BlockLists, paged_attention, paged_attention_with_read_weights
from tests.unit.test_paged_attention import weigh

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


def decoder_of(group: int, hidden: int, inner: int) -> Decoder:
    """Return one layer of random float16 weights (the interpreter multiplies no bfloat16), with biases."""
    heads, dtype = KV_HEADS * group, torch.float16

    def weight(outputs: int, inputs: int, biased: bool = False) -> LinearWeight:
        bias = random(outputs, dtype=dtype) if biased else None
        return LinearWeight(random(outputs, inputs, dtype=dtype) / inputs**0.5, bias)

    def norm() -> Tensor:
        return 1 + random(hidden, dtype=dtype) / 4

    layer = DecoderLayer(
        input_norm=norm(),
        qkv=weight((heads + 2 * KV_HEADS) * DIM, hidden, biased=True),
        out=weight(hidden, heads * DIM),
        mlp_norm=norm(),
        gate_up=weight(2 * inner, hidden),
        down=weight(hidden, inner),
    )
    angles = torch.rand(96, DIM // 2, device=DEVICE) * 6
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
    """Norms, linear layers, rotation, KV writes, attention and activation of a decoder, one row of them not written.

    From three rows on torch multiplies, since the inputs are no multiple of 128.
    """
    check_pass(decoder_of(group, hidden=16, inner=24), rows)


@pytest.mark.parametrize(("rows", "in_eight_bits"), [(1, False), (2, False), (1, True), (8, True), (17, False)])
def test_a_pass_whose_linear_layers_are_kernels(rows: int, in_eight_bits: bool) -> None:
    decoder = decoder_of(8, hidden=128, inner=256)
    check_pass(decoder.with_eight_bit_weights() if in_eight_bits else decoder, rows)


def check_pass(decoder: Decoder, rows: int) -> None:
    for ours, wanted in zip(run(decoder, rows, "triton"), run(decoder, rows, "torch"), strict=True):
        torch.testing.assert_close(ours, wanted, atol=0.06, rtol=0.03)


def run(decoder: Decoder, rows: int, backend: Backend) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits of tokens behind others, all but one of which are written, and the pages of KV."""
    random_ = torch.Generator(DEVICE).manual_seed(rows)
    kv = KVCache(1, KV_HEADS, DIM, 6, torch.float16, DEVICE)
    (k_pages,), (v_pages,) = kv.k_pages, kv.v_pages
    k_pages.copy_(torch.randn(k_pages.shape, generator=random_, device=DEVICE))
    v_pages.copy_(k_pages.flip(0))
    before = 21  # tokens with KV before the pass
    ids = torch.randint(VOCAB, (rows,), generator=random_, device=DEVICE)
    positions = before + torch.arange(rows, device=DEVICE)
    tables = torch.tensor([[2, 0, 1, 4, 3, 5]], dtype=torch.int32, device=DEVICE)
    slots = tables[0, positions // PAGE].long() * PAGE + positions % PAGE
    slots[rows // 2] = -1
    lengths = torch.tensor([before + rows], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)

    def attend(_: int, queries: Tensor) -> Tensor:
        batch = Batch(queries, k_pages, v_pages, tables, lengths, starts, SCALE, rows)
        return paged_attention(batch, backend=backend)

    with patch("specahead.engine.model.decoder.default_backend", return_value=backend):
        logits = decoder.run(PassTokens(ids, positions, slots), kv, attend)
    return logits, k_pages, v_pages


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
        of_all, of_listed = torch.ones(2, 1, heads, blocks, device=DEVICE)
        dense = weigh(batch, of_all, block_size=PAGE, backend=backend)
        sparse = paged_attention_with_read_weights(batch, listed, backend=backend)
        return dense, of_all, *sparse, weigh(batch, of_listed, listed, backend=backend), of_listed

    for ours, wanted in zip(run("triton"), run("torch"), strict=True):
        torch.testing.assert_close(ours, wanted, atol=3e-5, rtol=1e-4)
