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
_CANDIDATES = 65536  # of a group, kept aside when the coarse steps have bounded its threshold
# Steps of 16 bins, which are cheap, over all scores, then of 256 over the candidates. The first leaves 30 of a
# threshold's 31 bits in the worst case, so the others must find these: 4 + 4 + 8 + 8 + 8.
_COARSE, _FINE = 3, 3


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
        tile_rows, tile_columns, warps = _tile_of(n)
        _compact_bits_kernel[(rows,)](
            words.view(torch.int32),
            valid,
            lists,
            counts,
            n,
            width,
            CHUNK=tile_rows * tile_columns,
            num_warps=warps,
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


def _tile_of(n: int) -> tuple[int, int, int]:
    """Rows and columns of the tile in which a program holds n entries or a part of them, and its warps."""
    chunk = min(max(512, 1 << max(0, n - 1).bit_length()), _CHUNK)
    warps = min(16, max(4, chunk // 512))
    columns = min(chunk, 128 * warps)
    return chunk // columns, columns, warps


def _select_rows(
    operation: str, weights: Tensor, valid: Tensor, k: Tensor | None, mass: float | None, width: int | None
) -> tuple[Tensor, Tensor]:
    """Top-k if there is a k, else the nucleus: one launch, one program a row."""
    _check_width(operation, width)
    _check_layout(operation, weights, torch.float32)
    rows, n = weights.shape
    lists, counts = _empty_lists(weights, (rows,), width)
    tile_rows, tile_columns, warps = _tile_of(n)
    one = n <= tile_rows * tile_columns
    aside = weights if one else torch.empty(rows, tile_rows * tile_columns, device=weights.device)
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
            ONE=one,
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=tile_columns,
            num_warps=warps,
        )
    return lists, counts


def _select_over_all(
    scores: Tensor, count: Tensor, valid: Tensor, width: int, forced: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Ten launches: a fill, three coarse steps, the candidates, three fine steps, ties, lists."""
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
    tiles = -(-rows // _TILE_ROWS) * -(-n // _TILE_COLUMNS)
    # A program adds up at most 15 tiles in fields of 16 bits.
    each = min(15, -(-tiles // max(1, _PROGRAMS // groups)))
    programs = -(-tiles // each)
    steps = _COARSE + _FINE
    work = torch.zeros(groups, steps + 1, 256 + 4, dtype=torch.int32, device=device)
    candidates = torch.empty(groups, _CANDIDATES, dtype=torch.float32, device=device)
    ties = torch.empty(groups, rows, dtype=torch.int32, device=device)
    marks = scores if forced is None else forced
    common = {"FORCED": forced is not None, "STEPS": steps}
    for step in range(steps):
        kernels = [_coarse_kernel] if step < _COARSE else [_fine_kernel]
        if step == _COARSE:
            kernels.insert(0, _candidates_kernel)
        for kernel in kernels:
            kernel[(groups, programs)](
                scores,
                marks,
                count,
                valid,
                work,
                candidates,
                rows,
                n,
                tiles,
                each,
                STEP=step,
                COARSE=_COARSE,
                TILE_ROWS=_TILE_ROWS,
                TILE_COLUMNS=_TILE_COLUMNS,
                CANDIDATES=_CANDIDATES,
                num_warps=4,
                **common,
            )
    tile_rows, tile_columns, warps = _tile_of(n)
    _ties_kernel[(groups * rows,)](
        scores,
        marks,
        count,
        valid,
        work,
        ties,
        rows,
        n,
        COARSE=_COARSE,
        CHUNK=tile_rows * tile_columns,
        num_warps=warps,
        **common,
    )
    _lists_kernel[(groups * rows,)](
        scores,
        marks,
        valid,
        work,
        ties,
        lists,
        counts,
        rows,
        n,
        width,
        CUT=width < n,
        ROWS=1 << (rows - 1).bit_length(),
        TILE_ROWS=tile_rows,
        TILE_COLUMNS=tile_columns,
        num_warps=warps,
        **common,
    )
    return lists, counts


# In the kernels, an entry's key is its weight's bits; 0x7F800001, above infinity, where it is forced; -1 if it is none.
# A search ends with lo, hi and left: all keys from hi on are chosen, and the first `left` of those from lo to hi.
# Tiles are [TILE_ROWS, TILE_COLUMNS] with 4 columns a thread, so that sums over the rows stay within threads.


@jit
def _keys(values_ptr, forced_ptr, at, inside, FORCED: tl.constexpr):
    value = tl.load(values_ptr + at, mask=inside, other=-1.0)
    key = value.to(tl.int32, bitcast=True)
    key = tl.where(value == 0, 0, key)  # -0 is 0
    if FORCED:
        key = tl.where(tl.load(forced_ptr + at, mask=inside, other=0) != 0, 0x7F800001, key)
    return key


@jit
def _split(lo, hi, FIRST: tl.constexpr, BITS: tl.constexpr):
    """Origin and shift that cut lo … hi into at most 2 ** BITS bins.

    FIRST: the outermost of them hold all keys below and above; the others cover weights of 4.7e-10 to 2.
    """
    if FIRST:
        origin = lo * 0 + 0x30000000
        shift = lo * 0 + (28 - BITS)
    else:
        origin = lo
        # The exponent of hi - lo - 1 as a float is the position of its highest bit, or the one above.
        top = (hi - lo - 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23
        shift = tl.maximum(top - 127 - (BITS - 1), 0)
    return origin, shift


@jit
def _bins(key, lo, hi, origin, shift, FIRST: tl.constexpr, BITS: tl.constexpr):
    """Bin of each key, and whether it lies in lo … hi."""
    member = (key - lo).to(tl.uint32, bitcast=True) < (hi - lo).to(tl.uint32, bitcast=True)
    digit = (key - origin) >> shift
    if FIRST:
        digit = tl.minimum(tl.maximum(digit, 0), (1 << BITS) - 1)
    return digit, member


@jit
def _enter(lo, hi, origin, shift, digit, FIRST: tl.constexpr, BITS: tl.constexpr):
    """lo and hi of a bin."""
    low = origin + (digit << shift)
    end = low + tl.minimum(hi - low, 1 << shift)
    if FIRST:
        low = tl.where(digit == 0, lo, low)
        end = tl.where(digit == (1 << BITS) - 1, hi, end)
    return low, end


@jit
def _eighths(key, lo, hi, origin, shift, FIRST: tl.constexpr):
    """Of each column of a tile of at most 15 rows, how many keys are in the 8 bins: [4, columns] int32.

    Element (i, c) counts bin i in its lower 16 bits and bin i + 4 in its upper ones. Each key adds 1 to a field of
    4 bits, which takes a third of the instructions of comparing it with 8 thresholds.
    """
    digit, member = _bins(key, lo, hi, origin, shift, FIRST, 3)
    fields = tl.sum(tl.where(member, 1 << (digit * 4), 0), 0)
    return (fields[None, :] >> (tl.arange(0, 4) * 4)[:, None]) & 0x000F000F


@jit
def _descend(fields_low, fields_high, at_hi, want):
    """The bin at which `want` is reached from the top, and how many keys reach its lower and its upper end."""
    digit = at_hi * 0
    reached = at_hi
    below = at_hi
    found = digit > 0
    index = tl.arange(0, 4)
    at_lo = at_hi
    for step in tl.static_range(8):
        number: tl.constexpr = 7 - step
        fields = fields_high if number > 3 else fields_low
        reached += tl.sum(tl.where(index == number % 4, fields, 0), 0)
        here = (reached >= want) & (found == 0)
        digit = tl.where(here, number, digit)
        at_lo = tl.where(here, reached, at_lo)
        at_hi = tl.where(here, below, at_hi)
        found = found | here
        below = reached
    return digit, at_lo, at_hi


@jit
def _rank_pass(
    values_ptr,
    forced_ptr,
    key,
    size,
    lo,
    hi,
    at_hi,
    want,
    FIRST: tl.constexpr,
    FORCED: tl.constexpr,
    ONE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    origin, shift = _split(lo, hi, FIRST, 3)
    if ONE:
        fields = tl.sum(_eighths(key, lo, hi, origin, shift, FIRST), 1)
        low = fields & 65535
        high = fields >> 16
    else:
        counted = tl.zeros([4, TILE_COLUMNS], tl.int32)
        for start in tl.range(0, size, TILE_ROWS * TILE_COLUMNS):
            tile = _row_tile(values_ptr, forced_ptr, start, size, FORCED, TILE_ROWS, TILE_COLUMNS)
            counted += _eighths(tile, lo, hi, origin, shift, FIRST)
        low = tl.sum(counted & 65535, 1)
        high = tl.sum(counted >> 16, 1)
    digit, at_lo, at_hi = _descend(low, high, at_hi, want)
    lo, hi = _enter(lo, hi, origin, shift, digit, FIRST, 3)
    return lo, hi, at_lo, at_hi


@jit
def _row_tile(
    values_ptr,
    forced_ptr,
    start,
    size,
    FORCED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    at = start + tl.arange(0, TILE_ROWS)[:, None] * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    return _keys(values_ptr, forced_ptr, at, at < size, FORCED)


@jit
def _rank(
    values_ptr,
    forced_ptr,
    size,
    lo,
    hi,
    at_lo,
    at_hi,
    want,
    limit,
    START: tl.constexpr,
    FORCED: tl.constexpr,
    ONE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Narrow lo and hi around the key of rank `want` until at most `limit` keys lie between them, or lo alone.

    at_lo >= want > at_hi: how many keys reach lo and hi. START: nothing is known yet.
    """
    key = lo
    if ONE:
        key = _row_tile(values_ptr, forced_ptr, 0, size, FORCED, TILE_ROWS, TILE_COLUMNS)
    if START:
        lo, hi, at_lo, at_hi = _rank_pass(
            values_ptr, forced_ptr, key, size, lo, hi, at_hi, want, True, FORCED, ONE, TILE_ROWS, TILE_COLUMNS
        )
    while (hi - lo > 1) & (at_lo - at_hi > limit) & (at_lo > want):
        lo, hi, at_lo, at_hi = _rank_pass(
            values_ptr,
            forced_ptr,
            key,
            size,
            lo,
            hi,
            at_hi,
            want,
            False,
            FORCED,
            ONE,
            TILE_ROWS,
            TILE_COLUMNS,
        )
    return lo, hi, at_lo, at_hi


@jit
def _sums(key, p0, p1, p2, p3):
    """Of each column of a tile, the weight of the keys that reach each of 4 probes: [4, columns]."""
    weight = key.to(tl.float32, bitcast=True)
    index = tl.arange(0, 4)[:, None]
    s0 = tl.sum(tl.where(key >= p0, weight, 0.0), 0)[None, :]
    s1 = tl.sum(tl.where(key >= p1, weight, 0.0), 0)[None, :]
    s2 = tl.sum(tl.where(key >= p2, weight, 0.0), 0)[None, :]
    s3 = tl.sum(tl.where(key >= p3, weight, 0.0), 0)[None, :]
    return tl.where(index == 0, s0, tl.where(index == 1, s1, tl.where(index == 2, s2, s3)))


@jit
def _weigh(
    values_ptr,
    size,
    base,
    lo,
    hi,
    at_lo,
    at_hi,
    want,
    limit,
    ONE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Narrow lo and hi around the highest key that is reached by `want` of weight, as `_rank` does for a number.

    at_lo >= want > at_hi: the weight of the keys that reach lo and hi, of which `base` is not among those read here.
    """
    if ONE:
        key = _row_tile(values_ptr, values_ptr, 0, size, False, TILE_ROWS, TILE_COLUMNS)
    index = tl.arange(0, 4) + 1
    # No more than (at_lo - at_hi) / lo weights lie between lo and hi.
    while (hi - lo > 1) & (at_lo - at_hi > limit * lo.to(tl.float32, bitcast=True)):
        span = hi - lo
        p0 = lo + tl.maximum(span // 5, 1)  # of a span of 2, all probes lie in its middle
        p1 = lo + tl.maximum(span // 5 * 2 + span % 5 * 2 // 5, 1)
        p2 = lo + tl.maximum(span // 5 * 3 + span % 5 * 3 // 5, 1)
        p3 = lo + tl.maximum(span // 5 * 4 + span % 5 * 4 // 5, 1)
        if ONE:
            sums = _sums(key, p0, p1, p2, p3)
        else:
            sums = tl.zeros([4, TILE_COLUMNS], tl.float32)
            for start in tl.range(0, size, TILE_ROWS * TILE_COLUMNS):
                tile = _row_tile(values_ptr, values_ptr, start, size, False, TILE_ROWS, TILE_COLUMNS)
                sums += _sums(tile, p0, p1, p2, p3)
        reached = tl.sum(sums, 1) + base
        probes = tl.where(index == 1, p0, tl.where(index == 2, p1, tl.where(index == 3, p2, p3)))
        enough = reached >= want
        at_lo = tl.min(tl.where(enough, reached, at_lo), 0)
        at_hi = tl.max(tl.where(enough, at_hi, reached), 0)
        lo = tl.max(tl.where(enough, probes, lo), 0)
        hi = tl.min(tl.where(enough, hi, probes), 0)
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
    _pad(list_ptr, count, width, CHUNK)


@jit
def _pad(list_ptr, count, width, CHUNK: tl.constexpr):
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
    ONE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """One row. ONE: it fits a tile; else it is read until a tile holds the rest of the search, which is put aside."""
    CHUNK: tl.constexpr = TILE_ROWS * TILE_COLUMNS
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
            weight = tl.load(weights_ptr + at, mask=at < size, other=0.0)
            total += tl.sum(weight, 0)
            greatest = tl.maximum(greatest, tl.max(weight.to(tl.int32, bitcast=True), 0))
        # Entries below half an equal share of what may be missed cannot make up that.
        spare = tl.maximum(1 - mass - 1e-5, 0.0) * 0.5
        lo = (spare * total / tl.maximum(size, 1)).to(tl.int32, bitcast=True)
        needed = mass * total
        hi = tl.where(needed > 0, greatest + 1, lo)  # a row without weight: all of it
        at_lo = total
        at_hi = total * 0
        if not ONE:
            lo, hi, at_lo, at_hi = _weigh(
                weights_ptr,
                size,
                at_hi,
                lo,
                hi,
                at_lo,
                at_hi,
                needed,
                CHUNK * 0.9,
                False,
                TILE_ROWS,
                TILE_COLUMNS,
            )
            found = _put_aside(weights_ptr, size, lo, hi, aside_ptr, CHUNK)
            if found <= CHUNK:
                lo, hi, at_lo, at_hi = _weigh(
                    aside_ptr, found, at_hi, lo, hi, at_lo, at_hi, needed, 1.9, True, TILE_ROWS, TILE_COLUMNS
                )
        # Weights from lo on whose sum is below 2 lo are one weight; 1.9 is for rounding. After a search of those that
        # were put aside, nothing is left to do here.
        lo, _, _, _ = _weigh(
            weights_ptr, size, total * 0, lo, hi, at_lo, at_hi, needed, 1.9, ONE, TILE_ROWS, TILE_COLUMNS
        )
        reached = size
        if width < size:
            reached = _count(weights_ptr, weights_ptr, size, lo, False, CHUNK)
    else:
        want = tl.minimum(want, tl.load(k_ptr + row).to(tl.int32))
    hi = zero + 0x7F800001
    lo = tl.where(want > 0, lo, hi)
    left = want
    if (want > 0) & (reached > want):
        lo = zero
        above = zero
        if not ONE:
            lo, hi, reached, above = _rank(
                weights_ptr,
                weights_ptr,
                size,
                lo,
                hi,
                size,
                above,
                want,
                CHUNK,
                True,
                False,
                False,
                TILE_ROWS,
                TILE_COLUMNS,
            )
            if (reached > want) & (hi - lo > 1):
                found = _put_aside(weights_ptr, size, lo, hi, aside_ptr, CHUNK)
                if found <= CHUNK:
                    lo, hi, reached, above = _rank(
                        aside_ptr,
                        aside_ptr,
                        found,
                        lo,
                        hi,
                        reached,
                        above,
                        want,
                        0,
                        False,
                        False,
                        True,
                        TILE_ROWS,
                        TILE_COLUMNS,
                    )
        lo, hi, reached, above = _rank(
            weights_ptr,
            weights_ptr,
            size,
            lo,
            hi,
            reached,
            above,
            want,
            0,
            ONE,
            False,
            ONE,
            TILE_ROWS,
            TILE_COLUMNS,
        )
        left = want - above
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


# One budget over all rows of a group. Of each group and step, `work` holds 256 bins and the state before them: lo, hi
# and left; after the last step, the final state and the number of candidates.


@jit
def _state(work_ptr, count_ptr, group, STEP: tl.constexpr, COARSE: tl.constexpr, STEPS: tl.constexpr):
    """lo, hi and left after STEP steps, from the state before the last of them and its bins."""
    state_ptr = work_ptr + group * ((STEPS + 1) * 260) + STEP * 260 + 256
    if STEP == 0:
        left = tl.load(count_ptr + group).to(tl.int32)
        hi = left * 0 + 0x7F800001
        lo = tl.where(left > 0, 1, hi)  # only positive scores count
    else:
        FIRST: tl.constexpr = STEP == 1
        BITS: tl.constexpr = 4 if STEP <= COARSE else 8
        lo = tl.load(state_ptr - 260)
        hi = tl.load(state_ptr - 260 + 1)
        left = tl.load(state_ptr - 260 + 2)
        if hi > lo:
            found = tl.load(state_ptr - 260 - 256 + tl.arange(0, 1 << BITS))
            total = tl.sum(found, 0)
            reached = total - tl.cumsum(found, 0) + found  # in this bin and those above
            enough = reached >= left
            digit = tl.sum(enough.to(tl.int32), 0) - 1
            above = tl.max(tl.where(enough, 0, reached), 0)
            inside = tl.min(tl.where(enough, reached, 2147483647), 0) - above
            if total <= left:  # all of them
                hi = lo
            else:
                origin, shift = _split(lo, hi, FIRST, BITS)
                lo, hi = _enter(lo, hi, origin, shift, digit, FIRST, BITS)
                left -= above
                if inside == left:
                    hi = lo
    return lo, hi, left


@jit
def _keep_state(work_ptr, group, lo, hi, left, STEP: tl.constexpr, STEPS: tl.constexpr):
    state_ptr = work_ptr + group * ((STEPS + 1) * 260) + STEP * 260 + 256
    tl.store(state_ptr, lo)
    tl.store(state_ptr + 1, hi)
    tl.store(state_ptr + 2, left)


@jit
def _group_tile(
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
    """Keys of one tile of a group's scores."""
    across = (n + TILE_COLUMNS - 1) // TILE_COLUMNS
    row = tile // across * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tile % across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    at = row[:, None].to(tl.int64) * n + column[None, :]
    return _keys(scores_ptr, forced_ptr, at, (row < rows)[:, None] & (column < size)[None, :], FORCED)


@jit
def _coarse_kernel(
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
    FORCED: tl.constexpr,
    COARSE: tl.constexpr,
    STEPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """How many scores are in each of 16 bins between the bounds of the threshold."""
    group = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    lo, hi, left = _state(work_ptr, count_ptr, group, STEP, COARSE, STEPS)
    if program == 0:
        _keep_state(work_ptr, group, lo, hi, left, STEP, STEPS)
    if hi <= lo:
        return
    origin, shift = _split(lo, hi, STEP == 0, 4)
    size = tl.minimum(tl.load(valid_ptr + group).to(tl.int32), n)
    offset = group * rows * n
    counted = tl.zeros([4, TILE_COLUMNS], tl.int64)
    one = tl.full([1, 1], 1, tl.int64)
    for tile in tl.range(program * each, tl.minimum(program * each + each, tiles)):
        key = _group_tile(
            scores_ptr + offset, forced_ptr + offset, tile, rows, n, size, FORCED, TILE_ROWS, TILE_COLUMNS
        )
        digit, member = _bins(key, lo, hi, origin, shift, STEP == 0, 4)
        # As in `_eighths`: 16 fields of 4 bits, then 4 of 16.
        fields = tl.sum(tl.where(member, one << (digit * 4).to(tl.int64), 0), 0)
        counted += (fields[None, :] >> (tl.arange(0, 4) * 4).to(tl.int64)[:, None]) & 0x000F000F000F000F
    sums = tl.sum(counted, 1)
    quarter = tl.arange(0, 4)
    bins = quarter[:, None] + quarter[None, :] * 4
    found = ((sums[:, None] >> (quarter * 16).to(tl.int64)[None, :]) & 65535).to(tl.int32)
    bins_ptr = work_ptr + group * ((STEPS + 1) * 260) + STEP * 260
    tl.atomic_add(bins_ptr + bins, found, mask=found > 0, sem="relaxed")


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
    FORCED: tl.constexpr,
    COARSE: tl.constexpr,
    STEPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The scores among which the threshold is, in any order, as far as there is room; and how many they are."""
    group = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    lo, hi, _ = _state(work_ptr, count_ptr, group, STEP, COARSE, STEPS)
    if hi <= lo:
        return
    size = tl.minimum(tl.load(valid_ptr + group).to(tl.int32), n)
    offset = group * rows * n
    for tile in tl.range(program * each, tl.minimum(program * each + each, tiles)):
        key = _group_tile(
            scores_ptr + offset, forced_ptr + offset, tile, rows, n, size, FORCED, TILE_ROWS, TILE_COLUMNS
        )
        member = ((key >= lo) & (key < hi)).to(tl.int32)
        columns = tl.sum(member, 0)
        many = tl.sum(columns, 0)
        if many > 0:
            place = (tl.cumsum(columns, 0) - columns)[None, :] + tl.cumsum(member, 0) - 1
            place += tl.atomic_add(work_ptr + (group + 1) * ((STEPS + 1) * 260) - 1, many, sem="relaxed")
            tl.store(
                candidates_ptr + group * CANDIDATES + place,
                key.to(tl.float32, bitcast=True),
                mask=(member > 0) & (place < CANDIDATES),
            )


@jit
def _fine_kernel(
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
    FORCED: tl.constexpr,
    COARSE: tl.constexpr,
    STEPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """As `_coarse_kernel`, with 256 bins, of the candidates; of all scores if there was no room for these."""
    group = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    lo, hi, left = _state(work_ptr, count_ptr, group, STEP, COARSE, STEPS)
    if program == 0:
        _keep_state(work_ptr, group, lo, hi, left, STEP, STEPS)
    if hi <= lo:
        return
    origin, shift = _split(lo, hi, False, 8)
    found = tl.zeros([256], tl.int32)
    TILE: tl.constexpr = TILE_ROWS * TILE_COLUMNS
    candidates = tl.load(work_ptr + (group + 1) * ((STEPS + 1) * 260) - 1)
    apart = candidates <= CANDIDATES
    size = tl.minimum(tl.load(valid_ptr + group).to(tl.int32), n)
    offset = group * rows * n
    first = tl.where(apart, program, program * each)
    last = tl.where(apart, (candidates + TILE - 1) // TILE, tl.minimum(program * each + each, tiles))
    for tile in tl.range(first, last, tl.where(apart, tl.num_programs(1), 1)):
        if apart:
            key = _row_tile(
                candidates_ptr + group * CANDIDATES,
                candidates_ptr,
                tile * TILE,
                candidates,
                False,
                TILE_ROWS,
                TILE_COLUMNS,
            )
        else:
            key = _group_tile(
                scores_ptr + offset, forced_ptr + offset, tile, rows, n, size, FORCED, TILE_ROWS, TILE_COLUMNS
            )
        digit, member = _bins(key, lo, hi, origin, shift, False, 8)
        digit = tl.reshape(tl.where(member, digit, 0), [TILE], can_reorder=True)
        found += tl.histogram(digit, 256)
        # Without a mask, whose order may be another than the digits', all others were counted as 0.
        found -= tl.where(tl.arange(0, 256) == 0, TILE - tl.sum(tl.sum(member.to(tl.int32), 0), 0), 0)
    bins = tl.arange(0, 256)
    bins_ptr = work_ptr + group * ((STEPS + 1) * 260) + STEP * 260
    tl.atomic_add(bins_ptr + bins, found, mask=found > 0, sem="relaxed")


@jit
def _ties_kernel(
    scores_ptr,
    forced_ptr,
    count_ptr,
    valid_ptr,
    work_ptr,
    ties_ptr,
    rows,
    n,
    FORCED: tl.constexpr,
    COARSE: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many of a row's scores are the threshold, if not all that are it are chosen."""
    row = tl.program_id(0).to(tl.int64)
    group = row // rows
    lo, hi, left = _state(work_ptr, count_ptr, group, STEPS, COARSE, STEPS)
    if row % rows == 0:
        _keep_state(work_ptr, group, lo, hi, left, STEPS, STEPS)
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
    valid_ptr,
    work_ptr,
    ties_ptr,
    lists_ptr,
    counts_ptr,
    rows,
    n,
    width,
    CUT: tl.constexpr,
    FORCED: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """One row's list: what is above the threshold, as many ties as are left for it, what is forced."""
    CHUNK: tl.constexpr = TILE_ROWS * TILE_COLUMNS
    row = tl.program_id(0).to(tl.int64)
    group = row // rows
    state_ptr = work_ptr + group * ((STEPS + 1) * 260) + STEPS * 260 + 256
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
        reached = _count(scores_ptr, forced_ptr, size, lo, FORCED, CHUNK)
        sure = reached
        if (hi > lo) & (reached > width):
            sure = _count(scores_ptr, forced_ptr, size, hi, FORCED, CHUNK)
        if sure + tl.minimum(reached - sure, left) > width:
            hi = hi * 0 + 0x7F800002
            lo, hi, _, above = _rank(
                scores_ptr,
                forced_ptr,
                size,
                hi * 0,
                hi,
                reached,
                hi * 0,
                width,
                0,
                True,
                FORCED,
                False,
                TILE_ROWS,
                TILE_COLUMNS,
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
    _pad(lists_ptr, count, width, CHUNK)
