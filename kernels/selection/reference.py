"""Selections in plain torch: the reference for the Triton kernels, and the implementation for very long rows.

On a GPU only `compact` without a width waits for the device, so that CUDA graphs can capture everything else.
"""

import torch
from torch import Tensor

from specahead.kernels.selection.memory import WORD


def top_k_mask(weights: Tensor, valid: Tensor, k: Tensor) -> Tensor:
    """Return the selection of `specahead.kernels.selection.select_top_k` as bool [rows, n].

    Raises ValueError, on a CPU, for weights that are negative or NaN.
    """
    if weights.device.type == "cpu" and not bool((weights >= 0).all()):
        raise ValueError("select_top_k: weights must not be negative nor NaN")
    columns = torch.arange(weights.shape[1], device=weights.device)
    ranked = weights.where(columns < valid[:, None], -1.0)
    return (_rank_in_row(ranked) < torch.minimum(k, valid)[:, None]) & (columns < valid[:, None])


def over_rows_mask(scores: Tensor, counts: Tensor) -> Tensor:
    """Return the selection of `specahead.kernels.selection.select_over_rows`, without forced entries, as bool [groups,
    rows, n].
    """
    flat = scores.flatten(1)
    return ((_rank_in_row(flat) < counts[:, None]) & (flat > 0)).view(scores.shape)


def _rank_in_row(values: Tensor) -> Tensor:
    """Return how many entries of its row stand before each entry of [rows, n]: int64, ties by the lower index."""
    order = values.argsort(dim=1, descending=True, stable=True)
    columns = torch.arange(values.shape[1], device=values.device)
    return torch.empty_like(order).scatter_(1, order, columns.expand_as(order))


def compact(chosen: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Turn bool [rows, n] into ascending lists [rows, width] int32, padded with 0, and counts [rows] int32.

    width: longer lists are cut to it; None: the greatest count.
    """
    counts = chosen.sum(1, dtype=torch.int32)
    if width is None:
        width = int(counts.max()) if counts.numel() else 0
    counts = counts.clamp(max=width)
    place = chosen.cumsum(1) - 1
    # What is not chosen, or does not fit, goes to a column that is cut off.
    place = place.where(chosen & (place < width), width)
    columns = torch.arange(chosen.shape[1], dtype=torch.int32, device=chosen.device).expand_as(chosen)
    lists = torch.zeros(len(chosen), width + 1, dtype=torch.int32, device=chosen.device)
    return lists.scatter_(1, place, columns)[:, :width].contiguous(), counts


def pack_bits(chosen: Tensor) -> Tensor:
    """Return bool [..., n] as bits, the lowest first: int64 [..., ceil(n / 64)]."""
    n = chosen.shape[-1]
    bits = torch.nn.functional.pad(chosen, (0, -n % WORD)).unflatten(-1, (-1, WORD)).long()
    return (bits << torch.arange(WORD, device=chosen.device)).sum(-1)
