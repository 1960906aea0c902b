"""Prompts in pieces, merged, against plain paged attention; by cuDNN where there is a GPU."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specahead.kernels import prompt_attention, prompt_reads
from specahead.kernels.kv_scales import KVScales
from specahead.kernels.merged_attention import merge_attended
from specahead.kernels.prompt_attention import are_halved, attend_to_piece, attend_to_prompts, cudnn_attends
from specahead.kernels.prompt_reads import (
    NEAR,
    PIECE,
    REST,
    SHORT,
    STEP,
    UNIT,
    Ends,
    PromptPart,
    PromptReads,
    make_room,
    pieces_before,
    plan_prompts,
    shapes_of_parts,
    size_of_own,
)
from tests.unit.test_paged_attention import Case, both_widths, in_eight_bits, shuffled_case

PAGE, KV_HEADS = 16, 2
BATCHES = {
    "from the start": ([1300], [1300]),
    "behind whole units": ([1024 + 700], [700]),
    "behind a part of a unit": ([1100, 600], [37, 513]),
    "an empty place, one without queries": ([0, 530, 64], [0, 18, 0]),
    "longer pieces": ([4096 + 2048 + 512 + 5], [5]),
    "short, behind far pieces": ([NEAR + 512 + 50, 600], [50, 40]),
    "long, then short, then long": ([2200, 700, 1024 + 512 + 2100], [2200, 20, 2100]),
}


def ragged(lengths: list[int], counts: list[int], group: int, dim: int) -> Case:
    torch.manual_seed(len(lengths) + group)
    return shuffled_case(np.random.default_rng(group), lengths, counts, PAGE, KV_HEADS, dim, group)


def plan(case: Case, cudnn: bool = False) -> PromptReads:
    queries, _, _, tables, lengths, starts = case.arguments
    room = make_room(int(lengths.max()), KV_HEADS, queries.shape[2], queries.dtype, queries.device)
    heads = queries.shape[1], KV_HEADS, queries.shape[2]
    return plan_prompts(starts.tolist(), lengths.tolist(), tables, heads, PAGE, room, cudnn)


def attend(case: Case, reads: PromptReads) -> Tensor:
    return attend_to_prompts(reads, case.batch)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("group", [1, 4])
@both_widths
def test_pieces_give_what_the_reference_gives(batch: str, group: int, eight_bit: bool) -> None:
    case = in_eight_bits(ragged(*BATCHES[batch], group, dim=16), eight_bit)
    torch.testing.assert_close(attend(case, plan(case)), case.dense(), atol=1e-5, rtol=1e-4)


@pytest.fixture
def empty_is_nan() -> Iterator[None]:
    """Memory that is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_rows_of_no_part_are_zeros(empty_is_nan: None) -> None:
    """Behind the last sequence, and where another kind of part lies between two."""
    case = ragged([300, 2150, 90], [20, 2150, 10], 2, dim=16)
    filled = replace(case, queries=torch.cat([case.queries, case.queries[:3]]))
    reads = plan(filled)
    out = attend(filled, replace(reads, parts=[reads.parts[0], reads.parts[2]]))
    wanted = torch.cat([case.dense(), torch.zeros_like(case.queries[:3])])
    wanted[20:2170] = 0
    assert (out[wanted == 0] == 0).all()
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)


