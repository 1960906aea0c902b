"""A choice of KV blocks for each of several attention heads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BlockSelection:
    """`keys`: head * num_blocks + block, ascending and distinct, int64."""

    num_heads: int
    num_blocks: int
    keys: np.ndarray

    @staticmethod
    def from_lists(lists: Sequence[Sequence[int]], num_blocks: int) -> "BlockSelection":
        keys = [
            head * num_blocks + block for head, blocks in enumerate(lists) for block in sorted(set(blocks))
        ]
        return BlockSelection(len(lists), num_blocks, np.array(keys, dtype=np.int64))

    @staticmethod
    def from_matrix(chosen: np.ndarray) -> "BlockSelection":
        """chosen: bool [heads, blocks]"""
        heads, blocks = chosen.shape
        return BlockSelection(heads, blocks, np.flatnonzero(chosen))

    def matrix(self) -> np.ndarray:
        """bool [heads, blocks]"""
        flat = np.zeros(self.num_heads * self.num_blocks, dtype=bool)
        flat[self.keys] = True
        return flat.reshape(self.num_heads, self.num_blocks)

    def lists(self) -> list[list[int]]:
        return [np.flatnonzero(row).tolist() for row in self.matrix()]

    def resized(self, num_blocks: int) -> "BlockSelection":
        """The same blocks in a context of another length; blocks beyond it are dropped."""
        if num_blocks == self.num_blocks:
            return self
        head, block = np.divmod(self.keys, max(1, self.num_blocks))
        keep = block < num_blocks
        return BlockSelection(self.num_heads, num_blocks, head[keep] * num_blocks + block[keep])

    def joined(self, other: "BlockSelection") -> "BlockSelection":
        """Union, in the longer of the two contexts."""
        if self.num_heads != other.num_heads:
            raise ValueError(f"selections of {self.num_heads} and {other.num_heads} heads cannot be joined")
        blocks = max(self.num_blocks, other.num_blocks)
        keys = np.union1d(self.resized(blocks).keys, other.resized(blocks).keys)
        return BlockSelection(self.num_heads, blocks, keys)
