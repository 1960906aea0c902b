"""Units of prompts over chosen blocks against a masked float64 attention; by cuDNN where there is a GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specahead.kernels.prompt_attention import PIECE, UNIT, attend_to_prompts, cudnn_attends, make_room, plan_prompts
from specahead.kernels.sparse_prompt_attention import (
    BLOCK,
    WINDOW,
    SparsePart,
    SparsePromptReads,
    attend_sparsely,
    blocks_read,
    choose_blocks,
    plan_sparse_prompts,
)
from tests.unit.test_paged_attention import SCALE, Case, densified, shuffled_case

PAGE, KV_HEADS = 16, 2
BATCHES = {
    "one unit": ([1536], [512]),
    "several units": ([3000], [1900]),
    "behind a part of a unit": ([1300, 2100], [37, 513]),
    "a dense one between, one without queries": ([1600, 0, 530, 64], [70, 0, 18, 0]),
}


def ragged(batch: str, group: int, dim: int = 16) -> Case:
    torch.manual_seed(group)
    return shuffled_case(np.random.default_rng(group), *BATCHES[batch], PAGE, KV_HEADS, dim, group)


def plan(case: Case, share: float, cudnn: bool = False) -> SparsePromptReads:
    queries, _, _, tables, lengths, starts = case.arguments
    room = make_room(int(lengths.max()), KV_HEADS, queries.shape[2], queries.dtype, queries.device)
    return plan_sparse_prompts(starts.tolist(), lengths.tolist(), tables, KV_HEADS, PAGE, room, cudnn, share)


def attend(reads: SparsePromptReads, case: Case) -> Tensor:
    return attend_sparsely(reads, case.queries, case.k_pages, case.v_pages, SCALE)


def units_of(part: SparsePart, queries: Tensor) -> Tensor:
    """The queries of a part as `choose_blocks` takes them: [units, heads, UNIT, dim]."""
    filled = queries.new_zeros(part.units * UNIT, *queries.shape[1:])
    filled[part.skipped :][: part.rows.stop - part.rows.start] = queries[part.rows]
    return filled.view(part.units, UNIT, *queries.shape[1:]).transpose(1, 2)


def choice(case: Case, part: SparsePart, room: Tensor) -> np.ndarray:
    """The blocks that each unit reads: bool [units, kv_heads, blocks]."""
    chosen = choose_blocks(part, units_of(part, case.queries), case.k_pages, room, SCALE).cpu().numpy()
    assert chosen.shape == (part.units, KV_HEADS, part.chosen)
    read = np.zeros((*chosen.shape[:2], len(part.pages) * PAGE // BLOCK), bool)
    np.put_along_axis(read, chosen, True, 2)
    assert (read.sum(2) == part.chosen).all()
    return read


def masked(case: Case, reads: SparsePromptReads) -> np.ndarray:
    """What parts that read sparsely should give, [rows, heads, dim] float64; other rows are NaN."""
    out = np.full(case.queries.shape, np.nan)
    sequences = np.searchsorted(case.query_starts.numpy(), [part.rows.start for part in reads.parts], "right") - 1
    for i, part in zip(sequences, reads.parts, strict=True):
        keys, values = densified(case, i, case.k_pages), densified(case, i, case.v_pages)
        read = choice(case, part, reads.dense.room).repeat(BLOCK, axis=2)
        for row in range(part.rows.start, part.rows.stop):
            at = part.first + part.skipped + row - part.rows.start
            unit = at // UNIT * UNIT
            for head in range(case.queries.shape[1]):
                own = head // (case.queries.shape[1] // KV_HEADS)
                seen = [*np.flatnonzero(read[(unit - part.first) // UNIT, own, :unit]), *range(unit, at + 1)]
                scores = keys[seen, own] @ case.queries[row, head].double().numpy() * SCALE
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values[seen, own] / weights.sum()
    return out


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("group", [1, 3])
def test_units_read_their_own_tokens_and_the_blocks_that_they_chose(batch: str, group: int) -> None:
    case = ragged(batch, group)
    reads = plan(case, 0.2)
    assert reads.parts
    out = attend(reads, case)
    expected = masked(case, reads)
    sparse = ~np.isnan(expected[:, 0, 0])
    np.testing.assert_allclose(out.numpy()[sparse], expected[sparse], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out[~sparse], case.dense()[~sparse], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("batch", BATCHES)
def test_reading_the_whole_share_is_reading_densely(batch: str) -> None:
    case = ragged(batch, 2)
    whole = plan(case, 1.0)
    assert not whole.parts
    _, _, _, tables, lengths, starts = case.arguments
    dense = plan_prompts(starts.tolist(), lengths.tolist(), tables, KV_HEADS, PAGE, whole.dense.room, False)
    out = attend(whole, case)
    assert torch.equal(out, attend_to_prompts(dense, case.queries, case.k_pages, case.v_pages, SCALE))


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_first_and_the_latest_blocks_are_always_read_and_none_to_come(batch: str, alike: bool) -> None:
    """Also where all queries look for one block: others have no weight that a float could tell from that of blocks to
    come.
    """
    case = ragged(batch, 2)
    if alike:
        case.queries[:] = 1000 * case.queries[:1, :1]
    for part in (reads := plan(case, 0.2)).parts:
        read = choice(case, part, reads.dense.room)
        for unit in range(part.units):
            before = (part.first + unit * UNIT) // BLOCK
            assert read[unit, :, 0].all() and read[unit, :, before - WINDOW : before].all()
            assert not read[unit, :, before:].any()


def test_a_head_reads_the_block_that_its_queries_look_for() -> None:
    """Keys of block 7 are like the queries of the first KV head, those of block 9 like the second's."""
    case = ragged("one unit", 2)
    table = case.block_tables[0].long()
    for head, block in ((0, 7), (1, 9)):
        case.queries[:, 2 * head : 2 * head + 2] = case.queries[:1, 2 * head : 2 * head + 1]
        case.k_pages[table[block * 4 : block * 4 + 4], head] += 3 * case.queries[0, 2 * head]
    (part,) = (reads := plan(case, 0.2)).parts
    read = choice(case, replace(part, chosen=WINDOW + 2), reads.dense.room)[0]
    assert read[0, 7] and not read[0, 9] and read[1, 9] and not read[1, 7]


