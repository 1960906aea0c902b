"""From logits to the distribution drawn from, and the uniforms that draw."""

import numpy as np
import pytest
import torch
from torch import Tensor

from specahead.engine.sampling.distributions import USE_ACCEPT, USE_DRAFT, USE_TARGET, Sampling, uniforms
from specahead.kernels.rejection import truncated_probs


def plain_truncated(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """float64, token by token from the likeliest on, until the mass is there."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if top_p == 1:
        return probs
    kept, mass = np.zeros_like(probs), 0.0
    for token in np.argsort(-probs, kind="stable"):
        kept[token] = probs[token]
        mass += probs[token]
        if mass >= top_p:
            break
    return kept / kept.sum()


@pytest.mark.parametrize("seed", range(6))
def test_truncated_probs_is_the_plain_rule(seed: int) -> None:
    """Rows of different temperature and top-p in one call."""
    generator = torch.Generator().manual_seed(seed)
    rows = 24
    logits = 3 * torch.randn(rows, 50, generator=generator)
    temperature = torch.tensor([0.3, 0.7, 1.0, 2.0]).repeat(rows // 4)
    top_p = torch.tensor([0.05, 0.5, 0.9, 0.99, 1.0, 1e-6]).repeat_interleave(rows // 6)
    got = truncated_probs(logits, temperature, top_p)
    assert got.dtype == torch.float32
    for row, t, p, out in zip(logits, temperature.tolist(), top_p.tolist(), got, strict=True):
        np.testing.assert_allclose(out, plain_truncated(row.numpy(), t, p), atol=1e-6)


def kept(probs: Tensor, top_p: float) -> list[int]:
    one = torch.ones(1)
    return truncated_probs(probs.log()[None], one, one * top_p)[0].nonzero()[:, 0].tolist()


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    probs = torch.tensor([0.125, 0.5, 0.125, 0.25])
    assert kept(probs, 0.4) == [1]
    assert kept(probs, 0.6) == [1, 3]
    assert kept(probs, 0.8) == [0, 1, 3]  # of the two equal ones the lower id
    assert kept(probs, 0.9) == [0, 1, 2, 3]
    assert kept(probs, 1e-9) == [1]


@pytest.mark.parametrize(("top_p", "tokens"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.7500001, 4)])
def test_a_mass_of_just_top_p_is_enough(top_p: float, tokens: int) -> None:
    """The four tokens have one probability, which is exact in binary."""
    assert kept(torch.ones(4), top_p) == list(range(tokens))


def test_greedy_is_temperature_0() -> None:
    assert Sampling(temperature=0.0).greedy
    assert not Sampling(temperature=0.01).greedy


# Uniforms


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("use", [USE_DRAFT, USE_ACCEPT, USE_TARGET])
def test_uniforms_depend_on_seed_position_and_use_alone(seed: int, use: int) -> None:
    """However a range of positions is cut into calls."""
    whole = uniforms(seed, 100, 40, use)
    assert whole.dtype == np.float64
    pieces = [uniforms(seed, 100, 7, use), uniforms(seed, 107, 33, use)]
    np.testing.assert_array_equal(whole, np.concatenate(pieces))
    singles = [uniforms(seed, position, 1, use)[0] for position in range(100, 140)]
    np.testing.assert_array_equal(whole, singles)
    assert len(uniforms(seed, 100, 0, use)) == 0


def test_uniforms_are_uniform_and_not_correlated() -> None:
    """Mean, spread and range; no correlation of neighbours, of uses, of neighbouring seeds."""
    count = 20_000
    a, b, c = (uniforms(7, 0, count, USE_DRAFT), uniforms(7, 0, count, USE_ACCEPT), uniforms(8, 0, count, USE_DRAFT))
    assert (a >= 0).all()
    assert (a < 1).all()
    assert abs(a.mean() - 0.5) < 4 * (1 / 12 / count) ** 0.5
    assert abs(a.var() - 1 / 12) < 0.003
    for x, y in [(a[1:], a[:-1]), (a, b), (a, c)]:
        assert abs(np.corrcoef(x, y)[0, 1]) < 4 / count**0.5
    assert np.histogram(a, 16, (0, 1))[0].min() > count / 16 * 0.85
