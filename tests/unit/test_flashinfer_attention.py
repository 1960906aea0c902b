"""What FlashInfer is told, read back by torch, against the references; on a GPU also what it computes.

Without a GPU or FlashInfer its launches are skipped; the arithmetic of the plans and what is refused are tested here.
"""

import builtins
import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.block_weights import paged_attention_with_block_weights
from kernels.flashinfer_attention import (
    Requests,
    check_flashinfer,
    dense_requests,
    listed_requests,
    make_captured,
    make_planned,
    make_workspace,
    padded_requests,
    plan,
    run,
    run_arranged,
)
from kernels.paged_attention import (
    BlockLists,
    GroupMeans,
    paged_attention,
    paged_attention_with_read_weights,
)
from tests.unit.test_paged_attention import SCALE, Case, shuffled_case

LAUNCHES = torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is not None
needs_flashinfer = pytest.mark.skipif(
    not LAUNCHES, reason="needs a CUDA device and FlashInfer (pip install flashinfer-python)"
)
PAGE, KV_HEADS, DIM = 16, 2, 64


def ragged(lengths: list[int], counts: list[int], group: int, dim: int = DIM) -> Case:
    """Sequences of these lengths and query counts; a length of 0 is an empty place."""
    torch.manual_seed(len(lengths) + group)
    return shuffled_case(np.random.default_rng(group), lengths, counts, PAGE, KV_HEADS, dim, group)


