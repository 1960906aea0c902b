"""From rows of block weights to compact, ascending block lists: top-k and nucleus.

`reference` is in torch. By Triton, a threshold is searched for on the weights' bits, sorting nothing (`search`): in
one program for a row that fits its registers (`short_rows`), by several for a longer one (`long_rows`).
"""

import torch
from torch import Tensor

import kernels.selection.short_rows as short_rows
from kernels.backends import check_backend
from kernels.selection.long_rows import select_long_rows
from kernels.selection.reference import check_mass, compact, nucleus_mask, rank_in_row, top_k_mask

__all__ = ["compact", "nucleus_mask", "rank_in_row", "select_nucleus", "select_top_k", "top_k_mask"]


def select_top_k(
    weights: Tensor, valid: Tensor, k: Tensor, backend: str = "torch", width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Select the `k` heaviest entries of each row among its first `valid` ones; ties go to the lower index.

    weights: [rows, n] float, not negative, infinity the heaviest; for `triton` float32, contiguous
    valid, k: [rows] int32 or int64; a k beyond `valid` selects all
    width: of the lists, at least the greatest count; None: that count, or n for `triton`, which does not wait for it
    Returns lists [rows, width] int32 ascending, and counts [rows] int32; entries past the count say nothing.
    Raises ValueError for weights that the backend does not take.
    """
    check_backend("select_top_k", backend)
    if backend == "triton":
        return _select_rows("select_top_k", weights, valid, k, None, width)
    return compact(top_k_mask(weights, valid, k), width)


def select_nucleus(
    weights: Tensor, valid: Tensor, mass: float, backend: str = "torch", width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Select the entries at or above a threshold that leaves at least `mass` of each row's total weight.

    Sorting-free (SpecAttn, Algorithm 2): bisection on the threshold. The lower bound is returned, so the
    selection never holds less than `mass`. Arguments, result and what is raised: as for `select_top_k`; 0 < mass <= 1.
    `torch` halves 24 times; `triton` goes on until no weight lies between the bounds, and adds in float32.
    """
    check_backend("select_nucleus", backend)
    if backend == "triton":
        check_mass(mass)
        return _select_rows("select_nucleus", weights, valid, None, mass, width)
    return compact(nucleus_mask(weights, valid, mass), width)


def _select_rows(
    operation: str, weights: Tensor, valid: Tensor, k: Tensor | None, mass: float | None, width: int | None
) -> tuple[Tensor, Tensor]:
    if weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(
            f"{operation}: backend 'triton' needs contiguous float32 weights, got {weights.dtype} with strides "
            f"{weights.stride()}"
        )
    rows, n = weights.shape
    lists = torch.empty(rows, n if width is None else width, dtype=torch.int32, device=weights.device)
    counts = torch.empty(rows, dtype=torch.int32, device=weights.device)
    if rows:
        valid = valid.contiguous()  # it may be one number, expanded
        select = select_long_rows if n > short_rows.CHUNK else short_rows.select_short_rows
        select(weights, valid, valid if k is None else k.contiguous(), mass, lists, counts)
    return lists, counts
