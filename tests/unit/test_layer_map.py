"""SpecAttn's layer map against brute force, and blends against least squares."""

import itertools

import pytest
import torch

from specahead.lab.evaluation.calibration.blends import fit_blends, to_blend
from specahead.lab.evaluation.calibration.layer_map import layer_similarity, monotone_map


@pytest.mark.parametrize("seed", range(40))
def test_the_monotone_map_is_the_best_of_all(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draft, target = 1 + seed % 4, 1 + seed % 6
    # Few distinct values, so that ties occur.
    similarity = torch.randint(-4, 1, (draft, target), generator=generator).double()
    found, score = monotone_map(similarity)
    maps = [m for m in itertools.product(range(draft), repeat=target) if list(m) == sorted(m)]
    scores = {m: sum(float(similarity[i, j]) for j, i in enumerate(m)) for m in maps}
    assert score == max(scores.values())
    assert scores[tuple(found)] == score


def test_without_the_order_another_map_would_be_better() -> None:
    """The constraint binds: best layers that go back are not taken."""
    similarity = torch.tensor([[-5.0, 0.0], [0.0, -1.0]])
    assert monotone_map(similarity) == ([1, 1], -1.0)


def test_similarity_is_minus_the_divergence() -> None:
    target, draft = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    expected = -(0.5 * torch.tensor(2.0).log() + 0.25 * torch.tensor(0.5).log())
    similarity = layer_similarity(draft, target)
    assert similarity.shape == (2, 1)
    torch.testing.assert_close(similarity[:, 0], torch.tensor([float(expected), 0.0]).double(), atol=1e-4, rtol=0)


def test_blends_find_the_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(5, 400, generator=generator)
    true = torch.tensor([[0.7, 0.0, 0.2, 0.0, 0.0], [0.0, 0.0, 0.0, 1.5, 0.1]])
    y = true @ x
    found = fit_blends(x @ x.T, x @ y.T, ridge=0)
    torch.testing.assert_close(found.float(), true, atol=0.02, rtol=0)
    assert to_blend(found[1], draft_heads=2)[0][:2] == (1, 1)


def test_blends_are_never_negative() -> None:
    """A head that predicts the reverse gets nothing."""
    x = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    y = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    found = fit_blends(x @ x.T, x @ y.T)
    assert (found >= 0).all()
    assert found[0, 1] < 1e-6