def with_own_blocks(case: Case, seed: int = 0) -> Case:
    """Lists of random blocks and of those that the queries stand in, in random order; one head reads everything."""
    rng = np.random.default_rng(seed)
    lists: list[list[list[int]]] = []
    for i, (length, count) in enumerate(zip(case.kv_lengths, case.query_counts, strict=True)):
        blocks = -(-length // PAGE)
        first = (length - count) // PAGE if count else blocks
        heads = []
        for head in range(KV_HEADS):
            share = 1.0 if (i, head) == (0, 1) else rng.random()
            chosen = [b for b in range(blocks) if b >= first or rng.random() < share]
            heads.append(rng.permutation(chosen).astype(int).tolist())
        lists.append(heads)
    return replace(case, lists=lists)


def requests_of(case: Case, blocks: BlockLists | None = None) -> Requests:
    layout = (*case.arguments[3:], PAGE)
    if blocks is None:
        return dense_requests(*layout)
    return listed_requests(*layout, blocks.lists, blocks.counts, blocks.block_size)


def as_flashinfer_would(requests: Requests, case: Case) -> Tensor:
    """Its pages laid end to end, its mask aligned to the last key, by torch."""
    queries, k_pages, v_pages = case.arguments[:3]
    out = torch.zeros_like(queries)
    target = out
    if requests.back is not None:
        queries = queries[requests.order]
    elif requests.by_head:
        group = queries.shape[1] // KV_HEADS
        k_pages, v_pages = (pages.view(-1, 1, PAGE, DIM) for pages in (k_pages, v_pages))
        target = out.view(-1, group, DIM)
        queries = queries.view(-1, group, DIM)[requests.order]
    result = torch.zeros_like(queries)
    starts, pages_from = requests.query_starts.tolist(), requests.page_starts.tolist()
    for i, last in enumerate(requests.last_lengths.tolist()):
        rows = queries[starts[i] : starts[i + 1]]
        pages = requests.pages[pages_from[i] : pages_from[i + 1]].long()
        if not len(rows):
            assert not len(pages)
            continue
        length = (len(pages) - 1) * PAGE + last
        keys, values = (
            each[pages]
            .transpose(0, 1)
            .flatten(1, 2)[:, :length]
            .repeat_interleave(rows.shape[1] // each.shape[1], 0)
            for each in (k_pages, v_pages)
        )
        scores = torch.einsum("rhd,hnd->hrn", rows, keys) * SCALE
        later = torch.ones(len(rows), length, dtype=torch.bool).triu(length - len(rows) + 1)
        probs = scores.masked_fill(later, -torch.inf).softmax(-1)
        result[starts[i] : starts[i + 1]] = torch.einsum("hrn,hnd->rhd", probs, values)
    if requests.back is not None:
        return result[requests.back[: len(out)]]
    if not requests.by_head:
        target[: requests.rows] = result[: requests.rows]
    else:
        target[requests.order] = result
    return out


BATCHES = {
    "decoding": ([33, 1, 16, 90], [1, 1, 1, 1]),
    "verification, one place empty": ([200, 0, 47, 5], [5, 0, 3, 5]),
    "prompts": ([400, 150, 313], [300, 150, 257]),
    "a sequence without queries": ([64, 80], [0, 2]),
}
batches = pytest.mark.parametrize("batch", BATCHES)
groups = pytest.mark.parametrize("group", [1, 4])


@batches
@groups
def test_a_dense_plan_says_what_the_reference_reads(batch: str, group: int) -> None:
    case = ragged(*BATCHES[batch], group)
    requests = requests_of(case)
    assert requests.order is None and requests.pages.dtype == requests.last_lengths.dtype == torch.int32
    torch.testing.assert_close(as_flashinfer_would(requests, case), case.dense(), atol=1e-5, rtol=1e-4)


@batches
@groups
def test_a_plan_over_lists_says_what_the_reference_reads(batch: str, group: int) -> None:
    case = with_own_blocks(ragged(*BATCHES[batch], group))
    requests = requests_of(case, case.packed_lists())
    assert requests.pages.dtype == requests.query_starts.dtype == torch.int32
    assert len(requests.last_lengths) == len(case.kv_lengths) * KV_HEADS
    torch.testing.assert_close(as_flashinfer_would(requests, case), case.sparse(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("queries", [5, 8])
@pytest.mark.parametrize("batch", ["decoding", "verification, one place empty", "a sequence without queries"])
def test_a_padded_plan_says_what_the_reference_reads(batch: str, queries: int) -> None:
    """Each request has as many rows, those before its own thrown away: also where they outnumber the tokens."""
    case = ragged(*BATCHES[batch], 4)
    requests = padded_requests(*case.arguments[3:], PAGE, queries)
    assert requests.query_starts.diff().eq(queries).all() and (requests.last_lengths > 0).all()
    assert len(requests.order) == len(requests.back) == queries * len(case.kv_lengths)  # type: ignore[arg-type]
    torch.testing.assert_close(as_flashinfer_would(requests, case), case.dense(), atol=1e-5, rtol=1e-4)


def test_empty_lists_are_left_out_and_blocks_beyond_the_end_are_not_read() -> None:
    case = with_own_blocks(ragged([40, 50], [2, 3], 4))
    case.lists[0][0] = []
    case.lists[1][1] += [7]
    case = replace(case, block_tables=torch.nn.functional.pad(case.block_tables, (0, 4)))
    requests = requests_of(case, case.packed_lists())
    assert requests.query_starts.tolist() == [0, 0, 2, 5, 8]
    torch.testing.assert_close(as_flashinfer_would(requests, case), case.sparse(), atol=1e-5, rtol=1e-4)


def test_a_plan_shares_no_memory_with_what_it_was_made_from() -> None:
    case = ragged([33, 20], [2, 1], 1)
    tables, lengths, starts = case.arguments[3:]
    requests = dense_requests(tables, lengths, starts, PAGE)
    before = [getattr(requests, name).clone() for name in ("query_starts", "pages", "last_lengths")]
    for each in (tables, lengths, starts):
        each.fill_(7)
    after = [getattr(requests, name) for name in ("query_starts", "pages", "last_lengths")]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_nothing_to_run() -> None:
    case = ragged([20, 0], [0, 0], 1)
    assert requests_of(case).rows == 0
    assert requests_of(case, case.packed_lists()).rows == 0


# What is refused.


def test_lists_that_lack_blocks_of_the_queries_are_refused() -> None:
    case = with_own_blocks(ragged([100, 70], [1, 20], 4))
    case.lists[1][1] = [0, 2, 4]
    with pytest.raises(
        ValueError, match=r"sequence 1, KV head 1 lacks blocks \[3\], in which its 20 queries"
    ):
        requests_of(case, case.packed_lists())


def test_blocks_that_are_no_pages_are_refused() -> None:
    case = with_own_blocks(ragged([100], [1], 4))
    with pytest.raises(NotImplementedError, match="blocks of 32 tokens: expected pages, 16 tokens"):
        requests_of(case, case.packed_lists(32))


@pytest.mark.parametrize(
    ("dim", "dtype", "error", "message"),
    [
        (80, torch.bfloat16, NotImplementedError, "heads of 80 dimensions; it takes 64, 128, 256"),
        (64, torch.float32, NotImplementedError, "float32; it takes bfloat16 and float16"),
        (64, torch.bfloat16, ValueError, "runs on CUDA devices, this is 'cpu'"),
    ],
)
def test_what_flashinfer_cannot_run_is_refused(
    dim: int, dtype: torch.dtype, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_flashinfer(dim, dtype, torch.device("cpu"))


def test_without_flashinfer_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name == "flashinfer":
            raise ImportError(name)
        return there(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(RuntimeError, match="pip install flashinfer-python"):
        check_flashinfer(64, torch.bfloat16, torch.device("cuda"))


def test_means_and_weights_are_refused() -> None:
    case = with_own_blocks(ragged([40], [2], 1))
    blocks = case.packed_lists()
    nothing = torch.zeros(1, KV_HEADS, DIM)
    table = torch.zeros(1, 0, dtype=torch.int32)
    means = GroupMeans(nothing, nothing, nothing, table, torch.zeros(1, dtype=torch.int32), 64)
    with pytest.raises(NotImplementedError, match="'flashinfer' takes no group means; use 'triton'"):
        paged_attention(*case.arguments, SCALE, blocks, means, backend="flashinfer")
    with pytest.raises(NotImplementedError, match="read_weights: backend 'flashinfer' gives no weights"):
        paged_attention_with_read_weights(*case.arguments, SCALE, blocks, backend="flashinfer")
    with pytest.raises(NotImplementedError, match="block_weights: backend 'flashinfer' gives no weights"):
        paged_attention_with_block_weights(*case.arguments, SCALE, PAGE, 1, backend="flashinfer")


# What it computes, on a GPU.


def on_gpu(case: Case, dtype: torch.dtype) -> Case:
    parts = {name: getattr(case, name).to("cuda", dtype) for name in ("queries", "k_pages", "v_pages")}
    return replace(case, **parts, block_tables=case.block_tables.cuda())


def arguments_of(case: Case) -> tuple[Tensor, ...]:
    return tuple(each.cuda() for each in case.arguments)


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """The same numbers as the GPU gets, in float32 on the CPU, for the reference."""
    parts = {name: getattr(case, name).to(dtype).float() for name in ("queries", "k_pages", "v_pages")}
    return replace(case, **parts)


def check(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.float().cpu(), wanted, atol=2e-2, rtol=2e-2)


@needs_flashinfer
@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16)])
@batches
@groups
def test_dense(batch: str, group: int, dim: int, dtype: torch.dtype) -> None:
    case = ragged(*BATCHES[batch], group, dim)
    got = paged_attention(*arguments_of(on_gpu(case, dtype)), SCALE, backend="flashinfer")
    check(got, rounded(case, dtype).dense())


@needs_flashinfer
@pytest.mark.gpu
@batches
@groups
def test_lists(batch: str, group: int) -> None:
    case = with_own_blocks(ragged(*BATCHES[batch], group))
    blocks = case.packed_lists()
    there = BlockLists(blocks.lists.cuda(), blocks.counts.cuda(), PAGE)
    case_there = on_gpu(case, torch.bfloat16)
    got = paged_attention(*arguments_of(case_there), SCALE, there, backend="flashinfer")
    check(got, rounded(case, torch.bfloat16).sparse())


@needs_flashinfer
@pytest.mark.gpu
def test_empty_lists_give_zeros() -> None:
    case = with_own_blocks(ragged([40, 50], [2, 3], 4))
    case.lists[0][0] = []
    blocks = case.packed_lists()
    there = BlockLists(blocks.lists.cuda(), blocks.counts.cuda(), PAGE)
    case_there = on_gpu(case, torch.bfloat16)
    got = paged_attention(*arguments_of(case_there), SCALE, there, backend="flashinfer")
    assert not got[:2, :4].any()
    check(got, rounded(case, torch.bfloat16).sparse())


@needs_flashinfer
@pytest.mark.gpu
def test_a_long_sequence_is_split() -> None:
    case = ragged([9000, 17], [5, 5], 4)
    got = paged_attention(*arguments_of(on_gpu(case, torch.bfloat16)), SCALE, backend="flashinfer")
    check(got, rounded(case, torch.bfloat16).dense())


@needs_flashinfer
@pytest.mark.gpu
def test_nothing_to_run_gives_zeros() -> None:
    case = ragged([20, 0], [0, 0], 1)
    got = paged_attention(*arguments_of(on_gpu(case, torch.bfloat16)), SCALE, backend="flashinfer")
    assert got.shape == (0, KV_HEADS, DIM)


@needs_flashinfer
@pytest.mark.gpu
def test_queries_that_stand_in_its_order_already() -> None:
    case = with_own_blocks(ragged([100, 70], [5, 5], 4))
    there = on_gpu(case, torch.bfloat16)
    planned = make_planned(make_workspace(torch.device("cuda")))
    requests = requests_of(case, case.packed_lists())
    plan(planned, requests, 4 * KV_HEADS, KV_HEADS, DIM, PAGE, SCALE, torch.bfloat16)
    wanted = run(planned, there.queries, there.k_pages, there.v_pages)
    arranged = there.queries.view(2, 5, KV_HEADS, 4, DIM).transpose(1, 2).reshape(-1, 4, DIM)
    got = run_arranged(planned, arranged, there.k_pages, there.v_pages, torch.empty_like(arranged))
    by_head = wanted.view(2, 5, KV_HEADS, 4, DIM).transpose(1, 2).reshape(-1, 4, DIM)
    assert torch.equal(got, by_head)


@needs_flashinfer
@pytest.mark.gpu
@pytest.mark.parametrize(("places", "queries"), [(4, 5), (4, 1), (1, 5), (2, 16)])
def test_a_graph_is_replayed_after_other_plans(places: int, queries: int) -> None:
    """Of one shape: fewer rows, other lengths, empty places."""
    group, pages = 4, 40
    heads, device = group * KV_HEADS, torch.device("cuda")
    largest = ragged([600] * places, [queries] * places, group)
    there = on_gpu(largest, torch.bfloat16)
    planned = make_captured(make_workspace(device), places, queries, places * pages)
    assert bool(planned.padded) == (places > 1 and queries > 1)

    def plan_for(case: Case) -> None:
        layout = (*case.arguments[3:], PAGE)
        requests = padded_requests(*layout, queries) if planned.padded else dense_requests(*layout)
        plan(planned, requests, heads, KV_HEADS, DIM, PAGE, SCALE, torch.bfloat16)

    plan_for(largest)
    rows = there.queries.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(planned, rows, there.k_pages, there.v_pages)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(planned, rows, there.k_pages, there.v_pages)
    steps = [
        ([600] * 4, [queries] * 4),
        ([599, 0, 16, 300], [1, 0, 5, 2]),
        ([3, 0, 0, 0], [3, 0, 0, 0]),
        ([33, 600, 170, 1], [1, 1, 1, 1]),
        ([600] * 4, [queries] * 4),
    ]
    for lengths, counts in steps:
        counts = [min(count, queries) for count in counts[:places]]
        case = replace(rounded(largest, torch.bfloat16), kv_lengths=lengths[:places], query_counts=counts)
        case = replace(case, queries=torch.randn(sum(counts), heads, DIM).bfloat16().float())
        rows.normal_()
        rows[: sum(counts)] = case.queries.bfloat16().cuda()
        plan_for(case)
        graph.replay()
        check(out[: sum(counts)], case.dense())
