"""One budget over all rows of a group, in Triton: a threshold for each group, then lists or bits of each row."""

from math import gcd

import torch
from torch import Tensor

from specahead.kernels.backends import overlapping_launch, power_of_two
from specahead.kernels.selection.over_rows_kernels import (
    Workspace,
    bracket_kernel,
    emit_kernel,
    tally_kernel,
    threshold_kernel,
)

SAMPLE = 4096  # scores of a group that are sampled, at most
PIVOTS = 16  # ranked by a program
PARTS = 32  # programs that rank a group's pivots
SPREAD = 3.5  # standard deviations of the sample between the threshold and its bounds
BINS = 4096  # between the bounds
SLOTS = 128  # entries of a bin that are kept; 4 MB a group
TALLY_CHUNK = 512  # scores that a program sorts into bins at once
EMIT_CHUNK = 256  # scores of a row that a program writes at once
EMIT_WHOLE = 8192  # the same where there are at most FEW_ROWS rows
FEW_ROWS = 512
SLOW_CHUNK = 8192  # scores that the search of a whole group reads at once
TALLY_PROGRAMS = 1024  # that a GPU of 132 multiprocessors holds at once


def find_thresholds(scores: Tensor, counts: Tensor) -> Tensor:
    """Return `Workspace.state`: what is chosen in each group, [groups, 2] int32.

    scores: [groups, rows, n] float32, contiguous, not empty; counts: [groups] int32
    """
    counts = counts.contiguous()  # it may be one number, expanded
    groups, rows, n = scores.shape
    size, device, overlap = rows * n, scores.device, overlapping_launch(scores.device)
    work = Workspace(
        bracket=torch.empty(groups, 4, PARTS, dtype=torch.int32, device=device),
        tallies=torch.empty(groups, BINS + 3, dtype=torch.int32, device=device),
        slots=torch.empty(groups, BINS, SLOTS, dtype=torch.int64, device=device),
        state=torch.empty(groups, 2, dtype=torch.int32, device=device),
    )
    stride = sample_stride(size, n)
    sampled = -(-size // stride)
    piece = min(SAMPLE // 4, max(32, power_of_two(sampled)))
    bracket_kernel[(groups, PARTS)](
        scores_ptr=scores,
        counts_ptr=counts,
        work=work,
        size=size,
        stride=stride,
        sampled=sampled,
        pivot_step=-(-sampled // (PIVOTS * PARTS)),
        spread=SPREAD,
        PIECES=-(-sampled // piece),
        PIECE=piece,
        PIVOTS=PIVOTS,
        PARTS=PARTS,
        BINS=BINS,
        num_warps=min(8, max(1, piece // 64)),
        **overlap,
    )
    bins = {"PARTS": PARTS, "LOG_BINS": BINS.bit_length() - 1, "SLOTS": SLOTS} | overlap
    chunk = min(TALLY_CHUNK, max(64, power_of_two(n)))
    warps, slow_chunk = min(4, max(1, chunk // 512)), min(SLOW_CHUNK, max(64, power_of_two(size)))
    splits = max(1, min(-(-n // chunk), TALLY_PROGRAMS // (groups * rows)))
    for again in (False, True):
        tally_kernel[(groups * rows, splits)](scores, work, n, rows, CHUNK=chunk, AGAIN=again, num_warps=warps, **bins)
        threshold_kernel[(groups,)](scores, counts, work, size, CHUNK=slow_chunk, AGAIN=again, num_warps=16, **bins)
    return work.state


def sample_stride(size: int, n: int) -> int:
    """Return how far apart the entries of a sample of `size` stand, so that it sees all `n` columns evenly."""
    stride = -(-size // SAMPLE)
    while gcd(stride, n) > 1:
        stride += 1
    return stride


def write_lists(scores: Tensor, forced: Tensor | None, thresholds: Tensor, inner: int) -> tuple[Tensor, Tensor]:
    """Return the chosen and the forced entries as `specahead.kernels.selection.select_over_rows` does."""
    groups, rows, n = scores.shape
    shape = (rows // inner, groups, inner) if inner else (groups, rows)
    lists = torch.empty(*shape, n, dtype=torch.int32, device=scores.device)
    counts = torch.empty(shape, dtype=torch.int32, device=scores.device)
    _emit(scores, None if forced is None else forced.contiguous(), thresholds, lists, counts, None, inner or rows)
    return lists, counts


def write_bits(scores: Tensor, thresholds: Tensor, words: int) -> Tensor:
    """Return the chosen entries as `specahead.kernels.selection.mark_over_rows` does."""
    groups, rows, _ = scores.shape
    marked = torch.empty(groups, rows, words, dtype=torch.int64, device=scores.device)
    _emit(scores, None, thresholds, None, None, marked, 1)
    return marked


def _emit(
    scores: Tensor,
    forced: Tensor | None,
    thresholds: Tensor,
    lists: Tensor | None,
    counts: Tensor | None,
    words: Tensor | None,
    inner: int,
) -> None:
    groups, rows, n = scores.shape
    chunk = min(EMIT_WHOLE if groups * rows <= FEW_ROWS else EMIT_CHUNK, max(64, power_of_two(n)))
    emit_kernel[(groups * rows,)](
        scores_ptr=scores,
        forced_ptr=forced,
        state_ptr=thresholds,
        lists_ptr=lists,
        taken_ptr=counts,
        words_ptr=words,
        n=n,
        rows=rows,
        word_count=1 if words is None else words.shape[2],
        CHUNK=chunk,
        INNER=inner,
        num_warps=min(16, max(1, chunk // 256)),
        **overlapping_launch(scores.device),
    )
