"""What FlashInfer is told, read back by torch, against the references; on a GPU also what it computes.

Without a GPU or FlashInfer its launches are skipped; the arithmetic of the plans and what is refused are tested here.
"""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specahead.lab.benchmarks.flashinfer_attention import (
    Requests,
    dense_requests,
    make_planned,
    make_workspace,
    plan,
    run,
)
from specahead.lab.benchmarks.flashinfer_rival import listed_requests
from tests.unit.test_paged_attention import SCALE, Case, shuffled_case

LAUNCHES = torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is not None
needs_flashinfer = pytest.mark.skipif(
    not LAUNCHES, reason="needs a CUDA device and FlashInfer (pip install flashinfer-python)"
)
PAGE, KV_HEADS, DIM = 16, 2, 64


def ragged(lengths: list[int], counts: list[int], group: int, dim: int = DIM) -> Case:
    """Return sequences of these lengths and query counts; a length of 0 is an empty place."""
    torch.manual_seed(len(lengths) + group)
    return shuffled_case(np.random.default_rng(group), lengths, counts, PAGE, KV_HEADS, dim, group)


def requests_of(case: Case) -> Requests:
    return dense_requests(*case.arguments[3:], PAGE)


def as_flashinfer_would(requests: Requests, queries: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
    """Attend in torch: pages laid end to end, the mask aligned to the last key."""
    out = torch.zeros_like(queries)
    starts, pages_from = requests.query_starts.tolist(), requests.page_starts.tolist()
    for i, last in enumerate(requests.last_lengths.tolist()):
        rows = queries[starts[i] : starts[i + 1]]
        pages = requests.pages[pages_from[i] : pages_from[i + 1]].long()
        if not len(rows):
            assert not len(pages)
            continue
        length = (len(pages) - 1) * PAGE + last
        keys, values = (
            each[pages].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(rows.shape[1] // each.shape[1], 0)
            for each in (k_pages, v_pages)
        )
        scores = torch.einsum("rhd,hnd->hrn", rows, keys) * SCALE
        later = torch.ones(len(rows), length, dtype=torch.bool).triu(length - len(rows) + 1)
        probs = scores.masked_fill(later, -torch.inf).softmax(-1)
        out[starts[i] : starts[i + 1]] = torch.einsum("hrn,hnd->rhd", probs, values)
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
    assert requests.pages.dtype == requests.last_lengths.dtype == torch.int32
    got = as_flashinfer_would(requests, *case.arguments[:3])
    torch.testing.assert_close(got, case.dense(), atol=1e-5, rtol=1e-4)


@groups
def test_the_rival_reads_the_same_lists(group: int) -> None:
    """A KV head as a request, as `specahead bench kernels` runs FlashInfer."""
    queries = 5
    case = ragged([100, 100], [queries, queries], group)
    lists = [[[0, 3, 5, 6], [5, 6]], [[1, 2, 3, 4, 5, 6], [0, 4, 5, 6]]]
    case = replace(case, lists=lists)
    requests = listed_requests(case.arguments[3], 100, queries, case.packed_lists())
    all_queries, k_pages, v_pages = case.arguments[:3]
    views = (pages.view(-1, 1, PAGE, DIM) for pages in (k_pages, v_pages))
    arranged = all_queries.view(2, queries, KV_HEADS, group, DIM).transpose(1, 2).reshape(-1, group, DIM)
    got = as_flashinfer_would(requests, arranged, *views)
    got = got.view(2, KV_HEADS, queries, group, DIM).transpose(1, 2).reshape_as(all_queries)
    torch.testing.assert_close(got, case.sparse(), atol=1e-5, rtol=1e-4)


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


# What it computes, on a GPU.


def on_gpu(case: Case, dtype: torch.dtype) -> Case:
    parts = {name: getattr(case, name).to("cuda", dtype) for name in ("queries", "k_pages", "v_pages")}
    return replace(case, **parts, block_tables=case.block_tables.cuda())


def attend(case: Case, dtype: torch.dtype) -> Tensor:
    there = on_gpu(case, dtype)
    planned = make_planned(make_workspace(torch.device("cuda")))
    heads, dim = case.queries.shape[1:]
    plan(planned, requests_of(case), heads, KV_HEADS, dim, PAGE, SCALE, dtype)
    return run(planned, there.queries, there.k_pages, there.v_pages)


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
    check(attend(case, dtype), rounded(case, dtype).dense())


@needs_flashinfer
@pytest.mark.gpu
def test_a_long_sequence_is_split() -> None:
    case = ragged([9000, 17], [5, 5], 4)
    check(attend(case, torch.bfloat16), rounded(case, torch.bfloat16).dense())


@needs_flashinfer
@pytest.mark.gpu
def test_nothing_to_run_gives_zeros() -> None:
    case = ragged([20, 0], [0, 0], 1)
    assert attend(case, torch.bfloat16).shape == (0, KV_HEADS, DIM)
