"""Bytes of an announced block selection.

    byte     version (2)
    byte     references used, at most 2
    varint   heads, then blocks
    varints  (epoch, round) of each reference: selections that both sides hold, the newest first
    set      of the newest reference's blocks, those that are no longer selected  (if there is a reference)
    set      of the other reference's further blocks, those that are selected     (if there are two)
    set      of all blocks, those that are selected and in no reference
    8 bytes  checksum of the shape and the selection's words (see _checksum), little-endian

A set is some of n things in a row, here blocks in the order of their bits in BlockSelection.words (the last set
counts all bits of these words):

    byte     1: gaps, 0: bitmap; plus 2 if the content is a zstd frame, which states its content's size;
             4, for a last set without references: the selection's words as they are, for links where time counts
             more than bytes (a tenth of the time, three to nine times the bytes)
    varint   bytes of the content, then bytes as sent
    content  gaps: how many things lie before each member since the last; 255 means 255 and more to come
             bitmap: one bit a thing, least significant first

What was selected in the last rounds is likelier to be selected than the rest. So the three sets differ in density,
and zstd's Huffman coder has a table for each. The decoder checks every size before it allocates for it: at most
4 bytes a (head, block) pair, of which there are at most MAX_PAIRS, and 16 for each block of the references.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import zstandard

from sparsity.selection import WORD, BlockSelection, last_word_mask, row_words
from wire.errors import InvalidArgument
from wire.set_bits import filled_bits, plain, set_bits

VERSION = 2
MAX_PAIRS = 1 << 24  # heads * blocks, each row filled up to whole words; as bits 2 MiB
MAX_REFERENCES = 2  # the selection judged last, and the one under judgement
_GAPS, _COMPRESSED, _WORDS = 1, 2, 4
_SPARSE = 16  # sets of less than one in so many are sent as gaps
_LEVEL = 1  # of zstd: higher ones search longer for repeats, and find few
_MAX_VARINT = 5  # bytes of a 32-bit number
_CHECKSUM = 8  # bytes
_WEIGHT = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: its multiples are well mixed
Reference = tuple[int, int]  # (epoch, round) of an earlier selection that both sides hold
NamedSelection = tuple[Reference, BlockSelection]


class UnknownReference(InvalidArgument):
    """A reference to a selection that this side does not hold."""


def encode_selection(
    selection: BlockSelection, references: Sequence[NamedSelection] = (), compact: bool = True
) -> bytes:
    """Return the bytes of a selection. Raises InvalidArgument for one of more than MAX_PAIRS pairs.

    references: selections that the receiver is known to hold, the newest first. Those of the same heads are used, at
    most MAX_REFERENCES. compact: in few bytes; otherwise in little time, and references are not used.
    """
    heads, blocks = selection.num_heads, selection.num_blocks
    if heads * row_words(blocks) * WORD > MAX_PAIRS:
        raise InvalidArgument(
            f"a selection of {heads} heads over {blocks} blocks; at most {MAX_PAIRS} pairs can be sent"
        )
    held = [item for item in references if compact and item[1].num_heads == heads][:MAX_REFERENCES]
    out = [bytes([VERSION, len(held)]), _varint(heads), _varint(blocks)]
    out += [_varint(epoch) + _varint(round_) for (epoch, round_), _ in held]
    words = selection.words.ravel()
    if compact:
        out += _encode_sets(words, _classes([item for _, item in held], blocks))
    else:
        out += [bytes([_WORDS]), 2 * _varint(words.nbytes), words.astype("<u8", copy=False).tobytes()]
    return b"".join((*out, _checksum(heads, blocks, words)))


def _encode_sets(words: np.ndarray, classes: Sequence[np.ndarray]) -> list[bytes]:
    """Return a selection's set among each class of blocks, and the one of those in no class."""
    out = []
    rest = words.copy()
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    for i, members in enumerate(classes):
        selected = members & words
        out.append(_encode_set(*_ranks(members, selected if i else members ^ selected), compressor))
        rest ^= selected
    return [*out, _encode_set(set_bits(rest), len(rest) * WORD, compressor)]


