"""From rows of block weights to compact, ascending block lists: top-k, nucleus, one budget over many rows, bitmaps.

The Triton kernels never wait for the host, so a CUDA graph can hold them: `width`, the lists' capacity, is given.
They search thresholds on the weights' bit patterns, which order as the weights do since none is negative.
"""

from __future__ import annotations  # `tl` may be None

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, tl

_BUILT = ("torch", "triton")
_CHUNK = 8192  # entries of a row that a program holds at a time
_TILE_ROWS, _TILE_COLUMNS = 8, 512  # of the scores that a program of `select_top_k_over_all` counts at a time
_PROGRAMS = 1024  # that fill a GPU
_CANDIDATES = 65536  # of a group, kept aside when the first two digits of its threshold are known
# The lowest bit and the width of each digit of a positive float32, the highest first. 128 bins cost little more
# than 32: Triton 3.6 counts by votes of a warp, a few instructions a bin and a dozen a bit.
_DIGITS = ((24, 7), (17, 7), (11, 6), (5, 6), (0, 5))
_COARSE = 2  # digits found on all scores; the others on the candidates


def select_top_k(
    weights: Tensor, valid: Tensor, k: Tensor, backend: str = "torch", width: int | None = None
) -> tuple[Tensor, Tensor]:
    """The `k` heaviest entries of each row among its first `valid` ones; ties go to the lower index.

    weights: [rows, n] float, finite and not negative (checked on a CPU only); float32 for `triton`
    valid, k: [rows] int; a k beyond `valid` selects all, one beyond `width` is cut to it
    width: of the lists; None, for `torch` only, is the greatest count
    Returns lists [rows, width] int32 ascending, and counts [rows] int32; entries past the count are 0.
    """
    check_backend("select_top_k", backend, _BUILT)
    if backend == "torch":
        if width is not None:
            k = k.clamp(max=width)
        return compact(top_k_mask(weights, valid, k), width)
    return _select_rows("select_top_k", weights, valid, k, None, width)


def top_k_mask(weights: Tensor, valid: Tensor, k: Tensor) -> Tensor:
    """`select_top_k` as bool [rows, n]."""
    _check_weights("select_top_k", weights)
    return _heaviest(weights, valid, k)


def select_nucleus(
    weights: Tensor, valid: Tensor, mass: float, backend: str = "torch", width: int | None = None
) -> tuple[Tensor, Tensor]:
    """The entries at or above the highest threshold that leaves at least `mass` of each row's total weight.

    So the smallest set that holds the mass, with all that tie its lightest entry; SpecAttn (Algorithm 2) bisects
    towards it. A nucleus of more than `width` entries is cut to its `width` heaviest, ties to the lower index.
    `triton` adds in float32: what it keeps may miss or exceed the mass by 10⁻⁶ of the total.
    0 < mass <= 1; the other arguments and the result are as for `select_top_k`.
    """
    check_backend("select_nucleus", backend, _BUILT)
    if not 0 < mass <= 1:
        raise ValueError(f"select_nucleus: mass must lie in (0, 1], got {mass}")
    if backend == "torch":
        chosen = nucleus_mask(weights, valid, mass)
        if width is not None:
            # Ties stay whole, so a nucleus of c entries is the c heaviest.
            chosen = _heaviest(weights, valid, chosen.sum(1).clamp(max=width))
        return compact(chosen, width)
    return _select_rows("select_nucleus", weights, valid, None, mass, width)


def nucleus_mask(weights: Tensor, valid: Tensor, mass: float) -> Tensor:
    """`select_nucleus` as bool [rows, n]."""
    _check_weights("select_nucleus", weights)
    if not 0 < mass <= 1:
        raise ValueError(f"select_nucleus: mass must lie in (0, 1], got {mass}")
    inside = torch.arange(weights.shape[1], device=weights.device) < valid[:, None]
    if not weights.shape[1]:
        return inside
    masked = weights.where(inside, 0)
    ordered = masked.sort(dim=1, descending=True).values
    held = ordered.double().cumsum(1)
    last = (held < mass * held[:, -1:]).sum(1, keepdim=True)
    return inside & (masked >= ordered.gather(1, last))


