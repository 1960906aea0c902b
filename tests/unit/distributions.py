"""Whether drawn tokens have the distributions that they should have, and what a test of so many draws would see.

Each draw may have a distribution p of its own. Two statistics are looked at:

- How often the token of each rank in p was drawn, chi-square with the exact covariance of these counts: it sees
  whatever makes likely tokens more or less likely.
- For each bias that would make p a distribution q, the sum of q / p - 1 over the drawn tokens, in its standard
  deviations: Rao's score test, the most powerful one for a small bias. The power of just this one is computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from specahead.engine.sampling.distributions import Sampling

ALPHA = 1e-4  # how often a test fails though nothing is wrong
POWER = 0.99  # how often it finds what it is made to find, at least
MOVED = 0.05  # the share of all probability that a biased judge gives to other tokens
NORMAL = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1)
LEAST_EXPECTED = 20.0  # draws of a rank; less likely ranks are counted together


def top_two(probs: Tensor) -> Tensor:
    """Return distributions [n, vocab] with MOVED of all probability taken from the likeliest token to the second one.

    A distribution of one token alone stays, and one whose likeliest token has less than that loses what there is.
    """
    best, ids = probs.topk(2)
    moved = best[:, 0].clamp(max=MOVED) * (best[:, 1] > 0)
    return probs.scatter_add(1, ids, torch.stack((-moved, moved), 1))


def rolled(probs: Tensor) -> Tensor:
    """Return distributions [n, vocab] mixed with MOVED of a copy in which each token has the probability of the one
    before it, among the tokens that have any: so nothing becomes possible that was not.
    """
    order = (probs > 0).long().sort(dim=1, descending=True, stable=True).indices  # possible tokens first, by id
    count = (probs > 0).sum(1, keepdim=True).clamp(min=1)  # none in a row that nobody looks at
    places = torch.arange(probs.shape[1], device=probs.device)
    before = torch.where(places < count, (places - 1) % count, places)
    copy = torch.zeros_like(probs).scatter(1, order, probs.gather(1, order).gather(1, before))
    return (1 - MOVED) * probs + MOVED * copy


Bias = Callable[[Tensor], Tensor]
BIASES: dict[str, Bias] = {"top two": top_two, "rolled": rolled}


def bias_judges(monkeypatch: pytest.MonkeyPatch, bias: Bias) -> None:
    """Have the torch judges draw from biased distributions, at each level, and tell these as what they drew from."""
    from specahead.kernels.rejection import truncated_probs

    def biased(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
        return bias(truncated_probs(logits, temperature, top_p))

    monkeypatch.setattr("specahead.kernels.rejection.reference.truncated_probs", biased)
    monkeypatch.setattr("specahead.engine.sampling.judging.truncated_probs", biased)


@dataclass(frozen=True)
class Draws:
    """Drawn tokens, [n] int64, and the distribution that each should have, [n, vocab] float64."""

    probs: Tensor
    tokens: Tensor

    def p_value(self) -> float:
        """Return how likely the least likely of the statistics is; 0 if a token came that has no probability."""
        if bool((self.probs.gather(1, self.tokens[:, None]) == 0).any()):
            return 0.0
        return min(self._p_value_of_ranks(), *(self.score(bias)[0] for bias in BIASES.values()))

    def score(self, bias: Bias) -> tuple[float, float]:
        """Return the p-value of the score test for a bias, two-sided, and its power: how likely a p-value below ALPHA
        is where tokens are drawn with this bias.
        """
        biased = bias(self.probs)
        gain = torch.where(self.probs > 0, biased / self.probs - 1, 0.0)
        found = gain.gather(1, self.tokens[:, None]).sum()
        deviation = (self.probs * gain**2).sum().sqrt()
        means = (biased * gain).sum(1)  # of the biased draws
        biased_deviation = ((biased * gain**2).sum(1) - means**2).sum().sqrt()
        least = deviation * NORMAL.icdf(torch.tensor(1 - ALPHA / 2, dtype=torch.float64))
        p_value = 2 * NORMAL.cdf(-abs(found / deviation))
        return float(p_value), float(NORMAL.cdf((means.sum() - least) / biased_deviation))

    def _p_value_of_ranks(self) -> float:
        ordered, order = self.probs.sort(dim=1, descending=True, stable=True)
        ranks = (order == self.tokens[:, None]).long().argmax(1)
        observed = torch.nn.functional.one_hot(ranks, self.probs.shape[1]).double()
        # The least likely ranks are counted together, and left out: their count follows from the others'.
        count = max(1, int((ordered.sum(0) >= LEAST_EXPECTED).sum()) - 1)
        expected, apart = ordered[:, :count], (observed - ordered).sum(0)[:count]
        covariance = torch.diag(expected.sum(0)) - expected.T @ expected
        return upper_tail(float(apart @ torch.linalg.solve(covariance, apart)), count)


def upper_tail(statistic: float, freedom: int) -> float:
    """Return how likely chi-square with so many degrees of freedom is at least so large."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def check(draws: Draws) -> None:
    """The draws are as they should be, and there are enough of them to see either bias."""
    powers = {name: draws.score(bias)[1] for name, bias in BIASES.items()}
    assert min(powers.values()) >= POWER, powers
    assert draws.p_value() > ALPHA


