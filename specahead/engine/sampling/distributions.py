"""How a session samples, the truncated distributions that it draws from, and the uniforms that draw.

Uniforms depend on (seed, position, use) alone. Each position is decided once, with its own uniforms: that keeps
speculative sampling exact. Which token they lead to depends on what was proposed, and on the logits' last bits, unless
the runner is deterministic (`specahead.engine.sampling.judging.judge`).
"""

from dataclasses import dataclass, field

import numpy as np

USE_DRAFT, USE_ACCEPT, USE_TARGET = 0, 1, 2
USE_ALTERNATIVE = 5  # where verdicts are imposed
USE_SCREEN_ACCEPT, USE_SCREEN_DRAW = 3, 4  # of a level whose tokens are judged once more
LEAST_TEMPERATURE = 0.01  # of what is sampled; far below it the softmax overflows


@dataclass(frozen=True)
class Sampling:
    """How a session's tokens are chosen. temperature 0 is greedy; top_p in (0, 1].

    top_k: likeliest tokens that are left, 0 for all. min_p: least share of the likeliest token's probability, in
    [0, 1]. The penalties, logit_bias (by token id) and min_tokens (generated before a stop token may be) change logits
    (engine.logit_rules). A cut by min_p and top_k comes before that by top_p, which is of what they leave.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def cuts(self) -> bool:
        """Whether top_k or min_p leave out tokens that might be drawn."""
        return not self.greedy and (self.top_k > 0 or self.min_p > 0)

    @property
    def penalises(self) -> bool:
        """Whether there is a penalty on tokens that occur already."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True)
class Support:
    """A truncated distribution: ids [n] int64 distinct, probs [n] float32 summing to 1."""

    ids: np.ndarray
    probs: np.ndarray


def one_hot(token: int) -> Support:
    """Return the distribution that has all its probability on one token."""
    return Support(np.array([token]), np.ones(1, np.float32))


def uniforms(seed: int, start: int, count: int, use: int) -> np.ndarray:
    """Uniforms in [0, 1) of positions start … start + count - 1, [count] float64 (Philox 4x64, counter-based)."""
    # One counter step gives four numbers; a position uses one step, so that neighbours never share one.
    key = np.array([seed & (2**64 - 1), use], dtype=np.uint64)  # a list with a seed of 64 bits would become floats
    bits = np.random.Philox(key=key, counter=[start, 0, 0, 0])
    return (bits.random_raw(4 * count)[::4] >> np.uint64(11)).astype(np.float64) * 2.0**-53
