"""Holds the mean of what audits find below a limit, by a factor of what sessions read.

What larger factors give is not known before they are tried, only that it is less, and 0 where everything is read. So
the factor doubles as soon as the mean's upper bound comes near the limit, and begins there as if nothing had been
found; it falls by slow steps. Knows no sessions and no models.
"""

import math
from dataclasses import dataclass

CONFIDENCE = 0.95  # of the upper bound, at each audit
# Shares of the limit: beyond NEAR the bound makes the factor rise, below FAR it lets it fall, at TRUSTED it begins. So
# one audit changes nothing, whatever it finds, and two that find 1 make the factor rise.
NEAR, FAR, TRUSTED = 0.8, 0.5, 0.4
RISE, FALL = 2.0, 2**-0.25  # of the factor


def upper_bound(mean: float, weight: float) -> float:
    """Return what the true mean of values in [0, 1] exceeds with a chance of 1 - CONFIDENCE at most.

    Hoeffding 1963 ("Probability inequalities for sums of bounded random variables", Theorem 1): the chance that `n`
    values have a mean of m or less is at most exp(-n KL(m || μ)), for Bernoulli distributions of means m and μ. It
    holds for a weighted mean, too, with the sum of the weights for n, if none exceeds 1: E exp(λwx) <= (E exp(λx))^w.
    The mean is then the weighted mean of the values' expectations, each given the values before it.
    """
    low, high, allowed = mean, 1.0, -math.log(1 - CONFIDENCE) / weight
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _divergence(mean, middle) < allowed else (low, middle)
    return high


def _divergence(mean: float, other: float) -> float:
    """Return KL(mean || other) of Bernoulli distributions, in nats."""
    yes = mean * math.log(mean / other) if mean else 0.0
    no = (1 - mean) * math.log((1 - mean) / (1 - other)) if mean < 1 and other < 1 else 0.0
    return math.inf if mean < 1 and other >= 1 else yes + no


@dataclass
class Holding:
    """A mean below a limit."""

    limit: float
    """What the mean is not to exceed; from 1 on nothing is held, only measured."""
    most: float
    """The largest factor: that by which everything is read."""
    trust: float = 1.0
    """How many audits without divergence a new factor counts as: 1 as many as put the bound at TRUSTED, 2 twice as
    many."""
    factor: float = 1.0
    """By how many times more is read than the plan says."""
    weight: float = 0.0
    """The sum of the weights of the audits at this factor, those that trust stands for included."""
    total: float = 0.0
    """The weighted sum of what they found."""
    audits: int = 0
    """Audits at this factor."""

    def __post_init__(self) -> None:
        self._begin(self.factor)

    @property
    def prior(self) -> float:
        """The weight that trust stands for."""
        return self.trust * math.log(1 - CONFIDENCE) / math.log(1 - TRUSTED * min(self.limit, 1.0))

    @property
    def bound(self) -> float:
        """The upper bound of the mean."""
        return upper_bound(self.total / self.weight, self.weight)

    @property
    def reads_all(self) -> bool:
        """Whether everything is read."""
        return self.factor >= self.most

    def note(self, value: float) -> None:
        """Take note of an audit that found `value`, from 0 to 1, and change the factor where that is due."""
        kept = 1 - 1 / (2 * self.prior)
        self.weight, self.total, self.audits = kept * self.weight + 1, kept * self.total + value, self.audits + 1
        if self.limit >= 1:
            return
        bound = self.bound
        if bound > NEAR * self.limit and not self.reads_all:
            self._begin(min(self.most, self.factor * RISE))
        elif bound < FAR * self.limit and self.factor > 1 and self.audits >= self.prior / 2:
            self._begin(max(1.0, self.factor * FALL))

    def _begin(self, factor: float) -> None:
        self.factor, self.weight, self.total, self.audits = factor, self.prior, 0.0, 0