def decode_selection(
    data: bytes, references: Mapping[Reference, BlockSelection], heads: int, blocks: int | None = None
) -> BlockSelection:
    """Return the selection that bytes stand for. Raises InvalidArgument, UnknownReference for a reference not held.

    references: the selections held of this session. heads: how many the plan announces. blocks: how many there must
    be, if that is known.
    """
    source = _Bytes(data)
    blocks, names = _read_head(source, heads, blocks)
    classes = _classes([_held(references, name, heads) for name in names], blocks)
    changed = np.zeros(heads * row_words(blocks) * WORD, dtype=bool)
    for members in classes:
        filled = filled_bits(members)
        chosen = _indices(*_read_set(source, len(filled)), len(filled))
        changed[plain(filled.take(chosen)).astype(np.intp)] = True
    kind, content = _read_set(source, len(changed), may_be_words=not names)
    if kind != _GAPS and not names:  # the bits of this set are the selection's words
        return _checked(source, heads, blocks, content.view("<u8"))
    if kind == _GAPS:
        changed[_indices(kind, content, len(changed))] = True
    else:
        changed |= np.unpackbits(content, bitorder="little").view(bool)
    words = np.packbits(changed, bitorder="little").view("<u8")
    if classes:
        words ^= classes[0]
    return _checked(source, heads, blocks, words)


def _checked(source: "_Bytes", heads: int, blocks: int, words: np.ndarray) -> BlockSelection:
    """What ends an announcement, and no bit beyond the last block."""
    if source.take(_CHECKSUM) != _checksum(heads, blocks, words):
        raise InvalidArgument("announcement: checksum mismatch")
    if source.left:
        raise InvalidArgument(f"announcement: {source.left} bytes too many")
    rows = words.reshape(heads, row_words(blocks))
    if rows.size and (rows[:, -1] & ~last_word_mask(blocks)).any():
        raise InvalidArgument("announcement: bits set beyond the last block")
    return BlockSelection(heads, blocks, rows)


def _classes(held: Sequence[BlockSelection], blocks: int) -> list[np.ndarray]:
    """Flat words: the blocks of the newest selection, and those that are only in the other one."""
    rows = [item.resized(blocks).words.ravel() for item in held]
    return rows[:1] + [row & ~rows[0] for row in rows[1:]]


def _checksum(heads: int, blocks: int, words: np.ndarray) -> bytes:
    """A multilinear hash modulo 2^64: five times as fast as CRC-32."""
    total = int(np.sum(words * _weights(len(words)), dtype=np.uint64))
    return struct.pack("<Q", (total + heads * _WEIGHT + blocks * _WEIGHT**2) % 2**64)


@lru_cache(maxsize=8)
def _weights(count: int) -> np.ndarray:
    """Odd, so that no change of a single word goes unseen."""
    return (np.arange(count, dtype="<u8") * np.uint64(_WEIGHT)) | np.uint64(1)


# Sets


def _ranks(members: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, int]:
    """Which ones of the members' bits the chosen ones, a part of them, are; and how many members there are."""
    ends = np.cumsum(np.bitwise_count(members), dtype=np.uint32)
    indices = set_bits(chosen)
    word = (indices >> np.uint32(6)).astype(np.intp)
    # Of all members up to the word's end, those from the chosen one on are taken off.
    onward = members.take(word)
    onward >>= indices & np.uint32(WORD - 1)
    ranks = ends.take(word)
    ranks -= np.bitwise_count(onward)
    return ranks, int(ends[-1]) if len(ends) else 0


def _encode_set(indices: np.ndarray, size: int, compressor: zstandard.ZstdCompressor) -> bytes:
    kind = _GAPS if _SPARSE * len(indices) < size else 0
    content = (_encode_gaps(indices) if kind else _encode_bitmap(indices, size)).tobytes()
    sent = compressor.compress(content)
    if len(sent) < len(content):
        kind |= _COMPRESSED
    else:
        sent = content
    return bytes([kind]) + _varint(len(content)) + _varint(len(sent)) + sent


def _read_set(source: "_Bytes", size: int, may_be_words: bool = False) -> tuple[int, np.ndarray]:
    """Return _GAPS or 0, and the content, uint8, of a length that a set among `size` things may have."""
    kind, length, stored = source.byte(), source.varint(), source.varint()
    if kind & ~(_GAPS | _COMPRESSED) and not (may_be_words and kind == _WORDS):
        raise InvalidArgument(f"announcement: a set of unknown kind {kind}")
    # As gaps, fewer than one in _SPARSE, and one byte more for every 255 things passed over.
    fits = length <= size // _SPARSE + size // 255 + 1 if kind & _GAPS else length == -(-size // 8)
    if not fits:
        raise InvalidArgument(f"announcement: a set of {length} bytes for {size} blocks")
    sent = source.take(stored)
    content = np.frombuffer(_decompress(sent, length) if kind & _COMPRESSED else sent, np.uint8)
    if len(content) != length:
        raise InvalidArgument(f"announcement: {len(content)} bytes in a set, {length} are stated")
    return kind & _GAPS, content


