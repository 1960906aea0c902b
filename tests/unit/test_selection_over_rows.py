"""One budget over several rows: Triton (on a GPU, or interpreted) and the torch reference against plain sorting."""

import numpy as np
import pytest
import torch
from torch import Tensor

from specahead.kernels.selection import mark_over_rows, over_rows, select_over_rows

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# So small that rows have several chunks and a sample is not everything.
SIZES = {"SAMPLE": 128, "PIVOTS": 8, "PARTS": 2, "BINS": 64, "SLOTS": 16, "TALLY_CHUNK": 256, "TALLY_PROGRAMS": 8}
SIZES |= {"EMIT_CHUNK": 256, "EMIT_WHOLE": 256, "SLOW_CHUNK": 1024}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SIZES.items():
        monkeypatch.setattr(over_rows, name, size)


def scores_of(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if kind == "zeros":
        return torch.zeros(shape)
    values = torch.rand(shape, generator=generator)
    if kind == "ties":
        return (values * 3).round() / 8
    if kind == "peaked":
        return values.pow(30)
    if kind == "alike":  # more in a bin than it holds, but for a few far below
        return (1 + values / 1024).where(values < 0.97, values / 16)
    if kind == "tiny":  # denormal and ordinary ones
        return values * torch.where(values < 0.5, 1e-41, 1e-3)
    return values.where(values > 0.7, 0.0)


def wanted_sets(scores: Tensor, count: int, forced: Tensor | None) -> list[list[int]]:
    """Return what one group is to choose, by sorting (-score, flat index)."""
    flat = scores.flatten().numpy()
    best = [i for i in np.lexsort((np.arange(len(flat)), -flat)) if flat[i] > 0][: max(0, count)]
    rows, n = scores.shape
    sets: list[set[int]] = [set() for _ in range(rows)]
    for i in best:
        sets[i // n].add(int(i % n))
    if forced is not None:
        for row, column in forced.nonzero().tolist():
            sets[row].add(column)
    return [sorted(chosen) for chosen in sets]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["zeros", "ties", "peaked", "alike", "tiny", "sparse"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 70), (3, 2, 160)])
@pytest.mark.usefixtures("small")
def test_lists_and_bits(shape: tuple[int, int, int], kind: str, backend: str) -> None:
    groups, rows, n = shape
    generator = torch.Generator().manual_seed(n)
    scores = scores_of(kind, shape, generator)
    forced = (torch.rand(shape, generator=generator) < 0.1).to(torch.uint8)
    counts = torch.tensor([rows * n + 7, 0, rows * n // 3][-groups:], dtype=torch.int32)
    for mask in (None, forced):
        free = scores if mask is None else scores.masked_fill(mask.bool(), 0)
        given = None if mask is None else mask.to(DEVICE)
        lists, taken = select_over_rows(free.to(DEVICE), counts.to(DEVICE), given, backend)
        for group in range(groups):
            wanted = wanted_sets(free[group], int(counts[group]), None if mask is None else mask[group])
            got = [row[:count].tolist() for row, count in zip(lists[group].cpu(), taken[group].tolist(), strict=True)]
            assert got == wanted
        listed = torch.arange(n, device=DEVICE) < taken[..., None]
        for inner in () if mask is None else (rows, 1):
            outer, counted = select_over_rows(free.to(DEVICE), counts.to(DEVICE), given, backend, inner)
            assert outer.shape == (rows // inner, groups, inner, n)
            assert torch.equal(counted.transpose(0, 1).flatten(1), taken)
            same = outer.transpose(0, 1).flatten(1, 2)
            assert torch.equal(same.where(listed, 0), lists.where(listed, 0))
    words = mark_over_rows(scores.to(DEVICE), counts.to(DEVICE), backend).cpu().numpy().view(np.uint64)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    for group in range(groups):
        wanted = wanted_sets(scores[group], int(counts[group]), None)
        assert [np.flatnonzero(row).tolist() for row in bits[group]] == wanted


def agree(scores: Tensor, counts: list[int]) -> None:
    """Triton's choice is torch's."""
    counted = torch.tensor(counts, dtype=torch.int32)
    got = mark_over_rows(scores.to(DEVICE), counted.to(DEVICE), "triton").cpu()
    assert torch.equal(got, mark_over_rows(scores, counted))


@pytest.mark.parametrize("sampled", [0.0, 1e-30, 0.5, 2.0])
@pytest.mark.usefixtures("small")
def test_a_sample_that_misleads(sampled: float) -> None:
    """What it sees is unlike all else, so that the threshold is not where it says."""
    scores = torch.rand(3, 2, 500, generator=torch.Generator().manual_seed(3))
    stride = over_rows.sample_stride(1000, 500)
    assert stride > 4
    scores.view(3, -1)[:, ::stride] = sampled
    agree(scores, [30, 400, 870])


@pytest.mark.parametrize(("bins", "slots"), [(64, 1), (4, 4)])
@pytest.mark.usefixtures("small")
def test_bins_that_run_over(bins: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_rows, "BINS", bins)
    monkeypatch.setattr(over_rows, "SLOTS", slots)
    values = torch.rand(2, 2, 450, generator=torch.Generator().manual_seed(4))
    agree(values, [100, 500])
    agree((values * 200).round() / 256, [100, 500])  # and ties in them


@pytest.mark.usefixtures("small")
def test_one_score_for_all_and_any_count() -> None:
    scores = torch.full((4, 2, 300), 0.25)
    scores[:, 1, 7] = torch.inf
    agree(scores, [1, 300, 599, 600])
    agree(scores, [-1, 0, 601, 1 << 30])


def test_sizes_as_they_are() -> None:
    """Two rows of 3,000, a program's own sizes."""
    agree(torch.rand(1, 2, 3000, generator=torch.Generator().manual_seed(5)).pow(20), [700])


def test_nothing_to_choose_from() -> None:
    empty, one = torch.zeros(1, 0, 4, device=DEVICE), torch.ones(1, dtype=torch.int32, device=DEVICE)
    lists, counts = select_over_rows(empty, one, None, "triton")
    assert lists.shape == (1, 0, 4) and counts.shape == (1, 0)
