"""The bytes of an announced block selection, in a form that a GPU can make and apply, too.

    36 bytes  header, little-endian: version, 1 if there is a reference (else 0), heads, blocks, uint32 each; the
              reference's epoch, uint64, and round, uint32; checksum of the selection's words, uint64 (see _checksum)
    bitmap    one bit for each byte of the difference, least significant first: whether it is not zero
    bytes     the bytes of the difference that are not zero, in their order

The difference is BlockSelection.words XOR the words of the reference: an earlier selection of the same heads that both
sides hold, cut or filled with zeros to the same number of blocks. Without a reference it is the words themselves.
"""

import struct
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from specahead.sparsity.selection import BlockSelection, last_word_mask, row_words
from specahead.wire.errors import InvalidArgument

VERSION = 4
_HEADER = struct.Struct("<4IQIQ")
_WEIGHT = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: its multiples are well mixed
Reference = tuple[int, int]  # (epoch, round) of an earlier selection that both sides hold
NamedSelection = tuple[Reference, BlockSelection]


class UnknownReference(InvalidArgument):
    """A reference to a selection that this side does not hold."""


def encode_selection(selection: BlockSelection, reference: NamedSelection | None = None) -> bytes:
    """Return the bytes of a selection.

    reference: the newest selection of the same heads that the receiver is known to hold, if there is one.
    """
    heads, blocks, words = selection.num_heads, selection.num_blocks, selection.words
    difference = words if reference is None else words ^ _words_of(reference[1], heads, blocks)
    flat = difference.view(np.uint8).ravel()
    differs = flat != 0
    body = np.packbits(differs, bitorder="little").tobytes() + flat.compress(differs).tobytes()
    return with_header(body, _checksum(words), heads, blocks, None if reference is None else reference[0])


def with_header(body: bytes, checksum: int, heads: int, blocks: int, reference: Reference | None) -> bytes:
    """Return the bytes of a selection from those after its header. reference: the selection they are coded against."""
    return _HEADER.pack(VERSION, reference is not None, heads, blocks, *(reference or (0, 0)), checksum) + body


def decode_selection(
    data: bytes, references: Mapping[Reference, BlockSelection], heads: int, blocks: int
) -> BlockSelection:
    """Return the selection in these bytes, which must have `heads` heads and `blocks` blocks.

    references: selections that the bytes may be coded against. Raises UnknownReference for another one, and
    InvalidArgument for anything else that is wrong. Sizes are checked before anything is allocated.
    """
    if len(data) < _HEADER.size:
        raise InvalidArgument(f"announcement: {len(data)} bytes, a header has {_HEADER.size}")
    version, refers, *shape, epoch, round_, checksum = _HEADER.unpack_from(data)
    if version != VERSION:
        raise InvalidArgument(f"announcement: version {version}, expected {VERSION}")
    if shape != [heads, blocks]:
        raise InvalidArgument(f"announcement: {shape[0]} heads x {shape[1]} blocks, expected {heads} x {blocks}")
    if refers and (epoch, round_) not in references:
        raise UnknownReference(f"announcement: no selection of epoch {epoch}, round {round_} is held")
    words = _read_difference(np.frombuffer(data, np.uint8, offset=_HEADER.size), heads, row_words(blocks))
    if refers:
        words ^= _words_of(references[epoch, round_], heads, blocks)
    if _checksum(words) != checksum:
        raise InvalidArgument("announcement: checksum mismatch")
    if words.size and (words[:, -1] & ~last_word_mask(blocks)).any():
        raise InvalidArgument("announcement: bits set beyond the last block")
    return BlockSelection(heads, blocks, words)


def _read_difference(body: np.ndarray, heads: int, width: int) -> np.ndarray:
    """Return the difference, uint64 [heads, width]. Raises InvalidArgument for bytes of another length."""
    size = heads * width  # bytes of the bitmap; each of its bits stands for a byte of these words
    flags, values = body[:size], body[size:]
    (differing,) = np.unpackbits(flags, bitorder="little").view(bool).nonzero()
    if len(flags) < size or len(values) != len(differing):
        raise InvalidArgument(
            f"announcement: {len(body)} bytes after the header, its bitmap asks for {size + len(differing)}"
        )
    difference = np.zeros((heads, width), dtype="<u8")
    difference.view(np.uint8).ravel()[differing] = values
    return difference


def _words_of(held: BlockSelection, heads: int, blocks: int) -> np.ndarray:
    """Return the words of a reference in a context of `blocks` blocks; raise InvalidArgument for other heads."""
    if held.num_heads != heads:
        raise InvalidArgument(f"announcement: a reference of {held.num_heads} heads, not {heads}")
    return held.resized(blocks).words


def _checksum(words: np.ndarray) -> int:
    """Return a multilinear hash modulo 2^64. A GPU can sum it in any order, and it takes a third of CRC-32's time."""
    return int(np.dot(words.ravel(), _weights(words.size)))


@lru_cache(maxsize=8)
def _weights(count: int) -> np.ndarray:
    """Return odd weights, so that every change of a single word changes the hash."""
    return (np.arange(count, dtype="<u8") * np.uint64(_WEIGHT)) | np.uint64(1)