def _indices(kind: int, content: np.ndarray, size: int) -> np.ndarray:
    """Which of `size` things are in the set, ascending."""
    chosen = _decode_gaps(content) if kind == _GAPS else _decode_bitmap(content)
    if len(chosen) and chosen[-1] >= size:
        raise InvalidArgument(f"announcement: index {chosen[-1]} in a set of {size} blocks")
    return chosen


def _decompress(sent: bytes, length: int) -> bytes:
    try:
        # The size that a frame states is what the decompressor allocates.
        if zstandard.frame_content_size(sent) != length:
            raise InvalidArgument("announcement: a frame that does not state its set's size")
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_PAIRS // 8)
        return decompressor.decompress(sent, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidArgument(f"announcement: {error}") from None


def _encode_bitmap(indices: np.ndarray, size: int) -> np.ndarray:
    bits = np.zeros(size, dtype=bool)
    bits[indices.astype(np.intp)] = True
    return np.packbits(bits, bitorder="little")


def _decode_bitmap(content: np.ndarray) -> np.ndarray:
    return set_bits(np.pad(content, (0, -len(content) % 8)).view("<u8"))


def _encode_gaps(indices: np.ndarray) -> np.ndarray:
    gaps = indices.copy()
    gaps[1:] -= indices[:-1] + np.uint32(1)
    more = gaps // np.uint32(255)
    last = (gaps - more * np.uint32(255)).astype(np.uint8)
    if not more.any():
        return last
    ends = np.cumsum(more, dtype=np.int64) + np.arange(len(more))
    out = np.full(int(ends[-1]) + 1, 255, dtype=np.uint8)
    out[ends] = last
    return out


def _decode_gaps(content: np.ndarray) -> np.ndarray:
    if len(content) and content[-1] == 255:
        raise InvalidArgument("announcement: a gap is cut off")
    ends = np.flatnonzero(content != 255)
    return np.cumsum(content, dtype=np.int64)[ends] + np.arange(len(ends))


# Head


@dataclass
class _Bytes:
    """What is left to read of an announcement."""

    data: bytes
    at: int = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise InvalidArgument(f"announcement: cut off, {count - self.left} bytes are missing")
        self.at += count
        return self.data[self.at - count : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = 0
        for i in range(_MAX_VARINT):
            byte = self.byte()
            value |= (byte & 127) << (7 * i)
            if byte < 128:
                return value
        raise InvalidArgument(f"announcement: a number is longer than {_MAX_VARINT} bytes")


def _read_head(source: _Bytes, heads: int, blocks: int | None) -> tuple[int, list[Reference]]:
    """How many blocks there are, and the names of the references."""
    version, count = source.byte(), source.byte()
    if version != VERSION:
        raise InvalidArgument(f"announcement: version {version}, expected {VERSION}")
    if count > MAX_REFERENCES:
        raise InvalidArgument(f"announcement: {count} references, at most {MAX_REFERENCES} are accepted")
    num_heads, num_blocks = source.varint(), source.varint()
    if num_heads != heads:
        raise InvalidArgument(f"announcement: {num_heads} heads, the plan announces {heads}")
    if blocks is not None and num_blocks != blocks:
        raise InvalidArgument(f"announcement: {num_blocks} blocks, the context has {blocks}")
    if num_heads * row_words(num_blocks) * WORD > MAX_PAIRS:
        raise InvalidArgument(
            f"announcement: {num_heads} heads over {num_blocks} blocks, at most {MAX_PAIRS} pairs are accepted"
        )
    return num_blocks, [(source.varint(), source.varint()) for _ in range(count)]


def _held(references: Mapping[Reference, BlockSelection], name: Reference, heads: int) -> BlockSelection:
    reference = references.get(name)
    if reference is None:
        raise UnknownReference(f"announcement: no selection of epoch {name[0]}, round {name[1]} is held")
    if reference.num_heads != heads:
        raise InvalidArgument(f"announcement: a reference of {reference.num_heads} heads, not {heads}")
    return reference


def _varint(value: int) -> bytes:
    """LEB128 of one number."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