# What is to be drawn.


def changed_logits(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, sampling: Sampling, stops: Sequence[int] = ()
) -> Tensor:
    """Return logits after bias, min_tokens and penalties, worked out apart from the engine: [n, vocab] float64.

    logits: [n, vocab]. counts: how often each token was generated before, [n, vocab]. in_prompt: [vocab] bool, whether
    a token stands in the prompt.
    """
    changed = logits.double().clone()
    for token, bias in sampling.logit_bias.items():
        changed[:, token] += bias
    early = counts.sum(1) < sampling.min_tokens
    for token in stops:
        changed[early, token] = -torch.inf
    factor = torch.where(changed > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
    changed = torch.where((counts > 0) | in_prompt, changed * factor, changed)
    return changed - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def changed_row(
    logits: np.ndarray, tokens: Sequence[int], prompt_tokens: int, sampling: Sampling, stops: Sequence[int]
) -> np.ndarray:
    """Return the logits [vocab] behind `tokens` after bias, min_tokens and penalties, as `changed_logits` does."""
    vocab, text = len(logits), torch.tensor(tokens, dtype=torch.int64)
    counts = torch.bincount(text[prompt_tokens:], minlength=vocab)[None]
    in_prompt = torch.bincount(text[:prompt_tokens], minlength=vocab) > 0
    return changed_logits(torch.from_numpy(logits)[None], counts, in_prompt, sampling, stops)[0].numpy()


def cut_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distributions that temperature, top_k, min_p and top_p leave: [n, vocab] float64."""
    probs = (logits.double() / sampling.temperature).softmax(1)
    ordered = probs.sort(dim=1, descending=True).values
    if 0 < sampling.top_k < probs.shape[1]:
        probs[probs < ordered[:, sampling.top_k - 1 :][:, :1]] = 0
    probs[probs < sampling.min_p * ordered[:, :1]] = 0
    probs /= probs.sum(1, keepdim=True)
    ordered, order = probs.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(1) - ordered
    probs = torch.zeros_like(probs).scatter(1, order, ordered.where(before < sampling.top_p, 0.0))
    return probs / probs.sum(1, keepdim=True)


def probs_of_row(logits: np.ndarray, sampling: Sampling) -> dict[int, float]:
    """Return the distribution that `cut_probs` leaves of the logits [vocab]: its tokens with their probabilities."""
    probs = cut_probs(torch.from_numpy(logits)[None], sampling)[0]
    return {token: p for token, p in enumerate(probs.tolist()) if p > 0}


def chi_square(observed: Mapping[int, int], probs: Mapping[int, float]) -> float:
    """Return the p-value of how often tokens were drawn. Tokens expected fewer than five times are taken together.

    0 if a token without any probability was drawn.
    """
    if not {token for token, count in observed.items() if count} <= set(probs):
        return 0.0
    total = sum(observed.values())
    cells = [(observed.get(token, 0), p * total) for token, p in probs.items()]
    small = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if small:
        cells.append((sum(count for count, _ in small), sum(expected for _, expected in small)))
    return upper_tail(sum((count - expected) ** 2 / expected for count, expected in cells), len(cells) - 1)
