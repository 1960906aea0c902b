"""How Triton judges: the logits of each position are split over programs, which hand on what they find.

A position is a place in a row, from 0 to γ: `row * (γ + 1) + place`. An entry's *depth* is (largest logit − logit) /
temperature · log2 e, and its weight 2^−depth. Depths are never negative, so that their bits are ordered as they are.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specahead.kernels.backends import follow, jit, overlapping_launch, power_of_two, tl

CHUNK = 4096  # entries of the vocabulary that a program takes; at most 32768, since lists hold int16
MAX_GAMMA = 31


class Split(NamedTuple):
    """How the vocabulary is split over programs. A kernel is compiled for each."""

    VOCAB: int
    CHUNK: int  # entries of a program
    SPLITS: int  # programs
    SPLITS_2: int  # the power of two that is not below SPLITS


class Logits(NamedTuple):
    """logits: [rows, γ + 1, vocab]; temperature, top_p: [rows], not read by greedy verdicts."""

    logits: Any
    temperature: Any
    top_p: Any


class Largest(NamedTuple):
    """The largest logit of each chunk of each position, its lowest index, and the sum of weights relative to it.

    logits, sums: [positions, SPLITS] float32; tokens: int32. `sums` is None where nobody draws.
    """

    logits: Any
    tokens: Any
    sums: Any


class Positions(NamedTuple):
    """What is known of each position: [positions] each.

    peak, mass: float32, the largest logit and the sum of all weights
    wanted: float32, the part of `mass` that top_p asks for
    lower, below: float32, a depth that the threshold's is not below, after a first round, and the mass at lower depths
    start, stop, before: float32, the depths between which the candidates for the threshold lie, after a second round,
        and the mass at lower depths than these
    cut, last: int32, the bits of the largest depth that is kept, and the last index that is kept at just this depth
    kept: float32, the mass that is kept
    passed: int32, whether the drafted token passes its test
    likeliest: int32, the likeliest token, of greedy rows only
    """

    peak: Any
    mass: Any
    wanted: Any
    lower: Any
    below: Any
    start: Any
    stop: Any
    before: Any
    kept: Any
    cut: Any
    last: Any
    passed: Any
    likeliest: Any


def empty_positions(count: int, device: torch.device) -> Positions:
    """Return undefined room for `count` positions. Each tensor begins at a multiple of 16 bytes, whatever the count."""
    room = -(-count // 4) * 4
    floats = torch.empty(9, room, dtype=torch.float32, device=device)[:, :count]
    ints = torch.empty(4, room, dtype=torch.int32, device=device)[:, :count]
    return Positions(*floats, *ints)


def split_vocabulary(logits: Tensor, gamma: int) -> dict[str, Any]:
    """Return how rows of logits are split, as keyword arguments of a launch that may overlap.

    Raises NotImplementedError for more than MAX_GAMMA drafted tokens.
    """
    if gamma > MAX_GAMMA:
        raise NotImplementedError(f"judging {gamma} drafted tokens; Triton takes up to {MAX_GAMMA}")
    vocab = logits.shape[2]
    splits = -(-vocab // CHUNK)
    return {"SPLIT": Split(vocab, CHUNK, splits, power_of_two(splits))} | overlapping_launch(logits.device)


def find_largest(given: Logits, counts: Tensor, gamma: int, split: dict[str, Any], sampled: bool) -> Largest:
    """Return the largest logits of all positions that count. counts: [rows], the drafted tokens of each row."""
    positions, device = given.logits.shape[0] * (gamma + 1), given.logits.device
    shape = positions, split["SPLIT"].SPLITS
    best, sums = (torch.empty(shape, dtype=torch.float32, device=device) if kept else None for kept in (True, sampled))
    largest = Largest(best, torch.empty(shape, dtype=torch.int32, device=device), sums)
    _largest_kernel[(shape[1], positions)](given, counts, largest, gamma, **split)
    return largest


def judge_greedy_in_triton(logits: Tensor, draft_tokens: Tensor, draft_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Judge as `specahead.kernels.rejection.judge_greedy` describes it."""
    (rows, gamma), device = draft_tokens.shape, logits.device
    split = split_vocabulary(logits, gamma)
    accepted, following = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    if rows:
        largest = find_largest(Logits(logits, None, None), draft_counts, gamma, split, False)
        places = power_of_two(gamma + 1)
        _greedy_verdict_kernel[(rows,)](
            largest, draft_tokens, draft_counts, accepted, following, gamma, PLACES=places, **split
        )
    return accepted, following


