"""The nucleus of each position in Triton: the entries up to some depth, and at just this depth those of lower indices.

Two rounds of sums at EDGES depths each leave a narrower bracket around the threshold. The entries in the second
bracket, some thousand, are listed as candidates, which one program searches (`verdicts`). Every sum has a fixed order,
and what one kernel decides is stored for the next, so that results depend on nothing but the inputs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specahead.kernels.backends import constant, follow, jit, tl
from specahead.kernels.rejection.positions import (
    Largest,
    Logits,
    Positions,
    depth_of,
    empty_positions,
    find_largest,
    logits_at,
    scale_of,
)

EDGES = constant(8)  # depths at which a round sums


class Edges(NamedTuple):
    """Depths of one round, [positions, EDGES] float32, and each chunk's mass above them, [positions, SPLITS, EDGES]."""

    depths: Any
    sums: Any


class Listed(NamedTuple):
    """The candidates of each chunk, [positions, SPLITS, CHUNK] int16, and their numbers, [positions, SPLITS] int32."""

    entries: Any
    counts: Any


def find_candidates(
    given: Logits, counts: Tensor, gamma: int, split: dict[str, Any]
) -> tuple[Positions, Largest, Listed]:
    """Return what is known of each position up to `before`, its largest logits, and the candidates for its threshold.

    counts: [rows], the drafted tokens of each row
    """
    (_, _, splits, _), device = split["SPLIT"], counts.device
    every = given.logits.shape[0] * (gamma + 1)
    found, largest = empty_positions(every, device), find_largest(given, counts, gamma, split, True)
    coarse, fine = (
        Edges(
            torch.empty(every, int(EDGES), dtype=torch.float32, device=device),
            torch.empty(every, splits, int(EDGES), dtype=torch.float32, device=device),
        )
        for _ in range(2)
    )
    listed = Listed(
        torch.empty(every, splits, split["SPLIT"].CHUNK, dtype=torch.int16, device=device),
        torch.empty(every, splits, dtype=torch.int32, device=device),
    )
    grid = splits, every
    _coarse_kernel[grid](given, counts, largest, found, coarse, gamma, **split)
    _fine_kernel[grid](given, counts, found, coarse, fine, gamma, **split)
    _list_kernel[grid](given, counts, found, fine, listed, gamma, **split)
    return found, largest, listed


@jit
def _store_sums(edges, at, split, depth, depths, SPLIT: tl.constexpr):
    """Store a chunk's mass above each of eight depths, and, by one program for each position, these depths."""
    weights = tl.exp2(-depth)
    parts = ()
    for k in tl.static_range(EDGES):
        if split == 0:
            tl.store(edges.depths + at * EDGES + k, depths[k])
        above = tl.where(depth < depths[k], weights, 0.0)
        # Over eight neighbours, which one thread holds; then all eight by one reduction across threads.
        parts = parts + (tl.sum(tl.reshape(above, [SPLIT.CHUNK // 8, 8]), 1),)  # type: ignore[assignment]
    evens = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))  # type: ignore[misc]
    odds = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))  # type: ignore[misc]
    sums = tl.reshape(tl.sum(tl.join(evens, odds), 0), [8])
    tl.store(edges.sums + (at * SPLIT.SPLITS + split) * EDGES + tl.arange(0, EDGES), sums)


@jit
def _crossing(edges, at, wanted, lower, below, SPLIT: tl.constexpr):
    """Find between which of a round's depths the mass reaches `wanted`; depth `lower` with the mass `below` is first.

    Returns the bracket [lower, upper), the mass below it, and the mass in it and in its two neighbours.
    """
    k = tl.arange(0, EDGES)
    splits = tl.arange(0, SPLIT.SPLITS_2)[:, None]
    here = edges.sums + (at * SPLIT.SPLITS + splits) * EDGES + k[None, :]
    mass = tl.sum(tl.load(here, mask=splits < SPLIT.SPLITS, other=0.0), 0)
    depths = tl.load(edges.depths + at * EDGES + k)
    # Rounding can leave all short of it; then all entries of the last bracket are wanted.
    j = tl.minimum(tl.sum((mass < wanted).to(tl.int32), 0), EDGES - 1)
    first = below
    below = tl.max(tl.where(k < j, mass, first), 0)
    upto = tl.sum(tl.where(k == j, mass, 0.0), 0)
    inside = upto - below
    before = below - tl.max(tl.where(k < j - 1, mass, first), 0)
    after = tl.where(j < EDGES - 1, tl.sum(tl.where(k == j + 1, mass, 0.0), 0) - upto, inside)
    upper = tl.sum(tl.where(k == j, depths, 0.0), 0)
    lower = tl.max(tl.where(k < j, depths, lower), 0)
    return lower, upper, below, inside, before, after


