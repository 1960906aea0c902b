"""The indices of the set bits of 64-bit words, by CRoaring's SIMD instructions: in a tenth of np.flatnonzero's time.

Words are written into Roaring's serialized form (https://github.com/RoaringBitmap/RoaringFormatSpec), all of them as
bitmap containers. Such a container must hold more than 4,096 bits, so the end of each is filled with ones. "Filled"
indices are container * 65,536 + bit; `plain` makes indices in the words of them.
"""

from functools import lru_cache
from threading import get_ident

import numpy as np
from pyroaring import BitMap

from sparsity.selection import WORD

_CONTAINER = 1024  # words of a bitmap container
_FILLED = 65  # of them, at its end: all ones
_DATA = _CONTAINER - _FILLED
_COOKIE = 12346  # of a bitmap without run containers


def set_bits(words: np.ndarray) -> np.ndarray:
    """Return the indices of the set bits of `words`, uint64 [n], ascending, as uint32."""
    return plain(filled_bits(words))


def filled_bits(words: np.ndarray) -> np.ndarray:
    """Return the filled indices of the set bits of `words`, uint64 [n], ascending, as uint32."""
    return _containers(get_ident(), -(-len(words) // _DATA)).set_bits(words)


def plain(filled: np.ndarray) -> np.ndarray:
    """Return the indices in the words that filled indices stand for."""
    return filled - (filled >> np.uint32(16)) * np.uint32(_FILLED * WORD)


class _Containers:
    """Memory for a number of containers, which is used again and again: not for several threads at once."""

    def __init__(self, count: int) -> None:
        start = 8 + 8 * count
        self._data = np.empty(start + 8 * _CONTAINER * count, dtype=np.uint8)
        self._rows = self._data[start:].view("<u8").reshape(count, _CONTAINER)
        self._rows[:, :_DATA], self._rows[:, _DATA:] = 0, 2**WORD - 1
        self._counts = np.empty((count, _CONTAINER), dtype=np.uint8)
        self._data[:8].view("<u4")[:] = _COOKIE, count
        keys = self._data[8 : 8 + 4 * count].view("<u2").reshape(count, 2)
        keys[:, 0], self._sizes = np.arange(count), keys[:, 1]
        self._data[8 + 4 * count : start].view("<u4")[:] = start + 8 * _CONTAINER * np.arange(count)
        self._filling = self._to_roaring()
        self._filling.run_optimize()

    def set_bits(self, words: np.ndarray) -> np.ndarray:
        whole = len(words) // _DATA
        self._rows[:whole, :_DATA] = words[: whole * _DATA].reshape(whole, _DATA)
        if whole < len(self._rows):
            last = words[whole * _DATA :]
            self._rows[whole, : len(last)] = last
            self._rows[whole, len(last) : _DATA] = 0
        bits = self._to_roaring()
        bits -= self._filling
        return np.asarray(bits.to_array())

    def _to_roaring(self) -> BitMap:
        np.bitwise_count(self._rows, out=self._counts)
        # Stored less 1, so that the largest number, 65,536, fits: both wrap around.
        np.subtract(self._counts.sum(1, dtype=np.uint16), np.uint16(1), out=self._sizes)
        return BitMap.deserialize(self._data)  # type: ignore[arg-type]  # any buffer will do


@lru_cache(maxsize=8)
def _containers(thread: int, count: int) -> _Containers:
    return _Containers(count)
