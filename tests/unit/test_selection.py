"""Top-k and nucleus selection of blocks against sorting in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specahead.kernels.selection import compact, select_nucleus, select_top_k

# Few distinct values, so that ties are common; all are sums of powers of two, so that sums are exact.
weight = st.sampled_from([0.0, 0.125, 0.25, 0.25, 0.5, 1.0, 3.0])


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Weights [rows, n] and how many entries of each row are valid."""
    width = draw(st.integers(1, 12))
    table = draw(st.lists(st.lists(weight, min_size=width, max_size=width), min_size=1, max_size=5))
    valid = draw(st.lists(st.integers(0, width), min_size=len(table), max_size=len(table)))
    return np.array(table, dtype=np.float32), np.array(valid)


def as_lists(result: tuple[torch.Tensor, torch.Tensor]) -> list[list[int]]:
    """The selections, after checking how they are packed."""
    lists, counts = result
    assert lists.dtype == counts.dtype == torch.int32
    assert lists.shape == (len(counts), int(counts.max()) if len(counts) else 0)
    for row, count in zip(lists, counts.tolist(), strict=True):
        assert not row[count:].any()
        assert (row[:count].diff() > 0).all()
    return [row[:count].tolist() for row, count in zip(lists, counts.tolist(), strict=True)]


@given(rows(), st.data())
def test_top_k_is_a_stable_sort(table: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    """The heaviest of the valid entries, ties to the lower index; a k beyond them takes all."""
    weights, valid = table
    k = np.array([data.draw(st.integers(0, weights.shape[1] + 3)) for _ in valid])
    chosen = as_lists(select_top_k(torch.from_numpy(weights), torch.from_numpy(valid), torch.from_numpy(k)))
    for row, size, count, got in zip(weights, valid, k, chosen, strict=True):
        wanted = np.argsort(-row[:size], kind="stable")[:count]
        assert got == sorted(wanted.tolist())


def test_top_k_by_hand() -> None:
    weights = torch.tensor([[0.1, 0.4, 0.4, 0.1, 0.9], [0.0, 0.0, 0.0, 0.0, 0.0]])
    picked = select_top_k(weights, torch.tensor([4, 5]), torch.tensor([1, 2]))
    assert as_lists(picked) == [[1], [0, 1]]
    assert as_lists(select_top_k(weights, torch.tensor([0, 1]), torch.tensor([3, 3]))) == [[], [0]]


def test_ties_go_to_the_lower_index_in_wide_rows() -> None:
    """Where a sort that is not stable would mix them."""
    weights = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (8, 5000)).astype(np.float32))
    k = torch.arange(8) * 600 + 1
    chosen = as_lists(select_top_k(weights, torch.full((8,), 5000), k))
    for row, count, got in zip(weights.numpy(), k.tolist(), chosen, strict=True):
        assert got == sorted(np.argsort(-row, kind="stable")[:count].tolist())


@given(rows(), st.sampled_from([0.05, 0.25, 0.5, 0.75, 0.9, 1.0]))
def test_nucleus_is_the_smallest_threshold_set(table: tuple[np.ndarray, np.ndarray], mass: float) -> None:
    """All at or above the heaviest threshold that leaves `mass` of the valid weight: ties stay whole."""
    weights, valid = table
    chosen = as_lists(select_nucleus(torch.from_numpy(weights), torch.from_numpy(valid), mass))
    for row, size, got in zip(weights, valid, chosen, strict=True):
        inside = row[:size].astype(np.float64)
        total = inside.sum()
        assert inside[got].sum() >= mass * total
        thresholds = [t for t in inside if inside[inside >= t].sum() >= mass * total]
        # The bisection ends within 2⁻²⁴ of the maximum, far below the steps between these weights.
        assert got == np.flatnonzero(inside >= max(thresholds, default=0.0)).tolist()


@pytest.mark.parametrize(
    ("row", "mass", "wanted"),
    [
        ([0.01, 0.97, 0.01, 0.01], 0.9, [1]),  # peaked
        ([0.25, 0.25, 0.25, 0.25], 0.1, [0, 1, 2, 3]),  # flat: ties stay together
        ([0.4, 0.2, 0.2, 0.2], 0.5, [0, 1, 2, 3]),  # tied at the threshold
        ([0.5, 0.3, 0.2, 0.0], 0.75, [0, 1]),
        ([0.5, 0.3, 0.2, 0.0], 0.85, [0, 1, 2]),
        ([0.7], 0.3, [0]),  # a single entry
        ([0.0, 0.0, 0.0], 0.9, [0, 1, 2]),  # nothing to tell entries apart by
        ([1e-30, 3e-30, 1e-30], 0.5, [1]),  # scale does not matter
        ([1e30, 3e30, 1e30], 0.5, [1]),
    ],
)
def test_nucleus_by_hand(row: list[float], mass: float, wanted: list[int]) -> None:
    assert as_lists(select_nucleus(torch.tensor([row]), torch.tensor([len(row)]), mass)) == [wanted]


@pytest.mark.parametrize("sharpness", [0.0, 0.5, 2.0, 8.0])
@pytest.mark.parametrize("mass", [0.5, 0.9, 0.99])
def test_nucleus_holds_its_mass_on_softmax_rows(sharpness: float, mass: float) -> None:
    """And no more than an exact sort would take, but for weights that are all but tied."""
    torch.manual_seed(int(sharpness * 10))
    weights = (torch.randn(40, 300) * sharpness).softmax(1)
    lists = as_lists(select_nucleus(weights, torch.full((40,), 300), mass))
    for row, got in zip(weights.double().numpy(), lists, strict=True):
        assert row[got].sum() >= mass * row.sum()
        ordered = np.sort(row)[::-1]
        needed = int(np.searchsorted(ordered.cumsum(), mass * row.sum())) + 1
        near = np.count_nonzero(np.abs(row - ordered[needed - 1]) <= 2 * row.max() * 2.0**-24)
        assert len(got) <= needed + near - 1


def test_nucleus_ignores_what_is_not_valid() -> None:
    weights = torch.tensor([[0.1, 0.2, 100.0], [5.0, 5.0, 5.0]])
    assert as_lists(select_nucleus(weights, torch.tensor([2, 0]), 0.6)) == [[1], []]


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), max_size=5))
def test_compact_is_flatnonzero(chosen: list[list[bool]]) -> None:
    table = torch.tensor(chosen, dtype=torch.bool).view(len(chosen), 7)
    assert as_lists(compact(table)) == [np.flatnonzero(row).tolist() for row in table.numpy()]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5])
def test_weights_that_are_no_weights_are_refused(bad: float) -> None:
    weights, size = torch.tensor([[0.5, bad, 0.5]]), torch.tensor([3])
    if bad != float("inf"):  # which is the heaviest
        with pytest.raises(ValueError, match="select_top_k: weights must not be negative"):
            select_top_k(weights, size, torch.tensor([1]))
    with pytest.raises(ValueError, match="select_nucleus: weights must be finite"):
        select_nucleus(weights, size, 0.5)


@pytest.mark.parametrize("mass", [0.0, -0.1, 1.1, float("nan")])
def test_mass_outside_its_range_is_refused(mass: float) -> None:
    with pytest.raises(ValueError, match="mass must lie in"):
        select_nucleus(torch.ones(1, 3), torch.tensor([3]), mass)
