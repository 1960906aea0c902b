"""A short name for a prefix of whole blocks, the same in every process, by which services tell what KV they hold.

It is a hint only: where KV is reused, prefixes are compared by their tokens (prefix_index.py).
"""

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from specahead.engine.kv.pages import PAGE_SIZE


def extend_hash(before: int, block: Sequence[int]) -> int:
    """Return the hash, of 64 bits, of a prefix that ends with a block. before: that of what precedes it, 0 if nothing
    does."""
    data = struct.pack(f"<Q{len(block)}I", before, *block)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def prefix_hashes(tokens: Sequence[int]) -> Iterator[int]:
    """Yield the hash of each prefix of whole pages, the shortest first, as `extend_hash` gives it."""
    data, size, before = np.asarray(tokens, "<u4").tobytes(), 4 * PAGE_SIZE, bytes(8)
    for start in range(0, len(data) - size + 1, size):  # of a long text thousands
        before = blake2b(before + data[start : start + size], digest_size=8).digest()
        yield int.from_bytes(before, "little")
