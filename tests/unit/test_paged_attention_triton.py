"""The Triton attention kernels against the torch references, and these against float64: on a GPU, or interpreted."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specahead.kernels.kv_scales import KVScales
from specahead.kernels.paged_attention import (
    Batch,
    BlockLists,
    GroupMeans,
    Tuning,
    paged_attention,
    paged_attention_remembering,
    paged_attention_with_read_weights,
    pinned_tuning,
    plan_work,
    pool_blocks,
)
from specahead.kernels.paged_attention.inputs import MOST_BEYOND
from specahead.kernels.paged_attention.launch import columns_for
from tests.unit.test_paged_attention import (
    SCALE,
    Case,
    both_widths,
    every_block,
    group_means,
    in_blocks,
    in_eight_bits,
    reference_by_token,
    shuffled_case,
    weigh,
)

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ragged(seed: int, group: int, counts: list[int], longest: int = 150, dim: int = 16) -> Case:
    """Sequences of 1 … `longest` tokens, one of them of one token; these many queries each, or all tokens if fewer."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    lengths = [1, *rng.integers(1, longest + 1, len(counts) - 1).tolist()]
    counts = [min(length, count) for length, count in zip(lengths, counts, strict=True)]
    return shuffled_case(rng, lengths, counts, 16, 2, dim, group)


def on_device(value: Any) -> Any:
    """Tensors, and dataclasses of them, to DEVICE."""
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, tuple):
        return tuple(on_device(item) for item in value)
    if isinstance(value, Batch | BlockLists | GroupMeans | KVScales):
        return type(value)(*(on_device(getattr(value, field.name)) for field in fields(value)))
    return value


def in_triton(case: Case, *rest: Any, kernel: Any = paged_attention, **keywords: Any) -> Any:
    result = kernel(*on_device((case.batch, *rest)), backend="triton", **keywords)
    return tuple(item.cpu() for item in result) if isinstance(result, tuple) else result.cpu()


CASES = [(0, 1, [1, 1, 1]), (1, 4, [5, 5, 3, 1]), (2, 2, [37, 5, 1]), (3, 3, [2, 7])]
cases = pytest.mark.parametrize(("seed", "group", "counts"), CASES)


