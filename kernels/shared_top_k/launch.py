"""Launching the Triton kernels: the threshold of each group, then the lists or bits of each row."""

from math import gcd

import torch
from torch import Tensor

from specahead.kernels.backends import overlapping_launch, power_of_two
from specahead.kernels.shared_budget import WORD
from specahead.kernels.shared_top_k.kernel import bracket_kernel, emit_kernel, tally_kernel, threshold_kernel

SAMPLE = 4096  # of a group, at most
PIVOTS = 16  # ranked by a program
PARTS = 32  # programs that rank a group's pivots
SPREAD = 3.5  # standard deviations of the sample between the threshold and its bounds
BINS = 4096  # between the bounds
SLOTS = 128  # entries of a bin that are kept; 4 MB a group
TALLY_CHUNK = 512
EMIT_CHUNK = 256
EMIT_WHOLE = 8192  # a row at once, where there are few
FEW_ROWS = 512
SLOW_CHUNK = 8192
TALLY_PROGRAMS = 1024  # that a GPU of 132 multiprocessors holds at once


def find_thresholds(scores: Tensor, counts: Tensor) -> Tensor:
    """Return the lowest bits that are chosen in each group, and the last entry at which they are: [groups, 2] int32.

    scores: [groups, rows, n] float32, contiguous, not empty; counts: [groups] int32.
    """
    counts = counts.contiguous()  # it may be one number, expanded
    groups, rows, n = scores.shape
    size, device = rows * n, scores.device
    bracket = torch.empty(groups, 4, PARTS, dtype=torch.int32, device=device)
    tallies = torch.empty(groups, BINS + 3, dtype=torch.int32, device=device)
    slots = torch.empty(groups, BINS, SLOTS, dtype=torch.int64, device=device)
    state = torch.empty(groups, 2, dtype=torch.int32, device=device)
    _rank_pivots(scores, counts, bracket, tallies)
    of_bins = {"PARTS": PARTS, "LOG_BINS": BINS.bit_length() - 1, "SLOTS": SLOTS}
    chunk = min(TALLY_CHUNK, max(64, power_of_two(n)))
    splits = max(1, min(-(-n // chunk), TALLY_PROGRAMS // (groups * rows)))
    for again in (False, True):
        tally_kernel[(groups * rows, splits)](
            *(scores, bracket, tallies, slots, state, n, rows),
            CHUNK=chunk,
            **of_bins,
            AGAIN=again,
            num_warps=min(4, max(1, chunk // 512)),
            **overlapping_launch(device),
        )
        threshold_kernel[(groups,)](
            *(scores, counts, bracket, tallies, slots, state, size),
            CHUNK=min(SLOW_CHUNK, max(64, power_of_two(size))),
            **of_bins,
            AGAIN=again,
            num_warps=16,
            **overlapping_launch(device),
        )
    return state


def _rank_pivots(scores: Tensor, counts: Tensor, bracket: Tensor, tallies: Tensor) -> None:
    """Fill `bracket` and clear `tallies`."""
    groups, rows, n = scores.shape
    size = rows * n
    stride = sample_stride(size, n)
    sampled = -(-size // stride)
    piece = min(SAMPLE // 4, max(32, power_of_two(sampled)))
    bracket_kernel[(groups, PARTS)](
        *(scores, counts, bracket, tallies, size, stride, sampled, -(-sampled // (PIVOTS * PARTS)), SPREAD),
        PIECES=-(-sampled // piece),
        PIECE=piece,
        PIVOTS=PIVOTS,
        PARTS=PARTS,
        BINS=BINS,
        num_warps=min(8, max(1, piece // 64)),
        **overlapping_launch(scores.device),
    )


def sample_stride(size: int, n: int) -> int:
    """Return how far apart the entries of a sample of `size` stand, so that it sees all `n` columns evenly."""
    stride = -(-size // SAMPLE)
    while gcd(stride, n) > 1:
        stride += 1
    return stride


def write_chosen(
    scores: Tensor,
    forced: Tensor | None,
    thresholds: Tensor,
    lists: tuple[Tensor, Tensor] | None,
    words: Tensor | None,
    inner: int = 1,
) -> None:
    """Fill `lists` with what is chosen and its counts, as `kernels.shared_top_k.select_top_k_over_all` returns them.

    Or else `words`, as `mark_top_k_over_all` returns them.
    """
    groups, rows, n = scores.shape
    chunk = min(EMIT_WHOLE if groups * rows <= FEW_ROWS else EMIT_CHUNK, max(64, power_of_two(n)))
    emit_kernel[(groups * rows,)](
        *(scores, scores if forced is None else forced.contiguous(), thresholds),
        *((scores, scores) if lists is None else lists),
        *(scores if words is None else words, n, rows, -(-n // WORD)),
        FORCED=forced is not None,
        LISTS=lists is not None,
        CHUNK=chunk,
        INNER=inner,
        num_warps=min(16, max(1, chunk // 256)),
        **overlapping_launch(scores.device),
    )