def same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def as_queries_lie(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Have torch's outputs lie in memory as the queries do, like cuDNN's; return the list that they come to."""
    outputs = []

    def attend(queries: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        out, total = attend_to_piece(queries, *others)
        outputs.append(torch.empty_like(queries).copy_(out))
        return outputs[-1], total

    monkeypatch.setattr(prompt_attention, "attend_to_piece", attend)
    return outputs


@pytest.mark.parametrize("new", [50, 2100])
def test_each_piece_before_is_one_merge_and_the_last_is_written_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch, new: int
) -> None:
    """One part is short, and one is long."""
    merges: list[Any] = []

    def merge(*arguments: Any, **rest: Any) -> Tensor:
        merges.append(arguments)
        return merge_attended(*arguments, **rest)

    monkeypatch.setattr(prompt_attention, "merge_attended", merge)
    monkeypatch.setattr(prompt_reads, "PIECE", STEP)
    monkeypatch.setattr(prompt_reads, "NEAR", 0)
    case = ragged([2 * STEP + new, STEP + 30, 40], [new, 30, 40], 2, dim=16)
    queries = case.queries.bfloat16()
    case = replace(case, queries=queries.float())
    rounded = replace(case, queries=queries, k_pages=case.k_pages.bfloat16(), v_pages=case.v_pages.bfloat16())
    out = attend(rounded, plan(rounded))
    assert [merge[4].dtype for merge in merges] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert [same_memory(merge[4], out) for merge in merges] == [False, True, True]
    torch.testing.assert_close(out.float(), case.dense(), atol=2e-2, rtol=2e-2)


def test_what_is_left_before_a_short_part_is_a_piece_where_it_is_worth_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ragged([STEP + REST + 300, STEP + REST - 1 + 40, 40], [40, 40, 40], 2, dim=16)
    monkeypatch.setattr(prompt_reads, "NEAR", 0)
    pieces = []
    for worth in (0, 1e10):
        monkeypatch.setattr(prompt_reads, "WORTH_THE_REST", worth)
        reads = plan(case)
        (ends,) = reads.parts
        pieces.append([[len(piece) * PAGE // KV_HEADS for piece in part.before] for part in ends.parts])
        torch.testing.assert_close(attend(case, reads), case.dense(), atol=1e-5, rtol=1e-4)
    assert pieces == [[[STEP, REST], [STEP], []], [[STEP], [STEP], []]]


@pytest.mark.parametrize(("length", "count"), [(3072, 3072), (2500, 2500), (500, 40)])
def test_one_part_with_nothing_before_is_not_copied(monkeypatch: pytest.MonkeyPatch, length: int, count: int) -> None:
    outputs, case = as_queries_lie(monkeypatch), ragged([length], [count], 2, dim=16)
    out = attend(case, plan(case))
    assert out.is_contiguous() and (same_memory(out, outputs[0]) if count > SHORT else not outputs)
    torch.testing.assert_close(out, case.dense(), atol=1e-5, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, SHORT)), min_size=1, max_size=12))
def test_the_ends_of_short_parts_are_read_together_as_far_as_there_is_room(parts: list[tuple[int, int]]) -> None:
    lengths, starts = [base + new for base, new in parts], [0]
    for _, new in parts:
        starts.append(starts[-1] + new)
    tables = torch.zeros(len(parts), -(-max(lengths) // PAGE), dtype=torch.int32)
    room = 1 << max(14, max(lengths).bit_length())
    reads = plan_prompts(starts, lengths, tables, (32, 1, 128), PAGE, torch.empty(2, room * 128, device="meta"), False)
    joined = [ends for ends in reads.parts if isinstance(ends, Ends)]
    assert len(joined) == len(reads.parts) and [part.rows for ends in joined for part in ends.parts] == [
        slice(*rows) for rows in itertools.pairwise(starts)
    ]
    keys = [PAGE * len(ends.places) for ends in joined]
    assert max(keys) <= room and all(one + other > room - 2 * PAGE for one, other in itertools.pairwise(keys))
    read = iter(number for ends in joined for number in ends.ragged.used.tolist())
    for (base, new), part in zip(parts, (part for ends in joined for part in ends.parts), strict=True):
        assert next(read) + sum(PAGE * len(piece) for piece in part.before) == base + new


@given(st.integers(0, 5000).map(lambda n: n * UNIT))
def test_pieces_cover_what_is_before_and_have_few_sizes(length: int) -> None:
    end, sizes = 0, set()
    for start, stop in pieces_before(length):
        assert start == end and UNIT <= stop - start <= PIECE
        end = stop
        sizes.add(stop - start)
    assert end == length
    assert all(size % 4096 == 0 or size in (512, 1024, 2048) for size in sizes)


@given(st.integers(1, 5000), st.sampled_from([1, 2, 66, 114, 132]))
def test_keys_are_halved_where_processors_would_wait(programs: int, processors: int) -> None:
    """Whole turns of all processors, of programs that read all keys or half of them."""
    turns = sum(1 for _ in range(0, programs, processors)), sum(1 for _ in range(0, 2 * programs, processors)) / 2
    assert are_halved(programs, processors) == (turns[1] < turns[0])


@given(st.integers(1, 100_000))
def test_an_own_piece_holds_its_tokens_and_little_more(tokens: int) -> None:
    size = size_of_own(tokens)
    assert size >= tokens and size % UNIT == 0
    assert size <= max(2 * UNIT, tokens * 3 // 2 + UNIT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("batch", BATCHES)
@both_widths
def test_cudnn_gives_what_the_reference_gives(batch: str, dim: int, eight_bit: bool) -> None:
    assert cudnn_attends(dim, torch.bfloat16, torch.device("cuda"))
    case = in_eight_bits(ragged(*BATCHES[batch], 4, dim), eight_bit)
    names = ["queries"] if eight_bit else ["queries", "k_pages", "v_pages"]
    rounded = replace(case, **{name: getattr(case, name).bfloat16().float() for name in names})
    case = replace(case, **{name: getattr(case, name).bfloat16() for name in names})
    tensors: dict[str, Any] = {name: value.cuda() for name, value in vars(case).items() if isinstance(value, Tensor)}
    if case.scales is not None:
        tensors["scales"] = KVScales(case.scales.scales.cuda(), case.scales.centers.cuda())
    there = replace(case, **tensors)
    torch.testing.assert_close(
        attend(there, plan(there, cudnn=True)).float().cpu(), rounded.dense(), atol=2e-2, rtol=2e-2
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8192), st.integers(0, 200_000))
def test_all_shapes_of_parts_are_known_before(tokens: int, before: int) -> None:
    """Whatever is read of a prompt behind whatever was, so that cuDNN can have planned it."""
    length = before + tokens
    tables = torch.zeros(1, -(-length // 16), dtype=torch.int32)
    room = torch.empty(2, 65536 * 64, device="meta")
    (part,) = plan_prompts([0, tokens], [length], tables, (64, 1, 64), 16, room, False).parts
    shapes = {*shapes_of_parts(8192)}
    if isinstance(part, PromptPart):
        if part.size > 8192:  # a part that begins between two units may fill up more
            return
        assert (part.size, 0) in shapes
    else:
        (part,) = part.parts
    assert shapes >= {(part.size, 16 * len(piece)) for piece in part.before}
