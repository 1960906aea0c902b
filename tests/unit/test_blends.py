"""Blends against least squares."""

import torch

from specahead.lab.evaluation.calibration.blends import fit_blends, to_blend


def test_blends_find_the_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(5, 400, generator=generator)
    true = torch.tensor([[0.7, 0.0, 0.2, 0.0, 0.0], [0.0, 0.0, 0.0, 1.5, 0.1]])
    y = true @ x
    found = fit_blends(x @ x.T, x @ y.T, ridge=0)
    torch.testing.assert_close(found.float(), true, atol=0.02, rtol=0)
    assert to_blend(found[1], draft_heads=2)[0][:2] == (1, 1)