def select_top_k_over_all(
    scores: Tensor,
    count: Tensor,
    valid: Tensor,
    width: int,
    forced: Tensor | None = None,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """One budget for all the rows of a group: its `count` highest positive scores, and all that is forced.

    scores: [groups, rows, n] float32, finite and not negative; ties go to the lower row, then to the lower entry
    count: [groups] int, of entries that are not forced; valid: [groups] int, entries of a row that are considered
    forced: [groups, rows, n] bool or uint8, not 0 where a valid entry is taken whatever it scores
    width: of the lists. A row with more keeps what is forced, then its highest scores, ties to the lower entry; what
    it loses goes to no other row.
    Returns lists [groups, rows, width] int32 ascending and counts [groups, rows] int32; entries past them are 0.
    """
    check_backend("select_top_k_over_all", backend, _BUILT)
    groups, rows, n = scores.shape
    if backend == "triton":
        return _select_over_all(scores, count, valid, width, forced)
    _check_weights("select_top_k_over_all", scores)
    inside = (torch.arange(n, device=scores.device) < valid[:, None, None]).expand(scores.shape)
    given = torch.zeros_like(inside) if forced is None else forced.bool() & inside
    free = scores.masked_fill(given | ~inside, 0)
    flat = free.flatten(1)
    best = _heaviest(flat, torch.full_like(count, flat.shape[1]), count).view(scores.shape)
    chosen = ((best & (free > 0)) | given).flatten(0, 1)
    rank = free.masked_fill(given, torch.inf).flatten(0, 1).where(chosen, -1.0)
    chosen = _heaviest(
        rank, torch.full((groups * rows,), n, device=rank.device), chosen.sum(1).clamp(max=width)
    )
    lists, counts = compact(chosen, width)
    return lists.view(groups, rows, width), counts.view(groups, rows)


def compact_bits(
    words: Tensor, valid: Tensor, width: int | None = None, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """Bitmaps as lists: the indices of each row's bits that are set, among its first `valid` ones.

    words: [rows, words] int64, bit b of word w (the lowest is 0) is entry 64 w + b (sparsity/selection.py)
    valid: [rows] int; width: of the lists, to whose first `width` entries a row is cut; None as in `select_top_k`
    Returns as `select_top_k` does.
    """
    check_backend("compact_bits", backend, _BUILT)
    rows, n = words.shape[0], words.shape[1] * 64
    if backend == "torch":
        column = torch.arange(n, device=words.device)
        chosen = (words[:, column // 64] >> (column % 64) & 1).bool() & (column < valid[:, None])
        return compact(chosen if width is None else chosen & (chosen.cumsum(1) <= width), width)
    _check_width("compact_bits", width)
    _check_layout("compact_bits", words, torch.int64)
    lists, counts = _empty_lists(words, (rows,), width)
    if rows:
        chunk, warps = _chunk_of(n)
        _compact_bits_kernel[(rows,)](
            words.view(torch.int32), valid, lists, counts, n, width, CHUNK=chunk, num_warps=warps
        )
    return lists, counts


def compact(chosen: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Bool [rows, n] to ascending lists [rows, width] int32 padded with 0, and counts [rows] int32.

    width: at least the greatest count, which it is if None.
    """
    counts = chosen.sum(1, dtype=torch.int32)
    if width is None:
        width = int(counts.max()) if counts.numel() else 0
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :width].to(torch.int32)
    order = torch.nn.functional.pad(order, (0, width - order.shape[1]))
    return order.where(torch.arange(width, device=chosen.device) < counts[:, None], 0), counts


def _heaviest(weights: Tensor, valid: Tensor, k: Tensor) -> Tensor:
    """bool [rows, n]: the k heaviest of the first `valid` ones; ties to the lower index."""
    columns = torch.arange(weights.shape[1], device=weights.device)
    ranked = weights.where(columns < valid[:, None], -1.0)
    order = ranked.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, columns.expand_as(order))
    return (rank < torch.minimum(k, valid)[:, None]) & (columns < valid[:, None])


def _check_weights(operation: str, weights: Tensor) -> None:
    if weights.device.type == "cpu" and not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ValueError(f"{operation}: weights must be finite and not negative")


def _check_width(operation: str, width: int | None) -> None:
    if width is None or width < 1:
        raise ValueError(
            f"{operation}: backend 'triton' needs width, at least 1: the capacity of the lists; got {width}"
        )


def _check_layout(operation: str, values: Tensor, dtype: torch.dtype) -> None:
    if values.dtype != dtype or not values.is_contiguous():
        raise ValueError(
            f"{operation}: backend 'triton' needs contiguous {dtype}, got {values.dtype} with strides {values.stride()}"
        )


def _empty_lists(like: Tensor, rows: tuple[int, ...], width: int | None) -> tuple[Tensor, Tensor]:
    assert width is not None
    lists = torch.empty(*rows, width, dtype=torch.int32, device=like.device)
    return lists, torch.empty(rows, dtype=torch.int32, device=like.device)


def _chunk_of(n: int) -> tuple[int, int]:
    """Entries that a program holds at a time, and its warps."""
    chunk = min(max(64, 1 << max(0, n - 1).bit_length()), _CHUNK)
    return chunk, min(16, max(4, chunk // 256))


def _select_rows(
    operation: str, weights: Tensor, valid: Tensor, k: Tensor | None, mass: float | None, width: int | None
) -> tuple[Tensor, Tensor]:
    """Top-k if there is a k, else the nucleus: one launch, one program a row."""
    _check_width(operation, width)
    _check_layout(operation, weights, torch.float32)
    rows, n = weights.shape
    lists, counts = _empty_lists(weights, (rows,), width)
    chunk, warps = _chunk_of(n)
    long = n > chunk
    aside = torch.empty(rows, chunk, dtype=torch.float32, device=weights.device) if long else weights
    if rows:
        _select_rows_kernel[(rows,)](
            weights,
            valid,
            valid if k is None else k,
            0.0 if mass is None else mass,
            aside,
            lists,
            counts,
            n,
            width,
            NUCLEUS=mass is not None,
            LONG=long,
            CHUNK=chunk,
            # More probes in a pass are fewer passes; a float's cost more, as warps add integers in one instruction.
            PROBES=4 if k is None else 8,
            num_warps=warps,
        )
    return lists, counts


def _select_over_all(
    scores: Tensor, count: Tensor, valid: Tensor, width: int, forced: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Nine launches: a fill, a histogram a digit, the candidates between them, ties, lists."""
    operation = "select_top_k_over_all"
    _check_width(operation, width)
    _check_layout(operation, scores, torch.float32)
    groups, rows, n = scores.shape
    device = scores.device
    if forced is not None:
        forced = forced.view(torch.uint8) if forced.dtype == torch.bool else forced
        _check_layout(operation, forced, torch.uint8)
    lists, counts = _empty_lists(scores, (groups, rows), width)
    if not scores.numel():
        return lists.zero_(), counts.zero_()
    tiles = max(1, -(-rows // _TILE_ROWS) * -(-n // _TILE_COLUMNS))
    each = -(-tiles // max(1, _PROGRAMS // groups))
    programs = -(-tiles // each)
    # Of each group and digit: 128 bins, the state before it (lo, hi, left); one more for the final state and for
    # the number of candidates.
    steps = len(_DIGITS)
    work = torch.zeros(groups, steps + 1, 128 + 4, dtype=torch.int32, device=device)
    candidates = torch.empty(groups, _CANDIDATES, dtype=torch.float32, device=device)
    ties = torch.empty(groups, rows, dtype=torch.int32, device=device)
    arguments = (scores, scores if forced is None else forced, count, valid, work, candidates)
    common = {"FORCED": forced is not None, "STEPS": steps}
    tile = {"TILE_ROWS": _TILE_ROWS, "TILE_COLUMNS": _TILE_COLUMNS, "CANDIDATES": _CANDIDATES, "num_warps": 4}
    for step, (shift, bits) in enumerate(_DIGITS):
        before = _DIGITS[step - 1] if step else (0, 0)
        shape = {"STEP": step, "BEFORE": before[0], "BEFORE_BINS": 1 << before[1]}
        if step == _COARSE:
            _candidates_kernel[(groups, programs)](
                *arguments, rows, n, tiles, each, **shape, **common, **tile
            )
        _digit_kernel[(groups, programs)](
            *arguments,
            rows,
            n,
            tiles,
            each,
            SHIFT=shift,
            BINS=1 << bits,
            ASIDE=step >= _COARSE,
            **shape,
            **common,
            **tile,
        )
    chunk, warps = _chunk_of(n)
    last = {"BEFORE": _DIGITS[-1][0], "BEFORE_BINS": 1 << _DIGITS[-1][1]}
    _ties_kernel[(groups * rows,)](
        *arguments, ties, rows, n, STEP=steps, CHUNK=chunk, num_warps=warps, **last, **common
    )
    _lists_kernel[(groups * rows,)](
        *arguments,
        ties,
        lists,
        counts,
        rows,
        n,
        width,
        CUT=width < n,
        CHUNK=chunk,
        ROWS=1 << max(0, rows - 1).bit_length(),
        num_warps=warps,
        **common,
    )
    return lists, counts


# In the kernels, an entry's key is its weight's bits; 0x7F800001, above infinity, where it is forced; -1 if it is none.
# A search ends with lo, hi and left: all keys from hi on are chosen, and the first `left` of those from lo to hi.


@jit
def _keys(values_ptr, forced_ptr, at, inside, FORCED: tl.constexpr):
    value = tl.load(values_ptr + at, mask=inside, other=0.0)
    key = tl.maximum(value.to(tl.int32, bitcast=True), 0)  # -0 is 0
    if FORCED:
        key = tl.where(tl.load(forced_ptr + at, mask=inside, other=0) != 0, 0x7F800001, key)
    return tl.where(inside, key, -1)


@jit
def _narrow(
    values_ptr,
    forced_ptr,
    size,
    base,
    lo,
    hi,
    at_lo,
    at_hi,
    want,
    limit,
    MASS: tl.constexpr,
    FORCED: tl.constexpr,
    CHUNK: tl.constexpr,
    PROBES: tl.constexpr,
):
    """Narrow lo and hi until at most `limit` entries lie between them, or lo alone.

    at_lo >= want > at_hi: how many keys reach lo and hi, or with MASS the sum of their weights; `base` of it comes
    from keys that are not among the `size` ones read here.
    """
    steps = tl.arange(0, PROBES) + 1
    if MASS:
        going = (hi - lo > 1) & (at_lo - at_hi > limit * lo.to(tl.float32, bitcast=True))
    else:
        going = (hi - lo > 1) & (at_lo - at_hi > limit) & (at_lo > want)
    while going:
        span = hi - lo
        probes = lo + span // (PROBES + 1) * steps + span % (PROBES + 1) * steps // (PROBES + 1)
        reached = tl.zeros([PROBES], tl.float32 if MASS else tl.int32) + base
        for start in tl.range(0, size, CHUNK):
            at = start + tl.arange(0, CHUNK)
            key = _keys(values_ptr, forced_ptr, at, at < size, FORCED)
            passed = key[None, :] >= probes[:, None]
            if MASS:
                weight = tl.where(passed, key.to(tl.float32, bitcast=True)[None, :], 0.0)
                reached += tl.sum(weight, 1)
            else:
                reached += tl.sum(passed.to(tl.int32), 1)
        enough = reached >= want
        at_lo = tl.min(tl.where(enough, reached, at_lo), 0)
        at_hi = tl.max(tl.where(enough, at_hi, reached), 0)
        lo = tl.max(tl.where(enough, probes, lo), 0)
        hi = tl.min(tl.where(enough, hi, probes), 0)
        if MASS:
            going = (hi - lo > 1) & (at_lo - at_hi > limit * lo.to(tl.float32, bitcast=True))
        else:
            going = (hi - lo > 1) & (at_lo - at_hi > limit) & (at_lo > want)
    return lo, hi, at_lo, at_hi


@jit
def _put_aside(values_ptr, size, lo, hi, aside_ptr, CHUNK: tl.constexpr):
    """Copy the entries from lo to hi, as far as CHUNK holds them; returns how many there are."""
    found = 0
    for start in tl.range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        key = _keys(values_ptr, values_ptr, at, at < size, False)
        member = ((key >= lo) & (key < hi)).to(tl.int32)
        place = found + tl.cumsum(member, 0) - 1
        tl.store(aside_ptr + place, key.to(tl.float32, bitcast=True), mask=(member > 0) & (place < CHUNK))
        found += tl.sum(member, 0)
    tl.debug_barrier()
    return found


@jit
def _search(
    values_ptr,
    aside_ptr,
    size,
    lo,
    hi,
    at_lo,
    at_hi,
    want,
    MASS: tl.constexpr,
    LONG: tl.constexpr,
    CHUNK: tl.constexpr,
    PROBES: tl.constexpr,
):
    """`_narrow` to the end; a long row is read until CHUNK entries are left, which are then searched alone."""
    # A sum of weights from lo on that is below 2 lo is one weight's; of rounding, a margin.
    end = 1.9 if MASS else 0
    if LONG:
        lo, hi, at_lo, at_hi = _narrow(
            values_ptr,
            values_ptr,
            size,
            at_hi * 0,
            lo,
            hi,
            at_lo,
            at_hi,
            want,
            CHUNK * 0.9 if MASS else CHUNK,
            MASS,
            False,
            CHUNK,
            PROBES,
        )
        found = _put_aside(values_ptr, size, lo, hi, aside_ptr, CHUNK)
        if found <= CHUNK:
            lo, hi, at_lo, at_hi = _narrow(
                aside_ptr,
                aside_ptr,
                found,
                at_hi,
                lo,
                hi,
                at_lo,
                at_hi,
                want,
                end,
                MASS,
                False,
                CHUNK,
                PROBES,
            )
    # Where the entries put aside were searched, nothing is left to do here.
    lo, hi, at_lo, at_hi = _narrow(
        values_ptr,
        values_ptr,
        size,
        at_hi * 0,
        lo,
        hi,
        at_lo,
        at_hi,
        want,
        end,
        MASS,
        False,
        CHUNK,
        PROBES,
    )
    return lo, hi, at_lo, at_hi


@jit
def _count(values_ptr, forced_ptr, size, lo, FORCED: tl.constexpr, CHUNK: tl.constexpr):
    """How many keys reach lo."""
    found = 0
    for start in tl.range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        found += tl.sum((_keys(values_ptr, forced_ptr, at, at < size, FORCED) >= lo).to(tl.int32), 0)
    return found


@jit
def _write(
    values_ptr,
    forced_ptr,
    size,
    lo,
    hi,
    left,
    list_ptr,
    count_ptr,
    width,
    FORCED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A row's list and its count."""
    sure = 0
    ties = 0
    for start in tl.range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        key = _keys(values_ptr, forced_ptr, at, at < size, FORCED)
        tied = (key >= lo) & (key < hi)
        both = (key >= hi).to(tl.int32) + tied.to(tl.int32) * 65536  # two counts in one scan
        before = tl.cumsum(both, 0) - both
        tied_before = ties + (before >> 16)
        place = sure + (before & 65535) + tl.minimum(tied_before, left)
        chosen = (key >= hi) | (tied & (tied_before < left))
        tl.store(list_ptr + place, at, mask=chosen & (place < width))
        total = tl.sum(both, 0)
        sure += total & 65535
        ties += total >> 16
    count = tl.minimum(sure + tl.minimum(ties, left), width)
    tl.store(count_ptr, count)
    for start in tl.range(count, width, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(list_ptr + at, tl.zeros([CHUNK], tl.int32), mask=at < width)


@jit
def _select_rows_kernel(
    weights_ptr,
    valid_ptr,
    k_ptr,
    mass,
    aside_ptr,
    lists_ptr,
    counts_ptr,
    n,
    width,
    NUCLEUS: tl.constexpr,
    LONG: tl.constexpr,
    CHUNK: tl.constexpr,
    PROBES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weights_ptr += row * n
    aside_ptr += row * CHUNK
    size = tl.minimum(tl.load(valid_ptr + row).to(tl.int32), n)
    zero = size * 0
    lo = zero
    reached = size
    want = tl.minimum(size, width)
    if NUCLEUS:
        total = zero.to(tl.float32)
        greatest = zero
        for start in tl.range(0, size, CHUNK):
            at = start + tl.arange(0, CHUNK)
            key = tl.maximum(_keys(weights_ptr, weights_ptr, at, at < size, False), 0)
            total += tl.sum(key.to(tl.float32, bitcast=True), 0)
            greatest = tl.maximum(greatest, tl.max(key, 0))
        # Entries below half an equal share of what may be missed cannot make up that.
        spare = tl.maximum(1 - mass - 1e-5, 0.0) * 0.5
        lo = (spare * total / tl.maximum(size, 1)).to(tl.int32, bitcast=True)
        needed = mass * total
        hi = tl.where(needed > 0, greatest + 1, lo)  # a row without weight: all of it
        lo, hi, _, _ = _search(
            weights_ptr, aside_ptr, size, lo, hi, total, total * 0, needed, True, LONG, CHUNK, PROBES
        )
        reached = size
        if width < size:
            reached = _count(weights_ptr, weights_ptr, size, lo, False, CHUNK)
    else:
        want = tl.minimum(want, tl.load(k_ptr + row).to(tl.int32))
    hi = zero + 0x7F800001
    lo = tl.where(want > 0, lo, hi)
    if reached > want:
        lo, hi, reached, above = _search(
            weights_ptr, aside_ptr, size, lo, hi, reached, zero, want, False, LONG, CHUNK, PROBES
        )
        left = want - above
    else:
        left = want
    _write(
        weights_ptr,
        weights_ptr,
        size,
        lo,
        hi,
        left,
        lists_ptr + row * width,
        counts_ptr + row,
        width,
        False,
        CHUNK,
    )


@jit
def _state(
    work_ptr,
    count_ptr,
    group,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    BEFORE: tl.constexpr,
    BINS: tl.constexpr,
):
    """lo, hi and left after STEP digits, from the state before the last of them and its histogram."""
    work_ptr += group * ((STEPS + 1) * 132)
    if STEP == 0:
        left = tl.load(count_ptr + group).to(tl.int32)
        nothing = left * 0 + 0x7F800001
        lo = tl.where(left > 0, 0, nothing)
        return lo, nothing, left
    else:
        state_ptr = work_ptr + (STEP - 1) * 132 + 128
        lo = tl.load(state_ptr)
        hi = tl.load(state_ptr + 1)
        left = tl.load(state_ptr + 2)
        if hi > lo:
            found = tl.load(work_ptr + (STEP - 1) * 132 + tl.arange(0, BINS))
            total = tl.sum(found, 0)
            reached = total - tl.cumsum(found, 0) + found  # in this bin and those above
            enough = reached >= left
            digit = tl.sum(enough.to(tl.int32), 0) - 1
            above = tl.max(tl.where(enough, 0, reached), 0)
            inside = tl.min(tl.where(enough, reached, 2147483647), 0) - above
            if total <= left:  # all; only before the first digit
                lo = tl.maximum(lo, 1)
                hi = lo
            else:
                lo += digit * (1 << BEFORE)
                left -= above
                hi = lo + (1 << BEFORE)
                if inside == left:
                    lo = tl.maximum(lo, 1)
                    hi = lo
        return lo, hi, left


@jit
def _keep_state(work_ptr, group, lo, hi, left, STEP: tl.constexpr, STEPS: tl.constexpr):
    state_ptr = work_ptr + group * ((STEPS + 1) * 132) + STEP * 132 + 128
    tl.store(state_ptr, lo)
    tl.store(state_ptr + 1, hi)
    tl.store(state_ptr + 2, left)


@jit
def _tile_keys(
    scores_ptr,
    forced_ptr,
    tile,
    rows,
    n,
    size,
    FORCED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Keys of one tile of a group's scores, in any order; -1 where forced, too."""
    across = (n + TILE_COLUMNS - 1) // TILE_COLUMNS
    row = tile // across * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tile % across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    at = row[:, None].to(tl.int64) * n + column[None, :]
    inside = (row < rows)[:, None] & (column < size)[None, :]
    key = _keys(scores_ptr, forced_ptr, at, inside, FORCED)
    if FORCED:
        key = tl.where(key == 0x7F800001, -1, key)
    return tl.reshape(key, [TILE_ROWS * TILE_COLUMNS], can_reorder=True)


@jit
def _digit_kernel(
    scores_ptr,
    forced_ptr,
    count_ptr,
    valid_ptr,
    work_ptr,
    candidates_ptr,
    rows,
    n,
    tiles,
    each,
    STEP: tl.constexpr,
    BEFORE: tl.constexpr,
    BEFORE_BINS: tl.constexpr,
    SHIFT: tl.constexpr,
    BINS: tl.constexpr,
    ASIDE: tl.constexpr,
    FORCED: tl.constexpr,
    STEPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Histogram of one digit of the scores whose higher digits are the threshold's."""
    group = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    lo, hi, left = _state(work_ptr, count_ptr, group, STEP, STEPS, BEFORE, BEFORE_BINS)
    if program == 0:
        _keep_state(work_ptr, group, lo, hi, left, STEP, STEPS)
    if hi <= lo:
        return
    lowest = tl.maximum(lo, 1)  # only positive scores count
    found = tl.zeros([BINS], tl.int32)
    TILE: tl.constexpr = TILE_ROWS * TILE_COLUMNS
    apart = CANDIDATES + 1
    if ASIDE:
        apart = tl.load(work_ptr + (group + 1) * ((STEPS + 1) * 132) - 1)
    if apart <= CANDIDATES:
        for start in tl.range(program * TILE, apart, tl.num_programs(1) * TILE):
            at = start + tl.arange(0, TILE)
            key = _keys(candidates_ptr + group * CANDIDATES, forced_ptr, at, at < apart, False)
            member = (key >= lowest) & (key < hi)
            found += tl.histogram(tl.where(member, (key - lo) >> SHIFT, 0), BINS, mask=member)
    else:
        size = tl.minimum(tl.load(valid_ptr + group).to(tl.int32), n)
        offset = group * rows * n
        for tile in tl.range(program * each, tl.minimum(program * each + each, tiles)):
            key = _tile_keys(
                scores_ptr + offset, forced_ptr + offset, tile, rows, n, size, FORCED, TILE_ROWS, TILE_COLUMNS
            )
            member = (key >= lowest) & (key < hi)
            found += tl.histogram(tl.where(member, (key - lo) >> SHIFT, 0), BINS, mask=member)
    bins = tl.arange(0, BINS)
    tl.atomic_add(
        work_ptr + group * ((STEPS + 1) * 132) + STEP * 132 + bins, found, mask=found > 0, sem="relaxed"
    )


@jit
def _candidates_kernel(
    scores_ptr,
    forced_ptr,
    count_ptr,
    valid_ptr,
    work_ptr,
    candidates_ptr,
    rows,
    n,
    tiles,
    each,
    STEP: tl.constexpr,
    BEFORE: tl.constexpr,
    BEFORE_BINS: tl.constexpr,
    FORCED: tl.constexpr,
    STEPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The scores among which the threshold is, in any order, as far as there is room; and how many they are."""
    group = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    lo, hi, _ = _state(work_ptr, count_ptr, group, STEP, STEPS, BEFORE, BEFORE_BINS)
    if hi <= lo:
        return
    lowest = tl.maximum(lo, 1)
    size = tl.minimum(tl.load(valid_ptr + group).to(tl.int32), n)
    offset = group * rows * n
    for tile in tl.range(program * each, tl.minimum(program * each + each, tiles)):
        key = _tile_keys(
            scores_ptr + offset, forced_ptr + offset, tile, rows, n, size, FORCED, TILE_ROWS, TILE_COLUMNS
        )
        member = ((key >= lowest) & (key < hi)).to(tl.int32)
        place = tl.cumsum(member, 0) - 1
        many = tl.sum(member, 0)
        if many > 0:
            first = tl.atomic_add(work_ptr + (group + 1) * ((STEPS + 1) * 132) - 1, many, sem="relaxed")
            place += first
            tl.store(
                candidates_ptr + group * CANDIDATES + place,
                key.to(tl.float32, bitcast=True),
                mask=(member > 0) & (place < CANDIDATES),
            )


@jit
def _ties_kernel(
    scores_ptr,
    forced_ptr,
    count_ptr,
    valid_ptr,
    work_ptr,
    candidates_ptr,
    ties_ptr,
    rows,
    n,
    STEP: tl.constexpr,
    BEFORE: tl.constexpr,
    BEFORE_BINS: tl.constexpr,
    FORCED: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many of a row's scores are the threshold, if not all that are it are chosen."""
    row = tl.program_id(0).to(tl.int64)
    group = row // rows
    lo, hi, left = _state(work_ptr, count_ptr, group, STEP, STEPS, BEFORE, BEFORE_BINS)
    if row % rows == 0:
        _keep_state(work_ptr, group, lo, hi, left, STEP, STEPS)
    if hi <= lo:
        return
    size = tl.minimum(tl.load(valid_ptr + group).to(tl.int32), n)
    ties = 0
    for start in tl.range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        key = _keys(scores_ptr + row * n, forced_ptr + row * n, at, at < size, FORCED)
        ties += tl.sum((key == lo).to(tl.int32), 0)
    tl.store(ties_ptr + row, ties)


@jit
def _lists_kernel(
    scores_ptr,
    forced_ptr,
    count_ptr,
    valid_ptr,
    work_ptr,
    candidates_ptr,
    ties_ptr,
    lists_ptr,
    counts_ptr,
    rows,
    n,
    width,
    CUT: tl.constexpr,
    FORCED: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One row's list: what is above the threshold, as many ties as are left for it, what is forced."""
    row = tl.program_id(0).to(tl.int64)
    group = row // rows
    state_ptr = work_ptr + group * ((STEPS + 1) * 132) + STEPS * 132 + 128
    lo = tl.load(state_ptr)
    hi = tl.load(state_ptr + 1)
    left = tl.load(state_ptr + 2)
    if hi > lo:
        others = tl.arange(0, ROWS)
        earlier = tl.load(ties_ptr + group * rows + others, mask=others < row % rows, other=0)
        left = tl.maximum(left - tl.sum(earlier, 0), 0)
    size = tl.minimum(tl.load(valid_ptr + group).to(tl.int32), n)
    scores_ptr += row * n
    forced_ptr += row * n
    if CUT:
        sure = _count(scores_ptr, forced_ptr, size, hi, FORCED, CHUNK)
        reached = _count(scores_ptr, forced_ptr, size, lo, FORCED, CHUNK)
        if sure + tl.minimum(reached - sure, left) > width:
            top = hi * 0 + 0x7F800002
            lo, hi, _, above = _narrow(
                scores_ptr,
                forced_ptr,
                size,
                width * 0,
                lo,
                top,
                reached,
                top * 0,
                width,
                0,
                False,
                FORCED,
                CHUNK,
                8,
            )
            left = width - above
    _write(
        scores_ptr,
        forced_ptr,
        size,
        lo,
        hi,
        left,
        lists_ptr + row * width,
        counts_ptr + row,
        width,
        FORCED,
        CHUNK,
    )


@jit
def _compact_bits_kernel(words_ptr, valid_ptr, lists_ptr, counts_ptr, n, width, CHUNK: tl.constexpr):
    """words: as int32, the lower half of each first."""
    row = tl.program_id(0).to(tl.int64)
    words_ptr += row * (n // 32)
    lists_ptr += row * width
    size = tl.minimum(tl.load(valid_ptr + row).to(tl.int32), n)
    taken = 0
    for start in tl.range(0, size, CHUNK):
        at = start + tl.arange(0, CHUNK)
        bit = (tl.load(words_ptr + at // 32, mask=at < size, other=0) >> (at % 32)) & 1
        place = taken + tl.cumsum(bit, 0) - 1
        tl.store(lists_ptr + place, at, mask=(bit > 0) & (place < width))
        taken += tl.sum(bit, 0)
    count = tl.minimum(taken, width)
    tl.store(counts_ptr + row, count)
    for start in tl.range(count, width, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(lists_ptr + at, tl.zeros([CHUNK], tl.int32), mask=at < width)