@jit
def logits_at(logits_ptr, at, index, SPLIT: tl.constexpr):
    """Return float32 logits of position `at`; -inf beyond the vocabulary."""
    row_ptr = logits_ptr + at.to(tl.int64) * SPLIT.VOCAB
    return tl.load(row_ptr + index, mask=index < SPLIT.VOCAB, other=-float("inf")).to(tl.float32)


@jit
def scale_of(temperature_ptr, row):
    """Return the factor from logits to depths; 0 in a greedy row."""
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    return tl.where(temperature == 0, 0.0, 1.4426950408889634 / tl.maximum(temperature, 1e-30))


@jit
def depth_of(logits, peak, scale):
    """Return depths, the same in all kernels: nothing in it can be fused."""
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


@jit
def _largest_kernel(given, counts_ptr, largest, gamma, SPLIT: tl.constexpr, PDL: tl.constexpr):
    """Find the largest logit of one chunk of one position."""
    follow(PDL)
    split, at = tl.program_id(0), tl.program_id(1)
    row = at // (gamma + 1)
    if at % (gamma + 1) > tl.load(counts_ptr + row):
        return
    index = split * SPLIT.CHUNK + tl.arange(0, SPLIT.CHUNK)
    logits = logits_at(given.logits, at, index, SPLIT)
    best = tl.max(logits, 0)
    to = at * SPLIT.SPLITS + split
    tl.store(largest.logits + to, best)
    tl.store(largest.tokens + to, tl.min(tl.where(logits == best, index, SPLIT.VOCAB), 0))
    if largest.sums is not None:
        scale = scale_of(given.temperature, row)
        if scale > 0:
            base = tl.where(best == -float("inf"), 0.0, best)
            tl.store(largest.sums + to, tl.sum(tl.exp2(-depth_of(logits, base, scale)), 0))


@jit
def likeliest_of(largest, at, inside, SPLIT: tl.constexpr):
    """Return the likeliest token of positions `at` [n], the lowest of equally likely ones; 0 where not `inside`."""
    split = tl.arange(0, SPLIT.SPLITS_2)[None, :]
    inside = inside[:, None] & (split < SPLIT.SPLITS)
    best = tl.load(largest.logits + at[:, None] * SPLIT.SPLITS + split, mask=inside, other=-float("inf"))
    tokens = tl.load(largest.tokens + at[:, None] * SPLIT.SPLITS + split, mask=inside, other=0)
    return tl.min(tl.where(inside & (best == tl.max(best, 1)[:, None]), tokens, 2**31 - 1), 1)


@jit
def _greedy_verdict_kernel(
    largest,
    draft_tokens_ptr,
    counts_ptr,
    accepted_ptr,
    following_ptr,
    gamma,
    PLACES: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Judge one row from its likeliest tokens."""
    follow(PDL)
    row = tl.program_id(0)
    place = tl.arange(0, PLACES)
    count = tl.load(counts_ptr + row).to(tl.int32)
    likeliest = likeliest_of(largest, row * (gamma + 1) + place, place <= count, SPLIT)
    drafted = tl.load(draft_tokens_ptr + row * gamma + place, mask=place < count, other=-1).to(tl.int32)
    accepted = tl.min(tl.where((place < count) & (drafted == likeliest), PLACES, place), 0)
    tl.store(accepted_ptr + row, accepted)
    tl.store(following_ptr + row, tl.sum(tl.where(place == accepted, likeliest, 0), 0))
