"""From rows of block weights to compact, ascending block lists: top-k and nucleus."""

import torch
from torch import Tensor

from kernels.backends import check_backend


def select_top_k(weights: Tensor, valid: Tensor, k: Tensor, backend: str = "torch") -> tuple[Tensor, Tensor]:
    """The `k` heaviest entries of each row among its first `valid` ones; ties go to the lower index.

    weights: [rows, n] float, finite and not negative
    valid, k: [rows] int; a k beyond `valid` selects all
    Returns lists [rows, width] int32 ascending, and counts [rows] int32; entries past the count are 0.
    """
    check_backend("select_top_k", backend)
    return compact(top_k_mask(weights, valid, k))


def top_k_mask(weights: Tensor, valid: Tensor, k: Tensor) -> Tensor:
    """`select_top_k` as bool [rows, n]."""
    _check_weights("select_top_k", weights)
    columns = torch.arange(weights.shape[1], device=weights.device)
    ranked = weights.where(columns < valid[:, None], -1.0)
    order = ranked.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, columns.expand_as(order))
    return (rank < torch.minimum(k, valid)[:, None]) & (columns < valid[:, None])


def select_nucleus(
    weights: Tensor, valid: Tensor, mass: float, iterations: int = 24, backend: str = "torch"
) -> tuple[Tensor, Tensor]:
    """The entries at or above a threshold that leaves at least `mass` of each row's total weight.

    Sorting-free (SpecAttn, Algorithm 2): bisection on the threshold. The lower bound is returned, so the
    selection never holds less than `mass`. Arguments and result as for `select_top_k`; 0 < mass <= 1.
    """
    check_backend("select_nucleus", backend)
    return compact(nucleus_mask(weights, valid, mass, iterations))


def nucleus_mask(weights: Tensor, valid: Tensor, mass: float, iterations: int = 24) -> Tensor:
    """`select_nucleus` as bool [rows, n]."""
    _check_weights("select_nucleus", weights)
    if not 0 < mass <= 1:
        raise ValueError(f"select_nucleus: mass must lie in (0, 1], got {mass}")
    inside = torch.arange(weights.shape[1], device=weights.device) < valid[:, None]
    masked = weights.double().where(inside, 0)
    wanted = mass * masked.sum(1)
    low, high = torch.zeros_like(wanted), masked.amax(1) if masked.shape[1] else torch.zeros_like(wanted)
    for _ in range(iterations):
        middle = (low + high) / 2
        enough = masked.where(masked >= middle[:, None], 0).sum(1) >= wanted
        low, high = middle.where(enough, low), high.where(enough, middle)
    return inside & (masked >= low[:, None])


def compact(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Bool [rows, n] to ascending lists [rows, max count] int32 padded with 0, and counts [rows] int32."""
    counts = chosen.sum(1, dtype=torch.int32)
    width = int(counts.max()) if counts.numel() else 0
    order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :width].to(torch.int32)
    return order.where(torch.arange(width, device=chosen.device) < counts[:, None], 0), counts


def _check_weights(operation: str, weights: Tensor) -> None:
    if weights.device.type == "cpu" and not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ValueError(f"{operation}: weights must be finite and not negative")
