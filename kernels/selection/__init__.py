"""The heaviest entries of rows of weights: of each row by itself, or of all rows of a group under one budget.

Each operation has a torch reference (`reference`) and Triton kernels that sort nothing: `each_row` holds a row in
registers, `over_rows` takes groups of millions of entries. Both search for a threshold (`specahead.kernels.threshold`).
`announced` and `memory` make the scores that blocks are chosen by, `top_few` finds the likeliest tokens of logits.
"""

import torch
from torch import Tensor

from specahead.kernels.backends import Backend
from specahead.kernels.selection.announced import score_announced, unpack_bits
from specahead.kernels.selection.each_row import CHUNK, select_in_each_row
from specahead.kernels.selection.memory import WORD, Remembered, remember_weights, score_blocks
from specahead.kernels.selection.over_rows import find_thresholds, write_bits, write_lists
from specahead.kernels.selection.reference import compact, over_rows_mask, pack_bits, top_k_mask
from specahead.kernels.selection.top_few import top_few

__all__ = [
    "WORD",
    "Remembered",
    "compact",
    "mark_over_rows",
    "pack_bits",
    "remember_weights",
    "score_announced",
    "score_blocks",
    "select_over_rows",
    "select_top_k",
    "top_few",
    "top_k_mask",
    "unpack_bits",
]

# Rows of more than CHUNK blocks, of contexts beyond 131K, take the reference on a GPU too. A kernel of their own saved
# under a millisecond of a step of 7 ms and more, and took 400 lines.


def select_top_k(
    weights: Tensor, valid: Tensor, k: Tensor, backend: Backend = "torch", width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Select the `k` heaviest entries of each row among its first `valid` ones. Ties go to the lower index.

    weights: [rows, n] float, not negative; infinity is the heaviest. For `triton` float32 and contiguous
    valid, k: [rows] int32 or int64; a k beyond `valid` selects all
    width: of the lists; longer ones are cut to it. None: the greatest count, or n for `triton`, so that the host does
        not wait for the counts
    Returns ascending lists [rows, width] int32 and counts [rows] int32; entries after a count are undefined.
    Raises ValueError for weights that the backend does not take.
    """
    if backend == "triton":
        width = weights.shape[1] if width is None else width
        if weights.shape[1] <= CHUNK:
            return select_in_each_row(weights, valid, k, width)
    return compact(top_k_mask(weights, valid, k), width)


def select_over_rows(
    scores: Tensor, counts: Tensor, forced: Tensor | None = None, backend: Backend = "torch", inner: int = 0
) -> tuple[Tensor, Tensor]:
    """Select the `counts` highest positive scores of each group, over all its rows, and all forced entries.

    scores: [groups, rows, n] float32, not negative. Ties go to the lower row, then to the lower entry
    counts: [groups] int32, the most entries of each group; none where it is negative
    forced: [groups, rows, n] uint8, not 0 where an entry is selected whatever it scores; its score must be 0
    inner: where rows are outer * inner, results have the shape [outer, groups, inner, …] (layers before sequences
        before heads); 0: [groups, rows, …]
    Returns ascending lists [groups, rows, n] int32 and their counts [groups, rows] int32; entries after a count are
    undefined.
    """
    if backend == "triton" and scores.numel():
        scores = scores.contiguous()
        return write_lists(scores, forced, find_thresholds(scores, counts), inner)
    chosen = over_rows_mask(scores, counts)
    if forced is not None:
        chosen |= forced.bool()
    if inner:
        chosen = chosen.unflatten(1, (-1, inner)).transpose(0, 1)
    order = (~chosen).to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)
    return order, chosen.sum(-1, dtype=torch.int32)


def mark_over_rows(scores: Tensor, counts: Tensor, backend: Backend = "torch") -> Tensor:
    """Return what `select_over_rows` selects as bits, the lowest first: [groups, rows, ceil(n / 64)] int64."""
    if backend == "triton" and scores.numel():
        scores = scores.contiguous()
        return write_bits(scores, find_thresholds(scores, counts), -(-scores.shape[2] // WORD))
    return pack_bits(over_rows_mask(scores, counts))
