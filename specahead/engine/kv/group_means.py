"""Means of keys and values over groups of tokens, which stand in for the tokens that a sparse read leaves out."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE, OutOfPages, SequenceKV, kv_zeros
from specahead.kernels.backends import default_backend, send
from specahead.kernels.group_means import make_group_means
from specahead.kernels.paged_attention import GroupMeans


class GroupMeanPool:
    """Means of keys and values, and variances of keys, of groups of tokens, in slots 0 … n - 1.

    Each slot is free or belongs to a group of one sequence. A group's mean is made once, when all its tokens are
    committed, and freed with its sequence.
    """

    def __init__(self, k_pages: list[Tensor], group_size: int, slots: int, variance_limit: float) -> None:
        """variance_limit: as `GroupMeans` has it."""
        if group_size < 1 or group_size % PAGE_SIZE:
            raise ValueError(f"groups of {group_size} tokens are no whole pages of {PAGE_SIZE}")
        _, kv_heads, _, head_dim = k_pages[0].shape
        shape, device = (len(k_pages), slots, kv_heads, head_dim), k_pages[0].device
        self.group_size, self.variance_limit = group_size, variance_limit
        self.k, self.v, self.k_variance = (kv_zeros(shape, torch.float32, device) for _ in range(3))
        self.free = list(range(slots - 1, -1, -1))

    def extend(self, sequence: SequenceKV, length: int, make: Callable[[np.ndarray, list[int]], None]) -> None:
        """Make the missing means of groups within the first `length` tokens, by `make` (KVCache.make_means)."""
        first, count = len(sequence.groups), self.missing(sequence, length)
        if not count:
            return
        if count > len(self.free):
            raise OutOfPages(f"{count} group means wanted, {len(self.free)} slots are free")
        slots = [self.free.pop() for _ in range(count)]
        per_group = self.group_size // PAGE_SIZE
        pages = sequence.table()[first * per_group : (first + count) * per_group].reshape(-1, per_group)
        make(pages, slots)
        sequence.groups += slots

    def missing(self, sequence: SequenceKV, length: int) -> int:
        """Return how many groups within the first `length` tokens of a sequence have no means yet."""
        return max(0, length // self.group_size - len(sequence.groups))

    def truncate(self, sequence: SequenceKV) -> None:
        """Free the means of groups that the sequence no longer fills."""
        keep = sequence.length // self.group_size
        self.free += sequence.groups[keep:]
        del sequence.groups[keep:]

    def over(self, tables: Tensor, counts: Tensor) -> list[GroupMeans]:
        """Return the means of each layer, as tables [sequences, max_groups] and counts [sequences] list them."""
        return [
            GroupMeans(*layer, tables, counts, self.group_size, self.variance_limit)
            for layer in zip(self.k, self.v, self.k_variance, strict=True)
        ]


def make_means(
    k_pages: list[Tensor],
    v_pages: list[Tensor],
    pages: np.ndarray,
    slots: list[int],
    pool: GroupMeanPool,
    first_layer: int = 0,
) -> None:
    """Make the means of groups in neighbouring layers, from `first_layer` on.

    k_pages, v_pages: of each layer [pages, kv_heads, PAGE_SIZE, head_dim].
    pages: int32 [groups, pages of a group], indices in these.
    slots: the slot of each group's means in the pool.
    """
    layers, device = slice(first_layer, first_layer + len(k_pages)), pool.k.device
    make_group_means(
        k_pages,
        v_pages,
        send(torch.from_numpy(pages.astype(np.int64)), device),
        send(torch.tensor(slots), device),
        pool.k[layers],
        pool.v[layers],
        pool.k_variance[layers],
        default_backend(device),
    )
