"""95 % confidence intervals."""

import math
from collections.abc import Sequence

import numpy as np

_Z = 1.96
_RESAMPLES = 2000


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Return Wilson's interval of the mean of `count` values from 0 to 1.

    It is exact to its order for values that are 0 or 1; values between vary less, so that it is then too wide.
    """
    scale = 1 + _Z**2 / count
    middle = (mean + _Z**2 / (2 * count)) / scale
    half = _Z / scale * math.sqrt(mean * (1 - mean) / count + _Z**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap_ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float] | None:
    """Return Σ above / Σ below with its bootstrap interval over pairs that belong together; None where Σ below is 0.

    Resamples that leave nothing below are left out. The same pairs always give the same interval.
    """
    pairs = np.array([above, below], dtype=float)
    if not pairs[1].sum():
        return None
    drawn = np.random.default_rng(0).integers(0, pairs.shape[1], (_RESAMPLES, pairs.shape[1]))
    sums = pairs[:, drawn].sum(-1)
    ratios = sums[0, sums[1] > 0] / sums[1, sums[1] > 0]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(pairs[0].sum() / pairs[1].sum()), float(low), float(high)