@jit
def _coarse_kernel(given, counts_ptr, largest, found, edges, gamma, SPLIT: tl.constexpr, PDL: tl.constexpr):
    """Find a position's peak and mass, and sum a chunk above EDGES depths that share out the possible ones."""
    follow(PDL)
    split, at = tl.program_id(0), tl.program_id(1)
    row = at // (gamma + 1)
    scale = scale_of(given.temperature, row)
    if (at % (gamma + 1) > tl.load(counts_ptr + row)) | (scale == 0):
        return
    splits = tl.arange(0, SPLIT.SPLITS_2)
    here = at * SPLIT.SPLITS + splits
    best = tl.load(largest.logits + here, mask=splits < SPLIT.SPLITS, other=-float("inf"))
    sums = tl.load(largest.sums + here, mask=splits < SPLIT.SPLITS, other=0.0)
    peak = tl.max(best, 0)
    mass = tl.sum(sums * tl.exp2(-depth_of(best, peak, scale)), 0)
    top_p = tl.load(given.top_p + row).to(tl.float32)
    if split == 0:
        tl.store(found.peak + at, peak)
        tl.store(found.mass + at, mass)
        tl.store(found.wanted + at, top_p * mass)
    if top_p < 1:
        # The entries at and after the threshold weigh at least (1 - top_p) of all, and are at most VOCAB: the least
        # that the threshold's own can weigh is that over VOCAB. The margin is for rounding.
        reach = tl.log2(SPLIT.VOCAB / (mass * (1.0 - top_p))) + 0.01
        index = split * SPLIT.CHUNK + tl.arange(0, SPLIT.CHUNK)
        depth = depth_of(logits_at(given.logits, at, index, SPLIT), peak, scale)
        depths = ()
        for k in tl.static_range(EDGES):
            depths = depths + (reach * ((k + 1) / EDGES),)  # type: ignore[assignment]
        _store_sums(edges, at, split, depth, depths, SPLIT)


@jit
def _fine_kernel(given, counts_ptr, found, coarse, edges, gamma, SPLIT: tl.constexpr, PDL: tl.constexpr):
    """Sum a chunk above EDGES depths in the bracket, ever closer to where the threshold should be."""
    follow(PDL)
    split, at = tl.program_id(0), tl.program_id(1)
    row = at // (gamma + 1)
    scale = scale_of(given.temperature, row)
    top_p = tl.load(given.top_p + row).to(tl.float32)
    if (at % (gamma + 1) > tl.load(counts_ptr + row)) | (scale == 0) | (top_p >= 1):
        return
    index = split * SPLIT.CHUNK + tl.arange(0, SPLIT.CHUNK)
    logits = logits_at(given.logits, at, index, SPLIT)  # while other loads wait
    peak = tl.load(found.peak + at)
    wanted = tl.load(found.wanted + at)
    lower, upper, below, inside, before, after = _crossing(coarse, at, wanted, 0.0, 0.0, SPLIT)
    if split == 0:
        tl.store(found.lower + at, lower)
        tl.store(found.below + at, below)
    # Mass per depth taken as a line between the means with the neighbours: where it has reached what is wanted.
    share = tl.minimum(tl.maximum((wanted - below) / tl.maximum(inside, 1e-30), 0.0), 1.0)
    here, there = before + inside, inside + after
    both = share * (here + there)
    guess = both / tl.maximum(here + tl.sqrt(tl.maximum(here * here + (there - here) * both, 0.0)), 1e-30)
    depths = ()
    for k in tl.static_range(EDGES - 1):
        # -1/2, -1/8, … and …, 1/16, 1/4; the last depth is the bracket's own.
        part = guess - 2.0 * 0.25 ** (k + 1) if k < EDGES // 2 else guess + 0.25 ** (EDGES - 1 - k)
        depths = depths + (lower + (upper - lower) * tl.minimum(tl.maximum(part, 0.0), 1.0),)  # type: ignore[assignment]
    _store_sums(edges, at, split, depth_of(logits, peak, scale), depths + (upper,), SPLIT)


@jit
def _list_kernel(given, counts_ptr, found, fine, listed, gamma, SPLIT: tl.constexpr, PDL: tl.constexpr):
    """List, ascending, the entries of a chunk that lie in the second round's bracket."""
    follow(PDL)
    split, at = tl.program_id(0), tl.program_id(1)
    row = at // (gamma + 1)
    scale = scale_of(given.temperature, row)
    top_p = tl.load(given.top_p + row).to(tl.float32)
    if (at % (gamma + 1) > tl.load(counts_ptr + row)) | (scale == 0) | (top_p >= 1):
        return
    inner = tl.arange(0, SPLIT.CHUNK)
    logits = logits_at(given.logits, at, split * SPLIT.CHUNK + inner, SPLIT)  # while other loads wait
    peak = tl.load(found.peak + at)
    wanted = tl.load(found.wanted + at)
    lower, below = tl.load(found.lower + at), tl.load(found.below + at)
    start, stop, before, _, _, _ = _crossing(fine, at, wanted, lower, below, SPLIT)
    if split == 0:
        tl.store(found.start + at, start)
        tl.store(found.stop + at, stop)
        tl.store(found.before + at, before)
    depth = depth_of(logits, peak, scale)
    inside = (depth >= start) & (depth < stop)
    order = tl.cumsum(inside.to(tl.int32), 0)
    place = (at.to(tl.int64) * SPLIT.SPLITS + split) * SPLIT.CHUNK + order - 1
    tl.store(listed.entries + place, inner.to(tl.int16), mask=inside)
    tl.store(listed.counts + at * SPLIT.SPLITS + split, tl.sum(inside.to(tl.int32), 0))
