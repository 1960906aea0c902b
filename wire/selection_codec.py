"""Bytes of an announced block selection.

    byte     version (2)
    byte     references used, at most 4
    varint   heads, then blocks
    varints  (epoch, round) of each reference: selections that both sides hold, the newest first
    set      of the newest reference's blocks, those that are no longer selected  (if there is one reference)
    set      of the other references' further blocks, those that are selected     (if there are two)
    set      of all blocks, those that are selected and in no reference
    4 bytes  CRC-32 of the shape and the selection's words, little-endian

A set is some of n things in a row, here blocks in the order of their bits in BlockSelection.words (the last set
runs over all bits of these words):

    byte     1: gaps, 0: bitmap; plus 2 if its content is a zstd frame
    varint   bytes of the content, then bytes as sent
    content  gaps: how many things lie before each member since the last; 255 means 255 and more to come
             bitmap: one bit a thing, least significant first

A block selected in the last rounds is likelier to be selected than another, so the three sets have densities of
their own, and an entropy coder (zstd's Huffman codes) has one for each. The decoder checks every size before it
allocates for it: at most 2 bytes a (head, block) pair, MAX_PAIRS in all, and 32 for each block of its references.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from pyroaring import BitMap

from sparsity.selection import WORD, BlockSelection, last_word_mask, row_words
from wire.errors import InvalidArgument

VERSION = 2
MAX_PAIRS = 1 << 24  # heads * blocks, with each row filled up to whole words: 2 MiB
MAX_REFERENCES = 4
_GAPS, _COMPRESSED = 1, 2
_SPARSE = 16  # sets of less than one in so many are sent as gaps
_LEVEL = 1  # of zstd: higher ones look for repeats, of which there are none
_MAX_VARINT = 5  # bytes of a 32-bit number
Reference = tuple[int, int]  # (epoch, round) of an earlier selection that both sides hold


class UnknownReference(InvalidArgument):
    """A reference to a selection that this side does not hold."""


def encode_selection(
    selection: BlockSelection,
    reference: BlockSelection | None = None,
    name: Reference = (0, 0),
    earlier: Sequence[tuple[Reference, BlockSelection]] = (),
) -> bytes:
    """`reference`, if any, is a selection that the receiver is known to hold under `name`.

    earlier: others that it holds, the newest first; they make the result smaller. With those of other heads
    nothing is done.
    """
    heads, blocks = selection.num_heads, selection.num_blocks
    if heads * row_words(blocks) * WORD > MAX_PAIRS:
        raise InvalidArgument(
            f"a selection of {heads} heads over {blocks} blocks; at most {MAX_PAIRS} pairs can be sent"
        )
    given = [] if reference is None else [(name, reference), *earlier]
    held = [item for item in given if item[1].num_heads == heads][:MAX_REFERENCES]
    out = [bytes([VERSION, len(held)]), _varint(heads), _varint(blocks)]
    out += [_varint(epoch) + _varint(round_) for (epoch, round_), _ in held]
    words = selection.words.ravel()
    bits = np.unpackbits(words.view(np.uint8), bitorder="little") if held else words
    rest = words
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    for i, members in enumerate(_classes([item for _, item in held], blocks)):
        chosen = bits.take(set_bits(members))
        out.append(_encode_set(_pack(chosen if i else chosen ^ 1), len(chosen), compressor))
        rest = rest & ~members
    out.append(_encode_set(rest, len(rest) * WORD, compressor))
    return b"".join((*out, _checksum(heads, blocks, words)))


def decode_selection(
    data: bytes, references: Mapping[Reference, BlockSelection], heads: int, blocks: int | None = None
) -> BlockSelection:
    """`references`: the selections held of this session; `heads`: how many the plan announces; `blocks`: how many
    there must be, if that is known.

    Raises UnknownReference if one is named that is not held, InvalidArgument if the bytes are wrong.
    """
    source = _Bytes(data)
    num_heads, num_blocks, names = _read_head(source)
    if num_heads != heads:
        raise InvalidArgument(f"announcement: {num_heads} heads, the plan announces {heads}")
    if blocks is not None and num_blocks != blocks:
        raise InvalidArgument(f"announcement: {num_blocks} blocks, expected {blocks}")
    size = num_heads * row_words(num_blocks) * WORD
    if size > MAX_PAIRS:
        raise InvalidArgument(
            f"announcement: {num_heads} heads over {num_blocks} blocks, at most {MAX_PAIRS} pairs are accepted"
        )
    held = [_held(references, name, heads) for name in names]
    classes = _classes(held, num_blocks)
    changed = np.zeros(size, dtype=bool)
    for members in classes:
        keys = set_bits(members)
        changed[keys[_members(*_decode_set(source, len(keys)), len(keys))]] = True
    kind, content = _decode_set(source, size)
    if kind == _GAPS:
        changed[_members(kind, content, size)] = True
    words = _pack(changed)
    if kind != _GAPS:
        words ^= content.view("<u8")
    if classes:
        words ^= classes[0]
    words = words.reshape(num_heads, -1) if size else np.zeros((num_heads, row_words(num_blocks)), "<u8")
    if size and (words[:, -1] & ~last_word_mask(num_blocks)).any():
        raise InvalidArgument("announcement: bits set beyond the last block")
    if source.take(4) != _checksum(num_heads, num_blocks, words):
        raise InvalidArgument("announcement: checksum mismatch")
    if source.left:
        raise InvalidArgument(f"announcement: {source.left} bytes too many")
    return BlockSelection.from_words(num_heads, num_blocks, words)


def _classes(held: Sequence[BlockSelection], num_blocks: int) -> list[np.ndarray]:
    """Flat words: the blocks of the newest selection, and those that are only in the others."""
    rows = [item.resized(num_blocks).words.ravel() for item in held]
    if len(rows) < 2:
        return rows
    others = rows[1]
    for row in rows[2:]:
        others = others | row
    return [rows[0], others & ~rows[0]]


def _checksum(heads: int, blocks: int, words: np.ndarray) -> bytes:
    shape = zlib.crc32(struct.pack("<QQ", heads, blocks))
    return zlib.crc32(np.ascontiguousarray(words), shape).to_bytes(4, "little")


# Bits

_CONTAINER = 1024  # words of a bitmap container in Roaring's portable format
_FILLED = 65  # of them: all ones, so that each holds the more than 4,096 bits that a bitmap container must
_DATA = _CONTAINER - _FILLED
_COOKIE = 12346  # containers without runs


def set_bits(words: np.ndarray) -> np.ndarray:
    """The indices of the set bits, ascending, int64.

    By way of CRoaring, which extracts them with SIMD instructions: a tenth of the time that np.flatnonzero takes.
    https://github.com/RoaringBitmap/RoaringFormatSpec
    """
    count = -(-len(words) // _DATA)
    start = 8 + 8 * count
    data = np.empty(start + 8 * _CONTAINER * count, dtype=np.uint8)
    rows = data[start:].view("<u8").reshape(count, _CONTAINER)
    whole = len(words) // _DATA
    rows[:whole, :_DATA] = words[: whole * _DATA].reshape(whole, _DATA)
    if whole < count:
        last = words[whole * _DATA :]
        rows[whole, : len(last)] = last
        rows[whole, len(last) : _DATA] = 0
    rows[:, _DATA:] = np.uint64(2**WORD - 1)
    found = np.bitwise_count(rows).sum(1, dtype=np.int64)
    data[:8].view("<u4")[:] = _COOKIE, count
    keys = data[8 : 8 + 4 * count].view("<u2").reshape(count, 2)
    keys[:, 0], keys[:, 1] = np.arange(count), found - 1
    data[8 + 4 * count : start].view("<u4")[:] = start + 8 * _CONTAINER * np.arange(count)
    return _without_filling(np.asarray(BitMap.deserialize(data).to_array()), found)


def _without_filling(indices: np.ndarray, found: np.ndarray) -> np.ndarray:
    """found: bits of each container, the filling included, which comes last."""
    wanted = found - _FILLED * WORD
    out = np.empty(int(wanted.sum()), dtype=np.int64)
    source = target = 0
    for i, (size, kept) in enumerate(zip(found.tolist(), wanted.tolist(), strict=True)):
        part = out[target : target + kept]
        part[:] = indices[source : source + kept]
        part -= i * _FILLED * WORD
        source, target = source + size, target + kept
    return out


def _pack(bits: np.ndarray) -> np.ndarray:
    """0 and 1, or bool, to words; the last one is filled up with 0."""
    packed = np.packbits(bits, bitorder="little")
    return _whole_words(packed)


def _whole_words(packed: np.ndarray) -> np.ndarray:
    return np.pad(packed, (0, -len(packed) % 8)).view("<u8") if len(packed) % 8 else packed.view("<u8")


# Sets


def _encode_set(words: np.ndarray, size: int, compressor: zstandard.ZstdCompressor) -> bytes:
    """The set bits among the first `size`."""
    kind = _GAPS if _SPARSE * int(np.bitwise_count(words).sum()) < size else 0
    content = _encode_gaps(set_bits(words)) if kind else words.view(np.uint8)[: -(-size // 8)]
    plain = content.tobytes()
    sent = compressor.compress(plain)
    if len(sent) < len(plain):
        kind |= _COMPRESSED
    else:
        sent = plain
    return bytes([kind]) + _varint(len(plain)) + _varint(len(sent)) + sent


def _decode_set(source: "_Bytes", size: int) -> tuple[int, np.ndarray]:
    """_GAPS and its bytes, or 0 and a bitmap of exactly `size` bits, in bytes."""
    kind, length, stored = source.byte(), source.varint(), source.varint()
    if kind & ~(_GAPS | _COMPRESSED):
        raise InvalidArgument(f"announcement: a set of unknown kind {kind}")
    bitmap = -(-size // 8)
    # No more gaps than make a sparse set, and 255 things or more for each one that goes on.
    if length > size // _SPARSE + size // 255 + 1 if kind & _GAPS else length != bitmap:
        raise InvalidArgument(f"announcement: a set of {length} bytes for {size} blocks")
    sent = source.take(stored)
    plain = _decompress(sent, length) if kind & _COMPRESSED else sent
    if len(plain) != length:
        raise InvalidArgument(f"announcement: {len(plain)} bytes in a set, {length} are stated")
    return kind & _GAPS, np.frombuffer(plain, np.uint8)


def _decompress(sent: bytes, length: int) -> bytes:
    """A zstd frame that states `length` bytes and holds so many."""
    try:
        # The frame's own statement is what decompress allocates for.
        if zstandard.frame_content_size(sent) != length:
            raise InvalidArgument("announcement: a frame of another size than stated")
        window = max(1024, MAX_PAIRS // 8)
        decompressor = zstandard.ZstdDecompressor(max_window_size=window)
        return decompressor.decompress(sent, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidArgument(f"announcement: {error}") from None


def _members(kind: int, content: np.ndarray, size: int) -> np.ndarray:
    """Which of `size` things are in a set, int64."""
    chosen = _decode_gaps(content) if kind == _GAPS else set_bits(_whole_words(content))
    if len(chosen) and chosen[-1] >= size:
        raise InvalidArgument(f"announcement: index {chosen[-1]} in a set of {size} blocks")
    return chosen


def _encode_gaps(indices: np.ndarray) -> np.ndarray:
    gaps = np.diff(indices, prepend=-1) - 1
    if not len(gaps) or gaps.max() < 255:  # by far the most common case
        return gaps.astype(np.uint8)
    more, last = np.divmod(gaps, 255)
    ends = np.cumsum(more + 1)
    out = np.full(int(ends[-1]), 255, dtype=np.uint8)
    out[ends - 1] = last
    return out


def _decode_gaps(content: np.ndarray) -> np.ndarray:
    """Raises InvalidArgument if the last one goes on."""
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
        for place in range(_MAX_VARINT):
            byte = self.byte()
            value |= (byte & 127) << (7 * place)
            if byte < 128:
                return value
        raise InvalidArgument(f"announcement: a number is longer than {_MAX_VARINT} bytes")


def _read_head(source: _Bytes) -> tuple[int, int, list[Reference]]:
    """Heads, blocks and the names of the references."""
    version = source.byte()
    if version != VERSION:
        raise InvalidArgument(f"announcement: version {version}, expected {VERSION}")
    count = source.byte()
    if count > MAX_REFERENCES:
        raise InvalidArgument(f"announcement: {count} references, at most {MAX_REFERENCES} are accepted")
    heads, blocks = source.varint(), source.varint()
    return heads, blocks, [(source.varint(), source.varint()) for _ in range(count)]


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
