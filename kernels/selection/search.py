"""The search for a row's threshold, and writing what is at or above it: what short and long rows share.

Weights order as their bit patterns do, since none is negative. A key is a weight's bits, -1 where there is none. A
search keeps `lo` and `hi`, keys that are reached by enough and by too little: reached is the number of keys at or above
it, or, of a nucleus, their weight. A state is a tuple (lo, hi, reached at lo, reached at hi, keys at or above lo, keys
at or above hi).
"""

from kernels.backends import jit, tl


def unit_of(n: int) -> int:
    """Return what the compiler is told that a row's length is a multiple of: entries that can be loaded at once."""
    return 4 if n % 4 == 0 else 1


@jit
def load_keys(values_ptr, at, size, UNIT: tl.constexpr):
    """Of entries `at` below `size`. What follows these up to a whole unit must be there, but does not count."""
    value = tl.load(values_ptr + at, mask=at < (size + UNIT - 1) // UNIT * UNIT, other=0.0)
    return tl.where(at < size, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)  # -0.0 is 0.0


@jit
def worth_of(key, NUCLEUS: tl.constexpr):
    """What a key adds to what is reached."""
    worth = tl.where(key >= 0, 1.0, 0.0)
    if NUCLEUS:
        worth = tl.where(key > 0, key.to(tl.float32, bitcast=True), 0.0)
    return worth


@jit
def aim(k_ptr, row, size, total, mass, NUCLEUS: tl.constexpr):
    """What is to be reached, and whether there is a choice; total: of all, of a nucleus."""
    if NUCLEUS:
        wanted = mass * total
        choosing = total > 0
    else:
        wanted = tl.minimum(tl.load(k_ptr + row).to(tl.int32), size).to(tl.float32)
        choosing = (wanted > 0) & (wanted < size.to(tl.float32))
    return wanted, choosing


@jit
def without_choice(wanted, NUCLEUS: tl.constexpr):
    """The threshold where all or nothing is chosen; of no weight at all, all."""
    lo = (wanted * 0).to(tl.int32)
    if not NUCLEUS:
        lo = tl.where(wanted > 0, 0, 0x7F800001)  # past infinity
    return lo


@jit
def is_open_still(wanted, state, NUCLEUS: tl.constexpr):
    """Whether the search has to go on."""
    lo, hi, at_lo, _at_hi, many_lo, many_hi = state
    is_open = (hi - lo > 1) & (many_lo - many_hi > 1)
    if not NUCLEUS:
        is_open = is_open & (at_lo != wanted)
    return is_open


@jit
def tighten(probe, reached, count, wanted, state):
    """The state by one probe more; of several, in ascending order."""
    lo, hi, at_lo, at_hi, many_lo, many_hi = state
    enough = reached >= wanted
    lower = enough & (probe > lo)
    upper = (reached < wanted) & (probe < hi)
    lo = tl.where(lower, probe, lo)
    at_lo = tl.where(lower, reached, at_lo)
    many_lo = tl.where(lower, count, many_lo)
    hi = tl.where(upper, probe, hi)
    at_hi = tl.where(upper, reached, at_hi)
    many_hi = tl.where(upper, count, many_hi)
    return lo, hi, at_lo, at_hi, many_lo, many_hi


@jit
def _probe(part, lo, hi):
    probe = lo + ((hi - lo).to(tl.float32) * tl.minimum(tl.maximum(part, 0.0), 1.0)).to(tl.int32)
    return tl.minimum(tl.maximum(probe, lo + 1), hi - 1)


@jit
def probes_of(wanted, state, turn):
    """Four probes: about where the threshold is if the keys between the bounds are spread evenly; else at fifths."""
    lo, hi, at_lo, at_hi, many_lo, many_hi = state
    share = (at_lo - wanted) / tl.maximum(at_lo - at_hi, 1e-30)
    spread = 1.0 / tl.sqrt(tl.maximum(many_lo - many_hi, 1).to(tl.float32))
    evenly = (spread > 0.33) | (turn == 2)
    first = tl.where(evenly, 0.2, share - 1.2 * spread)
    step = tl.where(evenly, 0.2, 0.8 * spread)
    return (
        _probe(first, lo, hi),
        _probe(first + step, lo, hi),
        _probe(first + 2 * step, lo, hi),
        _probe(first + 3 * step, lo, hi),
    )


@jit
def _reached(key, probe, base, count, NUCLEUS: tl.constexpr):
    """probe: more than 0, so that what is at or above it has the worth of its bits"""
    reached = count.to(tl.float32)
    if NUCLEUS:
        reached = base + tl.sum(tl.where(key >= probe, key.to(tl.float32, bitcast=True), 0.0), 0)
    return reached


@jit
def narrow(key, probes, base, many, wanted, state, NUCLEUS: tl.constexpr):
    """Search until no more than one weight lies between the bounds.

    probes: four, ascending, tried first; base, many: what keys that are not here reach, and their number
    """
    tl.static_assert(key.shape[0] < 65536)
    turn = state[5] * 0
    p0, p1, p2, p3 = probes
    while is_open_still(wanted, state, NUCLEUS):
        # Four counts in one sum: what costs is that all warps meet.
        below = tl.where(key >= p0, 1, 0) + tl.where(key >= p1, 65536, 0)
        above = tl.where(key >= p2, 1, 0) + tl.where(key >= p3, 65536, 0)
        counts = tl.sum(below.to(tl.int64) + (above.to(tl.int64) << 32), 0)
        n0 = many + (counts & 65535).to(tl.int32)
        n1 = many + ((counts >> 16) & 65535).to(tl.int32)
        n2 = many + ((counts >> 32) & 65535).to(tl.int32)
        n3 = many + ((counts >> 48) & 65535).to(tl.int32)
        r0 = _reached(key, p0, base, n0, NUCLEUS)
        r1 = _reached(key, p1, base, n1, NUCLEUS)
        r2 = _reached(key, p2, base, n2, NUCLEUS)
        r3 = _reached(key, p3, base, n3, NUCLEUS)
        state = tighten(p0, r0, n0, wanted, state)
        state = tighten(p1, r1, n1, wanted, state)
        state = tighten(p2, r2, n2, wanted, state)
        state = tighten(p3, r3, n3, wanted, state)
        turn = tl.where(turn == 2, 0, turn + 1)  # every third time evenly: ties are not spread evenly at all
        p0, p1, p2, p3 = probes_of(wanted, state, turn)
    return state


@jit
def about(sample, share, deviations, slack, NUCLEUS: tl.constexpr):
    """Where a sample, all compared with all, has the threshold, give or take so many standard deviations and entries.

    The least above 0 of the sample where it says nothing of what is below; its greatest likewise.
    """
    worth = worth_of(sample, NUCLEUS)
    reached = tl.sum(tl.where(sample[:, None] >= sample[None, :], worth[:, None], 0.0), 0)
    held = tl.sum(worth, 0)
    weight = tl.where(reached - worth < share * held, 1.0 - share, share) * worth
    error = deviations * tl.sqrt(tl.sum(weight * weight, 0)) + slack * held / sample.shape[0]
    least = tl.min(tl.where(sample > 0, sample, 0x7F800000), 0)
    first = tl.maximum(tl.max(tl.where(reached >= share * held + error, sample, 0), 0), least)
    last = tl.max(tl.where(reached >= tl.maximum(share * held - error, 1e-30), sample, 0), 0)
    return first, tl.maximum(last, first)


@jit
def count_keys(key, lo, hi):
    """Of what is at or above `hi`, of what is between the bounds."""
    both = tl.sum(tl.where(key >= hi, 1, tl.where(key >= lo, 65536, 0)), 0)
    return both & 65535, both >> 16


@jit
def write_list(list_ptr, at, key, lo, hi, sure_before, ties_before, ties, left, width):
    """Of entries `at`, those at or above `hi`, and of those between the bounds, `ties`, the first `left` of the row."""
    chosen = (key >= tl.where(left > ties_before, lo, hi)).to(tl.int32)
    if (left > ties_before) & (left < ties_before + ties):
        tied = ((key >= lo) & (key < hi)).to(tl.int32)
        chosen = tl.where((tied == 1) & (ties_before + tl.cumsum(tied, 0) > left), 0, chosen)
    place = sure_before + tl.minimum(ties_before, left) + tl.cumsum(chosen, 0) - 1
    place = tl.where(chosen == 1, place, width)
    tl.store(list_ptr + place, at, mask=place < width)
