"""Draws that two models share: right distributions, the same in torch and Triton, and mostly the same token."""

from collections import Counter

import pytest
import torch
from torch import Tensor

import specahead.kernels.rejection.positions
from specahead.engine.sampling.distributions import USE_TARGET, uniforms
from specahead.kernels.rejection import draw_own, race, truncated_probs
from tests.unit.distributions import chi_square

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(count: int, seed: int = 1) -> Tensor:
    return torch.from_numpy(uniforms(seed, 0, count, USE_TARGET))


# The interpreter takes too long for so many rows; what it draws is compared with torch's below.
@pytest.mark.parametrize("backend", ["torch", *["triton"] * (DEVICE == "cuda")])
def test_what_is_drawn_has_the_truncated_distribution(backend: str) -> None:
    rows, vocab = 20_000, 40
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 2
    heat, top_p = torch.full((rows,), 0.8), torch.full((rows,), 0.9)
    given = (each.to(DEVICE) for each in (logits.expand(rows, -1).contiguous(), heat, top_p, numbers(rows)))
    drawn = draw_own(*given, backend).cpu().long()
    probs = truncated_probs(logits[None], heat[:1], top_p[:1])[0]
    assert chi_square(Counter(drawn.tolist()), {i: p for i, p in enumerate(probs.tolist()) if p > 0}) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_draws_what_torch_draws(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over chunks of a vocabulary, greedy rows, top_p that keep one or all, rows with but one finite entry."""
    monkeypatch.setattr(specahead.kernels.rejection.positions, "CHUNK", 64)
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(14, 300, generator=generator) * 3).to(dtype)
    logits[3] = -torch.inf
    logits[3, 277] = 1.0
    heat = torch.tensor([0.0, 1.0, 0.5, 1.0, 2.0, 0.7, 1.0] * 2)
    top_p = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.5, 1e-6, 0.99] * 2)
    for seed in range(2):
        given = logits, heat, top_p, numbers(14, seed)
        wanted = draw_own(*given)
        assert draw_own(*(each.to(DEVICE) for each in given), "triton").tolist() == wanted.tolist()
        assert wanted[3] == 277 and wanted[0] == logits[0].argmax() and wanted[5] == logits[5].argmax()
    assert draw_own(*(each[:0].to(DEVICE) for each in given), "triton").tolist() == []


@pytest.mark.parametrize("apart", [0.0, 0.5, 1.5])
def test_two_who_draw_by_the_same_numbers_mostly_draw_the_same(apart: float) -> None:
    """At least Σ min(p, q) / Σ max(p, q) of the time, whatever order and share of the vocabulary each has."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4000, 200, generator=generator) * 2
    p = logits.softmax(1)
    q = (logits + apart * torch.randn(4000, 200, generator=generator)).softmax(1)
    top, ids = q.topk(64)
    q = torch.zeros_like(p).scatter(1, ids, top / top.sum(1, keepdim=True))
    given = numbers(4000)
    ours = race(p, torch.arange(200)[None], given)
    theirs = ids.gather(1, race(top, ids, given)[:, None])[:, 0]
    least = (torch.minimum(p, q).sum(1) / torch.maximum(p, q).sum(1)).mean()
    agreed = (ours == theirs).float().mean()
    assert agreed > least - 0.02
    assert agreed > 0.9 or apart > 0
    assert agreed > 1.5 * (p * q).sum(1).mean(), "numbers of their own would do as well"
