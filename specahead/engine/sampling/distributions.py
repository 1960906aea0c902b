"""How a session samples: its settings, the truncated distributions that it draws from, and the uniforms that draw.

Uniforms depend only on (seed, position, use). Each position is decided once, by its own uniforms, which keeps
speculative sampling exact. The token that they give depends on the proposed tokens and on the last bits of logits,
unless the runner is deterministic (engine.sampling.judging.judge).
"""

from dataclasses import dataclass, field

import numpy as np

USE_DRAFT, USE_ACCEPT, USE_TARGET = 0, 1, 2
USE_SCREEN_ACCEPT, USE_SCREEN_DRAW = 3, 4  # of a pass whose tokens a later pass judges
USE_ALTERNATIVE = 5  # where benchmarks impose verdicts
LEAST_TEMPERATURE = 0.01  # of sampled tokens; far below it the softmax overflows


@dataclass(frozen=True)
class Sampling:
    """How a session's tokens are chosen.

    top_k and min_p cut the distribution first, and top_p cuts what they leave. Penalties, logit_bias and min_tokens
    change the logits before that (engine.sampling.logit_rules).
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """In (0, 1]."""
    seed: int = 0
    top_k: int = 0
    """How many of the likeliest tokens may be drawn; 0: all."""
    min_p: float = 0.0
    """The least share of the likeliest token's probability that a token must have to be drawn, in [0, 1]."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    """By token id."""
    min_tokens: int = 0
    """How many tokens are generated before a stop token may come."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def cuts(self) -> bool:
        """Whether top_k or min_p leave out tokens that might be drawn."""
        return not self.greedy and (self.top_k > 0 or self.min_p > 0)

    @property
    def penalises(self) -> bool:
        """Whether tokens that occur already are penalised."""
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
    """Return uniforms in [0, 1) for positions start … start + count - 1: [count] float64 (Philox 4x64)."""
    # One counter step gives four numbers; a position uses one step, so that neighbours never share one.
    key = np.array([seed & (2**64 - 1), use], dtype=np.uint64)  # a list with a seed of 64 bits would become floats
    bits = np.random.Philox(key=key, counter=[start, 0, 0, 0])
    return (bits.random_raw(4 * count)[::4] >> np.uint64(11)).astype(np.float64) * 2.0**-53
