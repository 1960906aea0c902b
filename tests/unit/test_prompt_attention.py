"""Prompts in pieces, merged, against plain paged attention; by cuDNN where there is a GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.prompt_attention import (
    PIECE,
    UNIT,
    attend_to_prompts,
    cudnn_attends,
    make_room,
    pieces_before,
    plan_prompts,
    size_of_own,
)
from tests.unit.test_paged_attention import SCALE, Case, shuffled_case

PAGE, KV_HEADS = 16, 2
BATCHES = {
    "from the start": ([1300], [1300]),
    "behind whole units": ([1024 + 700], [700]),
    "behind a part of a unit": ([1100, 600], [37, 513]),
    "an empty place, one without queries": ([0, 530, 64], [0, 18, 0]),
    "longer pieces": ([4096 + 2048 + 512 + 5], [5]),
}


def ragged(lengths: list[int], counts: list[int], group: int, dim: int) -> Case:
    torch.manual_seed(len(lengths) + group)
    return shuffled_case(np.random.default_rng(group), lengths, counts, PAGE, KV_HEADS, dim, group)


def attend(case: Case, cudnn: bool) -> torch.Tensor:
    queries, k_pages, v_pages, tables, lengths, starts = case.arguments
    room = make_room(int(lengths.max()), KV_HEADS, queries.shape[2], queries.dtype, queries.device)
    reads = plan_prompts(starts.tolist(), lengths.tolist(), tables, KV_HEADS, PAGE, room, cudnn)
    return attend_to_prompts(reads, queries, k_pages, v_pages, SCALE)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("group", [1, 4])
def test_pieces_give_what_the_reference_gives(batch: str, group: int) -> None:
    case = ragged(*BATCHES[batch], group, dim=16)
    torch.testing.assert_close(attend(case, cudnn=False), case.dense(), atol=1e-5, rtol=1e-4)


def test_rows_behind_the_last_sequence_are_zeros() -> None:
    case = ragged([300], [20], 2, dim=16)
    filled = replace(case, queries=torch.cat([case.queries, case.queries[:3]]))
    out = attend(filled, cudnn=False)
    assert (out[20:] == 0).all()
    torch.testing.assert_close(out[:20], case.dense(), atol=1e-5, rtol=1e-4)


@given(st.integers(0, 5000).map(lambda n: n * UNIT))
def test_pieces_cover_what_is_before_and_have_few_sizes(length: int) -> None:
    end, sizes = 0, set()
    for start, stop in pieces_before(length):
        assert start == end and UNIT <= stop - start <= PIECE
        end = stop
        sizes.add(stop - start)
    assert end == length
    assert all(size % 4096 == 0 or size in (512, 1024, 2048) for size in sizes)


@given(st.integers(1, 100_000))
def test_an_own_piece_holds_its_tokens_and_little_more(tokens: int) -> None:
    size = size_of_own(tokens)
    assert size >= tokens and size % UNIT == 0
    assert size <= max(2 * UNIT, tokens * 3 // 2 + UNIT)


def test_a_cpu_has_no_cudnn() -> None:
    assert not cudnn_attends(128, torch.bfloat16, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("batch", BATCHES)
def test_cudnn_gives_what_the_reference_gives(batch: str, dim: int) -> None:
    assert cudnn_attends(dim, torch.bfloat16, torch.device("cuda"))
    case = ragged(*BATCHES[batch], 4, dim)
    names = "queries", "k_pages", "v_pages"
    there = replace(
        case,
        **{name: getattr(case, name).to("cuda", torch.bfloat16) for name in names},
        block_tables=case.block_tables.cuda(),
    )
    rounded = replace(case, **{name: getattr(case, name).bfloat16().float() for name in names})
    torch.testing.assert_close(attend(there, cudnn=True).float().cpu(), rounded.dense(), atol=2e-2, rtol=2e-2)