@cases
@both_widths
def test_dense(seed: int, group: int, counts: list[int], eight_bit: bool) -> None:
    case = in_eight_bits(ragged(seed, group, counts), eight_bit)
    wanted, _ = reference_by_token(every_block(case, 16), 16)
    torch.testing.assert_close(in_triton(case), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("seed", "group", "counts", "block_size"),
    [(*CASES[i], size) for i, size in ((0, 64), (1, 1), (1, 32), (2, 16), (3, 64))],
)
@both_widths
def test_lists_and_their_weights(seed: int, group: int, counts: list[int], block_size: int, eight_bit: bool) -> None:
    case = in_eight_bits(in_blocks(ragged(seed, group, counts), block_size, seed), eight_bit)
    blocks = case.packed_lists(block_size)
    wanted, wanted_weights = paged_attention_with_read_weights(case.batch, blocks)
    torch.testing.assert_close(in_triton(case, blocks), wanted, atol=2e-5, rtol=1e-4)
    got, weights = in_triton(case, blocks, kernel=paged_attention_with_read_weights)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(weights, wanted_weights, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_behind_the_tokens_are_not_seen(seed: int) -> None:
    """As lists have them that are made once for several passes: all behind the tokens, or every other one."""
    rng = np.random.default_rng(seed)
    case = ragged(seed, 2, [5, 3, 1, 5])
    room = torch.zeros(len(case.kv_lengths), MOST_BEYOND // 16, dtype=torch.int32)
    case = replace(case, block_tables=torch.cat([case.block_tables, room], 1))
    wanted = paged_attention(case.batch, case.packed_lists())
    k, v = (torch.full_like(pages, torch.nan) for pages in (case.k_pages, case.v_pages))  # it may be anything
    for i, length in enumerate(case.kv_lengths):
        at = torch.arange(length)
        page = case.block_tables[i, at // 16].long()
        k[page, :, at % 16], v[page, :, at % 16] = case.k_pages[page, :, at % 16], case.v_pages[page, :, at % 16]
    case = replace(case, k_pages=k, v_pages=v)
    lists = [
        [
            [*own, *range(-(-length // 16), -(-length // 16) + MOST_BEYOND // 16 - 1, int(rng.integers(1, 3)))]
            for own in of_heads
        ]
        for of_heads, length in zip(case.lists, case.kv_lengths, strict=True)
    ]
    got = in_triton(case, replace(case, lists=lists).packed_lists())
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("group", "group_size", "block_size"), [(4, 64, 16), (1, 64, 64), (4, 128, 32)])
@both_widths
def test_group_means(group: int, group_size: int, block_size: int, eight_bit: bool) -> None:
    rng = np.random.default_rng(group_size)
    torch.manual_seed(group_size)
    case = shuffled_case(rng, [290, 133, 30, 3], [5, 5, 1, 3], 16, 2, 16, group)
    case = in_eight_bits(in_blocks(replace(case, queries=2 * case.queries), block_size, 1), eight_bit)
    blocks, means = case.packed_lists(block_size), group_means(case, group_size)
    wanted, wanted_weights = paged_attention_with_read_weights(case.batch, blocks, means)
    got, weights = in_triton(case, blocks, means, kernel=paged_attention_with_read_weights)
    torch.testing.assert_close(got, wanted, atol=3e-5, rtol=1e-4)
    torch.testing.assert_close(weights, wanted_weights, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("group", "emitting", "block_size", "eight_bit"),
    [
        *((*of_16_bits, False) for of_16_bits in ((1, 1, 1), (4, 1, 64), (4, 1, 128), (2, 5, 1), (2, 5, 16))),
        *((1, 1, block_size, True) for block_size in (16, 64)),  # of few rows, whose tiles have 32 tokens
    ],
)
def test_the_last_queries_give_their_weights(group: int, emitting: int, block_size: int, eight_bit: bool) -> None:
    rng = np.random.default_rng(emitting)
    torch.manual_seed(emitting)
    shuffled = shuffled_case(rng, [emitting, 130, 64], [emitting, emitting + 2, 7], 16, 2, 16, group)
    case = in_eight_bits(shuffled, eight_bit)
    width = -(-9 * 16 // block_size)
    wanted_weights = torch.rand(3, 2 * group, width)
    weights = wanted_weights.to(DEVICE)
    wanted = weigh(case.batch, wanted_weights, None, emitting, block_size)
    got = weigh(on_device(case.batch), weights, None, emitting, block_size, "triton")
    torch.testing.assert_close(got.cpu(), wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(weights.cpu(), wanted_weights, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("group", "counts", "block_size"), [(1, [1, 1, 1], 1), (4, [9, 9, 9], 16), (3, [37, 5, 0], 64)]
)
def test_a_dense_pass_remembers(group: int, counts: list[int], block_size: int) -> None:
    """The memory is a slice of a larger one; queries fill several tiles, and a place of the batch is empty."""
    rng = np.random.default_rng(group)
    torch.manual_seed(group)
    case = shuffled_case(rng, [counts[0], 130, 64 if counts[2] else 0], counts, 16, 2, 16, group)
    places = torch.tensor([3, 1, 0 if counts[2] else -1], dtype=torch.int32)
    before = torch.rand(4, 6, 192 // block_size)
    wanted_memory, memory = before.clone(), on_device(before.clone())
    sliced = slice(2, 4), slice(9 * 16 // block_size + 1)
    wanted = paged_attention_remembering(case.batch, block_size, wanted_memory[:, *sliced], places, 0.8)
    batch, places = on_device((case.batch, places))
    got = paged_attention_remembering(batch, block_size, memory[:, *sliced], places, 0.8, "triton")
    torch.testing.assert_close(got.cpu(), wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(memory.cpu(), wanted_memory, atol=2e-5, rtol=1e-4)
    assert torch.equal(memory.cpu()[2], before[2])


@pytest.mark.parametrize(
    ("group", "counts", "page_size", "tile", "apart"),
    [
        (1, [3, 1], 64, 16, 1),  # 8 columns; pages of several tiles
        (7, [3, 1], 4, 32, 3),  # 16 and 8 columns
        (9, [4, 2], 16, 64, 2),  # 32 and 8
        (25, [2, 1], 16, 16, 2),  # 64
    ],
)
def test_queries_in_columns(group: int, counts: list[int], page_size: int, tile: int, apart: int) -> None:
    """In cuts that are not the default. One head reads nothing but means, another one everything."""
    rng = np.random.default_rng(group)
    torch.manual_seed(group)
    case = in_eight_bits(shuffled_case(rng, [140, 5], counts, page_size, 2, 16, group))
    every = every_block(case, page_size).lists
    case = replace(case, lists=[[[], every[0][1]], [every[1][0], []]])
    tuning = Tuning(tile=tile, columns=True, apart=apart)
    blocks, means = case.packed_lists(), group_means(case, page_size)
    moved, lists, stand_ins = on_device((case.batch, blocks, means))
    how = 2, group, 16, max(counts), moved.block_tables, moved.kv_lengths, page_size
    got = in_triton(case, work=plan_work(*how, tuning=tuning))
    torch.testing.assert_close(got, paged_attention(case.batch), atol=3e-5, rtol=1e-4)
    wanted, wanted_weights = paged_attention_with_read_weights(case.batch, blocks, means)
    work = plan_work(*how, lists, stand_ins, tuning)
    got, weights = in_triton(case, blocks, means, kernel=paged_attention_with_read_weights, work=work)
    torch.testing.assert_close(got, wanted, atol=3e-5, rtol=1e-4)
    torch.testing.assert_close(weights, wanted_weights, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, (8, 0)), (9, (16, 0)), (20, (16, 8)), (25, (32, 0)), (36, (32, 8)), (48, (32, 16)), (50, (64, 0))],
)
def test_rows_take_the_fewest_columns(rows: int, columns: tuple[int, int]) -> None:
    assert columns_for(rows) == columns


@pytest.mark.parametrize(
    ("dim", "queries", "block_size"), [(16, 5, 0), (32, 4, 0), (128, 1, 0), (64, 5, 8), (64, 5, 16), (128, 5, 32)]
)
def test_bfloat16_queries_of_8_bit_keys(dim: int, queries: int, block_size: int) -> None:
    """The interpreter cuts numbers off to bfloat16, by 2^-7 at most."""
    case = in_eight_bits(ragged(11, 4, [queries, queries, 1, queries], dim=dim))
    case = replace(case, queries=case.queries.bfloat16())
    if not block_size:
        wanted, _ = reference_by_token(every_block(case, 16), 16)
        torch.testing.assert_close(in_triton(case).float(), wanted, atol=4e-3, rtol=2**-7)
        return
    case = in_blocks(case, block_size, 11)
    exact, blocks = replace(case, queries=case.queries.float()), case.packed_lists(block_size)
    wanted, wanted_weights = paged_attention_with_read_weights(exact.batch, blocks)
    got, weights = in_triton(case, blocks, kernel=paged_attention_with_read_weights)
    torch.testing.assert_close(got.float(), wanted, atol=4e-3, rtol=2**-7)
    torch.testing.assert_close(weights, wanted_weights, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@both_widths
def test_half_precision_on_a_gpu_against_float64(dtype: torch.dtype, dim: int, eight_bit: bool) -> None:
    if DEVICE != "cuda":
        pytest.skip("needs a GPU")
    case = ragged(11, 4, [5, 5, 1, 5], longest=900, dim=dim)
    case = replace(
        case, queries=case.queries.to(dtype) * 0.3, k_pages=case.k_pages.to(dtype), v_pages=case.v_pages.to(dtype)
    )
    case = in_eight_bits(case, eight_bit)
    chosen = in_blocks(case, 16, 2)
    for each, blocks in ((every_block(case, 16), None), (chosen, chosen.packed_lists(16))):
        wanted, _ = reference_by_token(each, 16)
        got = in_triton(each, *([] if blocks is None else [blocks]))
        torch.testing.assert_close(got.float(), wanted.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("group", "counts"), [(1, [1, 1, 1]), (4, [5, 1, 2])])
def test_weights_of_listed_blocks_are_added(group: int, counts: list[int], block_size: int) -> None:
    case = in_blocks(ragged(13, group, counts), block_size, 3)
    blocks, n = case.packed_lists(block_size), 12
    heads = case.queries.shape[1]
    before = torch.rand(len(counts), 2, heads, n)[:, 1]  # a slice, as of one layer of several
    wanted = before.clone()
    out = weigh(case.batch, wanted, blocks)
    torch.testing.assert_close(out, paged_attention(case.batch, blocks))
    _, probs = reference_by_token(case, block_size)
    for i, by_token in enumerate(probs):
        pooled = pool_blocks(torch.from_numpy(by_token[-1]), block_size)
        expected = before[i].clone()
        expected[:, : pooled.shape[-1]] += 0.25 * pooled.float()
        torch.testing.assert_close(wanted[i], expected, atol=2e-5, rtol=1e-4)
    whole = torch.zeros(len(counts), 2, heads, n).to(DEVICE)
    sums = whole[:, 1]
    sums.copy_(before)
    got = weigh(on_device(case.batch), sums, on_device(blocks), backend="triton")
    torch.testing.assert_close(got.cpu(), out, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(sums.cpu(), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("sparse", "eight_bit"), [(False, False), (True, False), (False, True)])
def test_pinned_splits_give_the_same_bits_in_any_batch(sparse: bool, eight_bit: bool) -> None:
    """Each sequence alone and among others, of tiles and segments so small that all are split."""
    case = in_eight_bits(ragged(5, 2, [5, 5, 5, 5], longest=220), eight_bit)
    tuning = replace(pinned_tuning(16, 2, 5, eight_bit), tile=16, segment=2)
    blocks = in_blocks(case, 16, 5).packed_lists(16) if sparse else None
    starts = case.arguments[5]

    def run(chosen: list[int]) -> list[Tensor]:
        q, k, v, tables, lengths, _ = case.arguments
        rows = [slice(int(starts[i]), int(starts[i + 1])) for i in chosen]
        counts = torch.tensor([0, *(row.stop - row.start for row in rows)]).cumsum(0).int()
        lists = None if blocks is None else BlockLists(blocks.lists[chosen], blocks.counts[chosen], 16)
        moved = on_device((torch.cat([q[row] for row in rows]), k, v, tables[chosen], lengths[chosen], counts))
        lists = on_device(lists)
        heads = k.shape[1], q.shape[1] // k.shape[1], q.shape[2], 5
        work = plan_work(*heads, moved[3], moved[4], 16, lists, tuning=tuning)
        batch = Batch(*moved, SCALE, 5, scales=on_device(case.scales))
        out = paged_attention(batch, lists, backend="triton", work=work).cpu()
        return list(out.split([row.stop - row.start for row in rows]))

    together = run([0, 1, 2, 3])
    expected = paged_attention(case.batch, blocks)
    torch.testing.assert_close(torch.cat(together), expected, atol=2e-5, rtol=1e-4)
    for order in ([3], [2, 0], [1, 3, 2]):
        for i, out in zip(order, run(order), strict=True):
            assert torch.equal(out, together[i])
