"""How the vocabulary is split over programs, what kernels hand on to one another, and the depths that they compare.

An entry's *depth* is (largest logit − logit) / temperature · log2 e, its weight 2^−depth.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from specahead.kernels.backends import jit, overlapping_launch, power_of_two, tl, triton

CHUNK = 4096  # entries of the vocabulary that a program takes; at most 32768: lists hold int16
MAX_GAMMA = 31

# A number that kernels may refer to; they are defined without Triton too.
_constant: Callable[[int], Any] = int if triton is None else tl.constexpr

EDGES = _constant(8)  # depths at which a round sums (specahead.kernels.rejection.bracket)
SUPPORT = _constant(128)  # entries of a draft's distribution that are taken at once

# Floats of a position that kernels hand on: [rows * (γ + 1), FLOATS].
PEAK = _constant(0)  # the largest logit
MASS = _constant(1)  # all weights' sum
WANTED = _constant(2)  # the share of it to be kept
LOWER = _constant(3)  # the threshold's bracket after the first round: a depth, and the mass above it
BELOW_LOWER = _constant(4)
FROM = _constant(5)  # and after the second: candidates have at least this depth
BELOW_FROM = _constant(6)
KEPT = _constant(7)  # the sum of the weights that are kept
FLOATS = _constant(8)
# And integers.
CUT = _constant(0)  # bits of the largest depth that is kept
LAST = _constant(1)  # the last index that is kept at just this depth
PASSED = _constant(2)  # whether the drafted token passes its test
LIKELIEST = _constant(3)  # of greedy rows
INTS = _constant(4)


def split_vocabulary(logits: Tensor, gamma: int) -> dict[str, int]:
    """Return how rows of logits are split, and arguments of overlapping launches.

    A variant is compiled for each vocabulary and each power of two of γ + 1.

    Raises NotImplementedError for more than MAX_GAMMA drafted tokens.
    """
    if gamma > MAX_GAMMA:
        raise NotImplementedError(f"judging {gamma} drafted tokens; Triton takes up to {MAX_GAMMA}")
    vocab = logits.shape[2]
    splits = -(-vocab // CHUNK)
    cut = {"VOCAB": vocab, "CHUNK": CHUNK, "SPLITS": splits, "SPLITS_2": power_of_two(splits)}
    return cut | overlapping_launch(logits.device)


@jit
def logits_at(logits_ptr, at, index, VOCAB: tl.constexpr):
    """float32 logits of position `at`; -inf beyond the vocabulary."""
    row_ptr = logits_ptr + at.to(tl.int64) * VOCAB
    return tl.load(row_ptr + index, mask=index < VOCAB, other=-float("inf")).to(tl.float32)


@jit
def scale_of(temperature_ptr, row):
    """From logits to depths; 0 in a greedy row."""
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    return tl.where(temperature == 0, 0.0, 1.4426950408889634 / tl.maximum(temperature, 1e-30))


@jit
def depth_of(logits, peak, scale):
    """Never negative, so that its bits are ordered as it is. The same in all kernels: nothing in it can be fused."""
    return (peak - logits) * scale


@jit
def bits_of(depth):
    return depth.to(tl.int32, bitcast=True)


@jit
def weight_of(bits):
    return tl.exp2(-bits.to(tl.float32, bitcast=True))


@jit
def is_kept(bits, index, cut, last):
    return (bits < cut) | ((bits == cut) & (index <= last))
