"""A short name for a prefix of whole blocks, the same in every process, by which services tell what KV they hold.

It is a hint only: where KV is reused, prefixes are compared by their tokens (prefix_index.py).
"""

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from engine.kv.pages import PAGE_SIZE


def extend_hash(before: int, block: Sequence[int]) -> int:
    """Return the hash, of 64 bits, of a prefix that ends with a block. before: that of what precedes it, 0 if nothing
    does."""
    data = struct.pack(f"<Q{len(block)}I", before, *block)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def prefix_hashes(tokens: Sequence[int]) -> Iterator[int]:
    """Yield the hash of each prefix of whole pages, the shortest first."""
    before = 0
    for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE):
        before = extend_hash(before, tokens[end - PAGE_SIZE : end])
        yield before
