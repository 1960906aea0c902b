"""A search for a threshold among keys, as functions for Triton kernels: `specahead.kernels.selection` and
`specahead.kernels.rejection` use it.

A key is an integer that orders entries. The search looks for the greatest key such that the entries at or above it
amount to enough: their number, or the sum of their weights. It probes four keys a pass. How the entries at or above a
probe are measured is a function of the caller's, since entries may lie in registers or in memory.
"""

from typing import Any, NamedTuple

from specahead.kernels.backends import jit, tl


class Bounds(NamedTuple):
    """Two keys with the threshold between them. The keys may be int32 or int64.

    lo: a key at or above which there is enough; hi: a greater one at or above which there is not
    at_lo, at_hi: the number or the weight of the entries at or above each
    many_lo, many_hi: the number of these entries, int32
    """

    lo: Any
    hi: Any
    at_lo: Any
    at_hi: Any
    many_lo: Any
    many_hi: Any


@jit
def search(MEASURE: tl.constexpr, source, probes, wanted, bounds, WEIGHTS: tl.constexpr, EVENLY: tl.constexpr = False):
    """Narrow `bounds` until at most one entry lies between them, and return them.

    MEASURE: a jit function of (source, probes) that returns what the entries at or above each of four ascending probes
        amount to, and their numbers, as two tuples
    probes: four ascending keys to try first; None: keys by `bounds`. wanted: the amount that is enough
    WEIGHTS: whether amounts are weights; else they are numbers, and the search may end where a number is exactly wanted
    EVENLY: whether the bounds are always cut into fifths, which suits entries that share a few keys
    """
    turn = bounds.many_hi * 0
    if probes is None:
        probes = _probes_between(wanted, bounds, turn, EVENLY)
    while _is_open(wanted, bounds, WEIGHTS):
        reached, counts = MEASURE(source, probes)
        for i in tl.static_range(4):
            bounds = _tighten(probes[i], reached[i], counts[i], wanted, bounds)
        turn = tl.where(turn == 2, 0, turn + 1)
        probes = _probes_between(wanted, bounds, turn, EVENLY)
    return bounds


@jit
def count_at_or_above(keys, probes):
    """Return how many of fewer than 65,536 keys, a tensor of any shape, are at or above each of four probes."""
    tl.static_assert(keys.numel < 65536)
    # Four counts in one sum: the cost of a sum is that all warps meet.
    first = tl.where(keys >= probes[0], 1, 0) + tl.where(keys >= probes[1], 65536, 0)
    second = tl.where(keys >= probes[2], 1, 0) + tl.where(keys >= probes[3], 65536, 0)
    counts = tl.sum(first.to(tl.int64) + (second.to(tl.int64) << 32))
    return (
        (counts & 65535).to(tl.int32),
        ((counts >> 16) & 65535).to(tl.int32),
        ((counts >> 32) & 65535).to(tl.int32),
        ((counts >> 48) & 65535).to(tl.int32),
    )


@jit
def _is_open(wanted, bounds, WEIGHTS: tl.constexpr):
    """Whether the search has to go on. It need not begin where nothing is wanted, or no entry has weight."""
    unmet = bounds.at_lo > 0 if WEIGHTS else (bounds.at_lo != wanted) & (wanted > 0)
    return (bounds.hi - bounds.lo > 1) & (bounds.many_lo - bounds.many_hi > 1) & unmet


@jit
def _tighten(probe, reached, count, wanted, bounds):
    """Return the bounds after one more probe; probes come in ascending order."""
    lower = (reached >= wanted) & (probe > bounds.lo)
    upper = (reached < wanted) & (probe < bounds.hi)
    return Bounds(
        lo=tl.where(lower, probe, bounds.lo),
        hi=tl.where(upper, probe, bounds.hi),
        at_lo=tl.where(lower, reached, bounds.at_lo),
        at_hi=tl.where(upper, reached, bounds.at_hi),
        many_lo=tl.where(lower, count, bounds.many_lo),
        many_hi=tl.where(upper, count, bounds.many_hi),
    )


@jit
def _probes_between(wanted, bounds, turn, EVENLY: tl.constexpr):
    """Return four probes around the threshold's place if the keys between the bounds are spread evenly, else at fifths.

    Every third turn takes fifths in any case: keys that tie are not spread evenly at all.
    """
    if EVENLY:
        first, step = 0.2, 0.2
    else:
        share = (bounds.at_lo - wanted).to(tl.float32) / tl.maximum((bounds.at_lo - bounds.at_hi).to(tl.float32), 1e-30)
        spread = 1.0 / tl.sqrt(tl.maximum(bounds.many_lo - bounds.many_hi, 1).to(tl.float32))
        evenly = (spread > 0.33) | (turn == 2)
        first = tl.where(evenly, 0.2, share - 1.2 * spread)
        step = tl.where(evenly, 0.2, 0.8 * spread)
    return (
        _probe(first, bounds.lo, bounds.hi),
        _probe(first + step, bounds.lo, bounds.hi),
        _probe(first + 2 * step, bounds.lo, bounds.hi),
        _probe(first + 3 * step, bounds.lo, bounds.hi),
    )


@jit
def _probe(part, lo, hi):
    """Return the key at `part` of the way from one to the other, neither of them."""
    part = tl.minimum(tl.maximum(part, 0.0), 1.0)
    probe = lo + ((hi - lo).to(tl.float32) * part).to(lo.dtype)
    return tl.minimum(tl.maximum(probe, lo + 1), hi - 1)
