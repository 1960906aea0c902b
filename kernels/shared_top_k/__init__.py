"""The highest scores over several rows at once: one budget for a group of rows, as compact lists or as bits.

Here are the dispatch and the torch reference; `launch` runs the Triton kernels of `kernel`.
"""

import torch
from torch import Tensor

from specahead.kernels.backends import check_backend
from specahead.kernels.selection import rank_in_row
from specahead.kernels.shared_budget import WORD
from specahead.kernels.shared_top_k.launch import find_thresholds, write_chosen

__all__ = ["mark_top_k_over_all", "select_top_k_over_all"]


def select_top_k_over_all(
    scores: Tensor, counts: Tensor, forced: Tensor | None = None, backend: str = "torch", inner: int = 0
) -> tuple[Tensor, Tensor]:
    """Select the `counts` highest positive scores of each group, and all forced entries, as ascending lists.

    scores: [groups, rows, n] float32, not negative; ties go to the lower row, then the lower entry
    counts: [groups] int32, at most so many of each group
    forced: [groups, rows, n] uint8, not 0 where an entry is taken whatever it scores; its score must be 0
    inner: rows are outer * inner; results are then [outer, groups, inner, …] (layers before sequences before heads)
    Returns lists [groups, rows, n] int32, undefined beyond their counts, and these [groups, rows] int32.
    """
    check_backend("select_top_k_over_all", backend)
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
    if scores.numel():
        scores = scores.contiguous()
        write_chosen(scores, forced, find_thresholds(scores, counts), (lists, taken), None, inner or rows)
    else:
        taken.zero_()
    return lists, taken


def mark_top_k_over_all(scores: Tensor, counts: Tensor, backend: str = "torch") -> Tensor:
    """Return what `select_top_k_over_all` selects as bits, the lowest first: [groups, rows, ceil(n / 64)] int64."""
    check_backend("mark_top_k_over_all", backend)
    groups, rows, n = scores.shape
    words = -(-n // WORD)
    if backend == "torch":
        chosen = torch.nn.functional.pad(_torch_top_k(scores, counts), (0, words * WORD - n))
        bits = chosen.view(groups, rows, words, WORD).long() << torch.arange(WORD, device=scores.device)
        return bits.sum(3)
    marked = torch.empty(groups, rows, words, dtype=torch.int64, device=scores.device)
    if scores.numel():
        scores = scores.contiguous()
        write_chosen(scores, None, find_thresholds(scores, counts), None, marked)
    return marked


def _torch_top_k(scores: Tensor, counts: Tensor) -> Tensor:
    flat = scores.flatten(1)
    return ((rank_in_row(flat) < counts[:, None]) & (flat > 0)).view(scores.shape)
