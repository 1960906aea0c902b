"""Selections of each row by itself: the torch reference against sorting in numpy, Triton (on a GPU, or interpreted)
against the reference.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import specahead.kernels.selection
from specahead.kernels.selection import compact, select_top_k

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["uniform", "peaked", "ties", "equal", "zeros", "tiny", "ramp"]
MORE_KINDS = ["mostly zeros", "infinities", "clustered"]
# Few distinct values, so that ties are common; all are sums of powers of two, so that sums are exact.
weight = st.sampled_from([0.0, 0.125, 0.25, 0.25, 0.5, 1.0, 3.0])


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Weights [rows, n] and how many entries of each row are valid."""
    width = draw(st.integers(1, 12))
    table = draw(st.lists(st.lists(weight, min_size=width, max_size=width), min_size=1, max_size=5))
    valid = draw(st.lists(st.integers(0, width), min_size=len(table), max_size=len(table)))
    return np.array(table, dtype=np.float32), np.array(valid)


def weights_of(kind: str, rows: int, n: int, seed: int) -> Tensor:
    values = torch.rand(rows, n, generator=torch.Generator().manual_seed(seed))
    return {
        "uniform": values,
        "peaked": (values * 40).exp() / 1e12,  # as attention is: a few hold it all
        "ties": (values * 4).round() / 4,
        "equal": torch.full((rows, n), 0.25),
        "zeros": torch.zeros(rows, n),
        "tiny": values * torch.where(values < 0.5, 1e-41, 1e-3),  # denormal and ordinary ones
        "ramp": torch.arange(n).float().expand(rows, n) + values,  # a sample sees it evenly, a part would not
        "mostly zeros": values.where(values >= 0.8, 0.0),
        "infinities": values.where(values <= 0.9, torch.inf),
        "clustered": torch.where(torch.arange(n) < 256, 0.9 + values / 1e4, values),  # the threshold lies in one part
    }[kind].contiguous()


def lists_of(result: tuple[Tensor, Tensor], padded: bool = False) -> list[list[int]]:
    """The selections, ascending; `padded`: lists are as wide as the longest, and filled up with 0."""
    lists, counts = (part.cpu() for part in result)
    assert lists.dtype == counts.dtype == torch.int32
    chosen = [row[:count].tolist() for row, count in zip(lists, counts.tolist(), strict=True)]
    assert all(row == sorted(set(row)) for row in chosen)
    if padded:
        assert lists.shape == (len(counts), int(counts.max()) if len(counts) else 0)
        assert not any(row[count:].any() for row, count in zip(lists, counts.tolist(), strict=True))
    return chosen


def agree_on_top_k(weights: Tensor, valid: Tensor, k: Tensor) -> list[list[int]]:
    """Triton selects what the reference selects, which is returned."""
    pytest.importorskip("triton")
    wanted = lists_of(select_top_k(weights, valid, k))
    got = select_top_k(weights.to(DEVICE), valid.to(DEVICE), k.to(DEVICE), "triton")
    assert got[0].shape == weights.shape and lists_of(got) == wanted
    return wanted


@given(rows(), st.data())
def test_top_k_is_a_stable_sort(table: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    """The heaviest of the valid entries, ties to the lower index; a k beyond them takes all."""
    weights, valid = table
    k = np.array([data.draw(st.integers(0, weights.shape[1] + 3)) for _ in valid])
    chosen = lists_of(
        select_top_k(torch.from_numpy(weights), torch.from_numpy(valid), torch.from_numpy(k)), padded=True
    )
    for row, size, count, got in zip(weights, valid, k, chosen, strict=True):
        assert got == sorted(np.argsort(-row[:size], kind="stable")[:count].tolist())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "chunk"), [(1, 8192), (60, 8192), (128, 8192), (300, 128)])  # the last is too long
def test_top_k_of_triton(n: int, chunk: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specahead.kernels.selection, "CHUNK", chunk)
    valid = torch.randint(0, n + 1, (5,), generator=torch.Generator().manual_seed(n))
    valid[0] = n
    agree_on_top_k(weights_of(kind, 5, n, n), valid, torch.tensor([n // 10, n, n // 2, 0, n // 3 + 1]))


@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_top_k_of_all_lengths_and_counts(kind: str) -> None:
    """None, one, all but one, all, beyond all."""
    n = 1101
    valid = torch.tensor([n, n, n, n, n - 1, 700, 700, 256, 20, 1, 0, n], dtype=torch.int32)
    k = torch.tensor([n // 10, n // 2, 1, 0, n - 2, 70, 701, 255, 7, 1, 5, n], dtype=torch.int32)
    agree_on_top_k(weights_of(kind, len(k), n, n), valid, k)


@pytest.mark.parametrize("sampled", [0.0, 0.5, 2.0])
def test_a_sample_that_misleads(sampled: float) -> None:
    """Its entries are unlike all others of the row."""
    weights, size = weights_of("uniform", 1, 300, 3), torch.tensor([300])
    weights[:, ::3] = sampled
    agree_on_top_k(weights, size, torch.tensor([40]))


@pytest.mark.parametrize("chunk", [8192, 512])
def test_ties_that_are_taken_in_part(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists may be cut to their width."""
    monkeypatch.setattr(specahead.kernels.selection, "CHUNK", chunk)
    weights = torch.full((3, 600), 0.5)
    weights[:, 100:130] = 0.75
    weights[1, ::7] = 0.25
    weights[2, 400:] = 0.5000001
    k, full = torch.tensor([300, 333, 290]), torch.tensor([600, 600, 600])
    wanted = agree_on_top_k(weights, full, k)
    lists, counts = select_top_k(weights.to(DEVICE), full.to(DEVICE), k.to(DEVICE), "triton", 200)
    assert counts.tolist() == [200] * 3 and lists.tolist() == [row[:200] for row in wanted]


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), max_size=5))
def test_compact_is_flatnonzero(chosen: list[list[bool]]) -> None:
    table = torch.tensor(chosen, dtype=torch.bool).view(len(chosen), 7)
    assert lists_of(compact(table), padded=True) == [np.flatnonzero(row).tolist() for row in table.numpy()]
