"""The highest scores over several rows at once: one budget for a group of rows, as compact lists or as bits.

Triton: a radix select on the scores' bit patterns, which order as the numbers do since none is negative: histograms
of digits of 7 bits, the highest first, each followed by the choice of the digit that holds the threshold. (Triton's
histogram takes time in proportion to its bins: digits of 11 bits took six times as long in all.)
"""

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, power_of_two, tl

WORD = 64  # bits
_BITS = 7  # of a digit
_SHIFTS = (24, 17, 10, 3, 0)  # of the digits, the highest first; the last has what is left, 3 bits


def select_top_k_over_all(
    scores: Tensor,
    counts: Tensor,
    forced: Tensor | None = None,
    backend: str = "torch",
    inner: int = 0,
) -> tuple[Tensor, Tensor]:
    """The `counts` highest positive scores of each group, and all forced entries, as ascending lists.

    scores: [groups, rows, n] float32, not negative; ties go to the lower row, then the lower entry
    counts: [groups] int32, at most so many of each group
    forced: [groups, rows, n] uint8, not 0 where an entry is taken whatever it scores; its score must be 0
    inner: rows are outer * inner; results are then [outer, groups, inner, …] (layers before sequences before heads)
    Returns lists [groups, rows, n] int32, undefined beyond their counts, and these [groups, rows] int32.
    """
    check_backend("select_top_k_over_all", backend, ("torch", "triton"))
    groups, rows, n = scores.shape
    if backend == "torch":
        chosen = _torch_top_k(scores, counts)
        if forced is not None:
            chosen |= forced.bool()
        if inner:
            chosen = chosen.unflatten(1, (-1, inner)).transpose(0, 1)
        order = (~chosen).to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)
        return order, chosen.sum(-1, dtype=torch.int32)
    shape = (rows // inner, groups, inner) if inner else (groups, rows)
    lists = torch.empty(*shape, n, dtype=torch.int32, device=scores.device)
    taken = torch.empty(shape, dtype=torch.int32, device=scores.device)
    _launch(scores, counts, forced, lists, taken, None, inner or rows)
    return lists, taken


def mark_top_k_over_all(scores: Tensor, counts: Tensor, backend: str = "torch") -> Tensor:
    """`select_top_k_over_all` as bits, the lowest first: [groups, rows, ceil(n / 64)] int64."""
    check_backend("mark_top_k_over_all", backend, ("torch", "triton"))
    groups, rows, n = scores.shape
    words = -(-n // WORD)
    if backend == "torch":
        chosen = torch.nn.functional.pad(_torch_top_k(scores, counts), (0, words * WORD - n))
        bits = chosen.view(groups, rows, words, WORD).long() << torch.arange(WORD, device=scores.device)
        return bits.sum(3)
    marked = torch.empty(groups, rows, words, dtype=torch.int64, device=scores.device)
    _launch(scores, counts, None, None, None, marked)
    return marked


def _torch_top_k(scores: Tensor, counts: Tensor) -> Tensor:
    flat = scores.flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(flat.shape[1], device=flat.device).expand_as(order)
    )
    return ((rank < counts[:, None]) & (flat > 0)).view(scores.shape)


def _launch(
    scores: Tensor,
    counts: Tensor,
    forced: Tensor | None,
    lists: Tensor | None,
    taken: Tensor | None,
    words: Tensor | None,
    inner: int = 1,
) -> None:
    groups, rows, n = scores.shape
    counts = counts.contiguous()  # it may be one number, expanded
    device = scores.device
    histogram = torch.zeros(groups, 1 << _BITS, dtype=torch.int32, device=device)
    # The threshold's bits so far, and how many entries are still to be found at or below them.
    state = torch.zeros(groups, 2, dtype=torch.int32, device=device)
    programs = max(1, min(64, -(-rows * n // 16384)))
    above = 31  # bits at and above a digit are looked at already
    for shift in _SHIFTS:
        digit = {"FIRST": above == 31, "SHIFT": shift, "ABOVE": above, "BINS": 1 << _BITS}
        _histogram_kernel[(groups, programs)](scores, histogram, state, rows * n, **digit, CHUNK=2048)
        _digit_kernel[(groups,)](histogram, state, counts, **digit)
        above = shift
    ties = torch.empty(groups, rows, dtype=torch.int32, device=device)
    _ties_kernel[(groups * rows,)](scores, state, ties, n, rows, CHUNK=1024)
    _emit_kernel[(groups * rows,)](
        scores,
        scores if forced is None else forced,
        state,
        ties,
        scores if lists is None else lists,
        scores if taken is None else taken,
        scores if words is None else words,
        n,
        rows,
        -(-n // WORD),
        FORCED=forced is not None,
        LISTS=lists is not None,
        CHUNK=1024,
        ROWS=power_of_two(rows),
        INNER=inner,
    )


@jit
def _histogram_kernel(
    scores_ptr,
    histogram_ptr,
    state_ptr,
    size: tl.constexpr,
    FIRST: tl.constexpr,
    SHIFT: tl.constexpr,
    ABOVE: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Digits of the positive scores whose higher bits are the threshold's."""
    group = tl.program_id(0).to(tl.int64)
    found = tl.zeros([BINS], tl.int32)
    prefix = tl.load(state_ptr + group * 2)
    for start in tl.range(tl.program_id(1) * CHUNK, size, tl.num_programs(1) * CHUNK):
        at = start + tl.arange(0, CHUNK)
        bits = tl.load(scores_ptr + group * size + at, mask=at < size, other=0.0).to(tl.int32, bitcast=True)
        member = bits > 0
        if not FIRST:
            member = member & ((bits >> ABOVE) == prefix)
        digit = (bits >> SHIFT) & ((1 << (ABOVE - SHIFT)) - 1)
        found += tl.histogram(tl.where(member, digit, 0), BINS, mask=member)
    bins = tl.arange(0, BINS)
    tl.atomic_add(histogram_ptr + group * BINS + bins, found, mask=found > 0)


@jit
def _digit_kernel(
    histogram_ptr,
    state_ptr,
    counts_ptr,
    FIRST: tl.constexpr,
    SHIFT: tl.constexpr,
    ABOVE: tl.constexpr,
    BINS: tl.constexpr,
):
    """The digit at which the wanted number of entries is reached, from the highest down; clears the histogram."""
    group = tl.program_id(0)
    bins = tl.arange(0, BINS)
    found = tl.load(histogram_ptr + group * BINS + bins)
    total = tl.sum(found, 0)
    at_or_above = total - tl.cumsum(found, 0) + found
    if FIRST:
        prefix = 0
        wanted = tl.minimum(tl.load(counts_ptr + group), total)
    else:
        prefix = tl.load(state_ptr + group * 2)
        wanted = tl.load(state_ptr + group * 2 + 1)
    digit = tl.maximum(tl.sum((at_or_above >= wanted).to(tl.int32), 0) - 1, 0)
    above = tl.sum(tl.where(bins > digit, found, 0), 0)
    if wanted <= 0:  # nothing: no score's bits reach this
        tl.store(state_ptr + group * 2, 2147483647 >> SHIFT)
        tl.store(state_ptr + group * 2 + 1, 0)
    else:
        tl.store(state_ptr + group * 2, (prefix << (ABOVE - SHIFT)) | digit)
        tl.store(state_ptr + group * 2 + 1, wanted - above)
    tl.store(histogram_ptr + group * BINS + bins, tl.zeros([BINS], tl.int32))


@jit
def _ties_kernel(scores_ptr, state_ptr, ties_ptr, n: tl.constexpr, rows: tl.constexpr, CHUNK: tl.constexpr):
    """How many of a row's scores are the threshold."""
    row = tl.program_id(0).to(tl.int64)
    threshold = tl.load(state_ptr + row // rows * 2)
    count = tl.zeros([CHUNK], tl.int32)
    for start in tl.range(0, n, CHUNK):
        at = start + tl.arange(0, CHUNK)
        bits = tl.load(scores_ptr + row * n + at, mask=at < n, other=0.0).to(tl.int32, bitcast=True)
        count += ((bits == threshold) & (bits > 0)).to(tl.int32)
    tl.store(ties_ptr + row, tl.sum(count, 0))


@jit
def _emit_kernel(
    scores_ptr,
    forced_ptr,
    state_ptr,
    ties_ptr,
    lists_ptr,
    taken_ptr,
    words_ptr,
    n: tl.constexpr,
    rows: tl.constexpr,
    word_count: tl.constexpr,
    FORCED: tl.constexpr,
    LISTS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
):
    """One row: what lies above the threshold, as many ties as are left for it, and what is forced."""
    row = tl.program_id(0).to(tl.int64)
    group = row // rows
    threshold = tl.load(state_ptr + group * 2)
    others = tl.arange(0, ROWS)
    earlier = tl.load(ties_ptr + group * rows + others, mask=others < row % rows, other=0)
    left = tl.load(state_ptr + group * 2 + 1) - tl.sum(earlier, 0)
    taken = 0
    groups = tl.num_programs(0) // rows
    out_row = (row % rows // INNER * groups + group) * INNER + row % INNER
    for start in tl.range(0, n, CHUNK):
        at = start + tl.arange(0, CHUNK)
        bits = tl.load(scores_ptr + row * n + at, mask=at < n, other=0.0).to(tl.int32, bitcast=True)
        tie = ((bits == threshold) & (bits > 0)).to(tl.int32)
        chosen = (bits > threshold) | ((tie > 0) & (tl.cumsum(tie, 0) <= left))
        left -= tl.sum(tie, 0)
        if FORCED:
            chosen = chosen | (tl.load(forced_ptr + row * n + at, mask=at < n, other=0) != 0)
        if LISTS:
            place = tl.cumsum(chosen.to(tl.int32), 0) - 1 + taken
            tl.store(lists_ptr + out_row * n + place, at, mask=chosen)
            taken += tl.sum(chosen.to(tl.int32), 0)
        else:
            bit = chosen.to(tl.int64) << (at % 64).to(tl.int64)
            word = tl.sum(tl.reshape(bit, [CHUNK // 64, 64]), 1)
            place = start // 64 + tl.arange(0, CHUNK // 64)
            tl.store(words_ptr + row * word_count + place, word, mask=place < word_count)
    if LISTS:
        tl.store(taken_ptr + out_row, taken)
