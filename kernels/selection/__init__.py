"""From rows of block weights to compact, ascending block lists: top-k and nucleus.

`reference` is in torch; `short_rows` searches for a threshold on the weights' bits by Triton, sorting nothing.
"""

from torch import Tensor

from specahead.kernels.backends import check_backend
from specahead.kernels.selection.reference import check_mass, compact, nucleus_mask, rank_in_row, top_k_mask
from specahead.kernels.selection.short_rows import CHUNK, select_short_rows

__all__ = ["compact", "nucleus_mask", "rank_in_row", "select_nucleus", "select_top_k", "top_k_mask"]

# Rows of more than CHUNK blocks, of contexts beyond 131K, take the reference on a GPU too, where 128 rows of 32,768
# take 0.8 ms (docs/performance.md): kernels of their own took 0.04, in 400 lines, of a step of 7 ms and more.


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
        width = weights.shape[1] if width is None else width
        if weights.shape[1] <= CHUNK:
            return select_short_rows("select_top_k", weights, valid, k, 0.0, width)
    return compact(top_k_mask(weights, valid, k), width)


def select_nucleus(
    weights: Tensor, valid: Tensor, mass: float, backend: str = "torch", width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Select the entries at or above a threshold that leaves at least `mass` of each row's total weight.

    Sorting-free (SpecAttn, Algorithm 2): bisection on the threshold. The lower bound is returned, so the
    selection never holds less than `mass`. Arguments, result and what is raised: as for `select_top_k`; 0 < mass <= 1.
    The reference halves 24 times; the kernel goes on until no weight lies between the bounds, and adds in float32.
    """
    check_backend("select_nucleus", backend)
    check_mass(mass)
    if backend == "triton":
        width = weights.shape[1] if width is None else width
        if weights.shape[1] <= CHUNK:
            return select_short_rows("select_nucleus", weights, valid, None, mass, width)
    return compact(nucleus_mask(weights, valid, mass), width)
