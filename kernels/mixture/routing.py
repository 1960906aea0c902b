"""Which tile multiplies which rows by which expert: torch on the device, in shapes that do not depend on the choice."""

from typing import NamedTuple

import torch
from torch import Tensor

_SIZES = 16, 64, 128  # rows of a tile


class Tiles(NamedTuple):
    """Pairs of a row and an expert, sorted by expert and cut into tiles of at most `size` pairs of one expert.

    There is room for as many tiles as there can be; those behind the last are empty.
    """

    order: Tensor
    """[pairs] int32: the pairs in their order. Pair p is of row p // chosen."""
    places: Tensor
    """[pairs] int32: the place of each pair in that order."""
    experts: Tensor
    """[tiles] int32: the expert of each tile; any, where a tile is empty."""
    starts: Tensor
    """[tiles] int32: the place of a tile's first pair."""
    ends: Tensor
    """[tiles] int32: the place behind its last pair."""
    size: int
    """Pairs of a tile, at most."""


def tile_rows(pairs: int, experts: int) -> int:
    """Return the rows of a tile: the least size with which an expert's even share of the pairs fills at most four."""
    return next((size for size in _SIZES if pairs <= 4 * size * experts), _SIZES[-1])


def plan_tiles(ids: Tensor, experts: int, size: int) -> Tiles:
    """Return the tiles of the experts' numbers ids [rows, chosen] int64. Launches only."""
    flat, pairs = ids.flatten(), ids.numel()
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    needed = (counts + size - 1) // size
    behind = needed.cumsum(0)
    tile = torch.arange(pairs // size + min(pairs, experts), device=ids.device)
    expert = torch.searchsorted(behind, tile, right=True).clamp(max=experts - 1)
    ends_of_expert = counts.cumsum(0)[expert]
    starts = ends_of_expert - counts[expert] + (tile - (behind - needed)[expert]) * size
    starts = starts.where(tile < behind[-1], ends_of_expert)
    ends = torch.minimum(starts + size, ends_of_expert)
    places = torch.empty_like(order)
    places[order] = torch.arange(pairs, device=ids.device)
    return Tiles(order.int(), places.int(), expert.int(), starts.int(), ends.int(), size)
