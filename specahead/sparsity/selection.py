"""A choice of KV blocks for each of several attention heads."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

WORD = 64  # bits


@dataclass(frozen=True, eq=False)
class BlockSelection:
    """Blocks as bits. Each row starts at a whole word, so that a context can grow without moving other rows.

    words: uint64 [heads, words], the lowest bit first; bits past num_blocks are 0. They must not be written again.
    """

    num_heads: int
    num_blocks: int
    words: np.ndarray

    def __post_init__(self) -> None:
        self.words.flags.writeable = False

    @staticmethod
    def of_nothing(num_heads: int, num_blocks: int) -> "BlockSelection":
        """Return a selection without blocks."""
        return BlockSelection(num_heads, num_blocks, np.zeros((num_heads, row_words(num_blocks)), dtype="<u8"))

    @staticmethod
    def from_matrix(chosen: np.ndarray) -> "BlockSelection":
        """Return a selection from bool [heads, blocks]."""
        heads, blocks = chosen.shape
        rows = np.zeros((heads, 8 * row_words(blocks)), dtype=np.uint8)
        packed = np.packbits(chosen, axis=1, bitorder="little")
        rows[:, : packed.shape[1]] = packed
        return BlockSelection(heads, blocks, rows.view("<u8"))

    def matrix(self) -> np.ndarray:
        """Return the selection as bool [heads, blocks]."""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little").view(bool)
        return bits[:, : self.num_blocks]

    def count(self, first: int, last: int) -> int:
        """Return how many entries lie in blocks first … last - 1."""
        return int(np.bitwise_count(self.words & _bits_between(self.words.shape[1], first, last)).sum())

    def resized(self, num_blocks: int) -> "BlockSelection":
        """Return the same blocks in a context of another length; blocks beyond it are dropped."""
        if num_blocks == self.num_blocks:
            return self
        words, width = self.words, row_words(num_blocks)
        if width > words.shape[1]:
            words = np.zeros((self.num_heads, width), dtype="<u8")
            words[:, : self.words.shape[1]] = self.words
        elif num_blocks < self.num_blocks:
            words = self.words[:, :width].copy()
            if width:
                words[:, -1] &= last_word_mask(num_blocks)
        return BlockSelection(self.num_heads, num_blocks, words)


@lru_cache(maxsize=64)
def _bits_between(width: int, first: int, last: int) -> np.ndarray:
    """Return a row of `width` words in which the bits of blocks first … last - 1 are set."""
    at = np.arange(width * WORD).reshape(-1, WORD)
    bits: np.ndarray = np.packbits((at >= first) & (at < last), axis=1, bitorder="little").view("<u8")[:, 0]
    return bits


def row_words(num_blocks: int) -> int:
    """Return how many words a row has."""
    return -(-num_blocks // WORD)


def last_word_mask(num_blocks: int) -> np.uint64:
    """Return the bits of a row's last word that stand for blocks."""
    return np.uint64((1 << ((num_blocks - 1) % WORD + 1)) - 1)