@given(st.floats(0.01, 1), st.integers(1, 300_000))
def test_units_read_their_share_and_little_more(share: float, length: int) -> None:
    read = blocks_read(share, length) * BLOCK
    assert read <= PIECE
    assert read >= min(PIECE, share * length)
    assert read <= max((1 + WINDOW) * BLOCK, 1.25 * share * length + BLOCK)


def test_shares_have_few_sizes() -> None:
    assert len({blocks_read(0.125, length) for length in range(16_384, 102_401, 512)}) <= 14


def test_more_queries_than_a_piece_are_refused() -> None:
    tables = torch.zeros(1, (PIECE + 512) // PAGE * 2, dtype=torch.int32)
    room = make_room(1000, KV_HEADS, 16, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="prefill_chunk"):
        plan_sparse_prompts([0, PIECE + 512], [2 * PIECE], tables, KV_HEADS, PAGE, room, False, 0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("batch", BATCHES)
def test_cudnn_gives_what_the_reference_gives(batch: str, dim: int) -> None:
    assert cudnn_attends(dim, torch.bfloat16, torch.device("cuda"))
    case = ragged(batch, 4, dim)
    names = "queries", "k_pages", "v_pages"
    there = replace(
        case,
        **{name: getattr(case, name).to("cuda", torch.bfloat16) for name in names},
        block_tables=case.block_tables.cuda(),
    )
    by_torch = attend(plan(there, 0.2, cudnn=False), there)
    by_cudnn = attend(plan(there, 0.2, cudnn=True), there)
    torch.testing.assert_close(by_cudnn, by_torch, atol=2e-2, rtol=2e-2)
