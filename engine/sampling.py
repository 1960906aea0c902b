"""How a session samples, the truncated distributions that it draws from, and the uniforms that draw.

Uniforms depend on (seed, position, use) alone. Each position is decided once, with its own uniforms: that keeps
speculative sampling exact. Which token they lead to depends on what was proposed, and on the logits' last bits, unless
the runner is deterministic (`engine.judging.judge`).
"""

from dataclasses import dataclass

import numpy as np

USE_DRAFT, USE_ACCEPT, USE_TARGET = 0, 1, 2
LEAST_TEMPERATURE = 0.01  # of what is sampled; far below it the softmax overflows


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_p in (0, 1]."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Support:
    """A truncated distribution: ids [n] int64 distinct, probs [n] float32 summing to 1."""

    ids: np.ndarray
    probs: np.ndarray


def uniforms(seed: int, start: int, count: int, use: int) -> np.ndarray:
    """Uniforms in [0, 1) of positions start … start + count - 1, [count] float64 (Philox 4x64, counter-based)."""
    # One counter step gives four numbers; a position uses one step, so that neighbours never share one.
    key = np.array([seed & (2**64 - 1), use], dtype=np.uint64)  # a list with a seed of 64 bits would become floats
    bits = np.random.Philox(key=key, counter=[start, 0, 0, 0])
    return (bits.random_raw(4 * count)[::4] >> np.uint64(11)).astype(np.float64) * 2.0**-53
