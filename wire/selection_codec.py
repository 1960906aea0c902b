"""Bytes of an announced block selection.

    byte     version (1)
    byte     mode: 0 list, 1 bitmap, 2 difference
    varint   heads, then blocks
    mode 2:  varint epoch, varint round of the reference selection
    payload  0: varint gaps of the ascending keys head * blocks + block
             1: one bit a key, least significant first
             2: as 0, of the keys that are in one of selection and reference and not in the other
    4 bytes  CRC-32 of the decoded keys (little-endian int64), little-endian

The encoder takes the smallest of the three. The decoder checks everything before it allocates for it.
"""

import zlib

import numpy as np

from sparsity.selection import BlockSelection
from wire.errors import InvalidArgument

VERSION = 1
_LIST, _BITMAP, _DIFFERENCE = 0, 1, 2
MAX_KEYS = 1 << 26  # heads * blocks; a bitmap of 8 MiB
_MAX_VARINT = 5  # bytes of a 32-bit number
Reference = tuple[int, int]  # (epoch, round) of an earlier selection that both sides hold


def encode_selection(
    selection: BlockSelection, reference: BlockSelection | None = None, name: Reference = (0, 0)
) -> bytes:
    """`reference`, if any, is a selection that the receiver is known to hold under `name`."""
    keys = selection.keys
    universe = selection.num_heads * selection.num_blocks
    if universe > MAX_KEYS:
        raise InvalidArgument(
            f"a selection over {universe} (head, block) pairs; at most {MAX_KEYS} can be sent"
        )
    head = _varint(selection.num_heads) + _varint(selection.num_blocks)
    best = (_LIST, head + _encode_gaps(keys))
    bitmap_size = -(-universe // 8)
    if bitmap_size < len(best[1]) - len(head):
        bits = np.zeros(universe, dtype=bool)
        bits[keys] = True
        best = (_BITMAP, head + np.packbits(bits, bitorder="little").tobytes())
    if reference is not None and reference.num_heads == selection.num_heads:
        changed = np.setxor1d(keys, reference.resized(selection.num_blocks).keys, assume_unique=True)
        difference = head + _varint(name[0]) + _varint(name[1]) + _encode_gaps(changed)
        if len(difference) < len(best[1]):
            best = (_DIFFERENCE, difference)
    return bytes([VERSION, best[0]]) + best[1] + _checksum(keys)


def decode_selection(data: bytes, references: dict[Reference, BlockSelection], heads: int) -> BlockSelection:
    """`references`: the selections held of this session; `heads`: how many the plan announces.

    Raises UnknownReference if a difference names one that is not held, InvalidArgument if the bytes are wrong.
    """
    if len(data) < 6 or data[0] != VERSION:
        raise InvalidArgument(
            f"announcement: {len(data)} bytes of version {data[:1].hex() or 'none'}, expected version 1"
        )
    mode, body, checksum = data[1], np.frombuffer(data, np.uint8, len(data) - 6, 2), data[-4:]
    (num_heads, num_blocks), body = _take_varints(body, 2)
    universe = num_heads * num_blocks
    if num_heads != heads:
        raise InvalidArgument(f"announcement: {num_heads} heads, the plan announces {heads}")
    if universe > MAX_KEYS:
        raise InvalidArgument(
            f"announcement: {universe} (head, block) pairs, at most {MAX_KEYS} are accepted"
        )
    if mode == _LIST:
        keys = _decode_gaps(body, universe)
    elif mode == _BITMAP:
        if len(body) != -(-universe // 8):
            raise InvalidArgument(f"announcement: a bitmap of {len(body)} bytes for {universe} bits")
        keys = np.flatnonzero(np.unpackbits(body, bitorder="little"))
        if len(keys) and keys[-1] >= universe:
            raise InvalidArgument("announcement: bits set beyond the last block")
    elif mode == _DIFFERENCE:
        (epoch, round_), body = _take_varints(body, 2)
        reference = references.get((epoch, round_))
        if reference is None:
            raise UnknownReference(f"announcement: no selection of epoch {epoch}, round {round_} is held")
        changed = _decode_gaps(body, universe)
        keys = np.setxor1d(reference.resized(num_blocks).keys, changed, assume_unique=True)
    else:
        raise InvalidArgument(f"announcement: unknown mode {mode}")
    if _checksum(keys) != checksum:
        raise InvalidArgument("announcement: checksum mismatch")
    return BlockSelection(num_heads, num_blocks, keys.astype(np.int64))


class UnknownReference(InvalidArgument):
    """A difference against a selection that this side does not hold."""


def _checksum(keys: np.ndarray) -> bytes:
    return zlib.crc32(keys.astype("<i8").tobytes()).to_bytes(4, "little")


def _encode_gaps(keys: np.ndarray) -> bytes:
    return _encode_varints(np.diff(keys, prepend=-1) - 1)


def _decode_gaps(body: np.ndarray, universe: int) -> np.ndarray:
    keys = np.cumsum(_decode_varints(body) + 1) - 1
    if len(keys) and keys[-1] >= universe:
        raise InvalidArgument(f"announcement: index {keys[-1]} outside {universe} (head, block) pairs")
    return keys


def _varint(value: int) -> bytes:
    """LEB128 of one number."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _encode_varints(values: np.ndarray) -> bytes:
    """LEB128 of each value, which must lie in [0, 2^32)."""
    if not len(values) or values.max() < 128:  # by far the most common case
        return values.astype(np.uint8).tobytes()
    values = values.astype(np.uint64)
    sizes = np.ones(len(values), dtype=np.int64)
    for i in range(1, _MAX_VARINT):
        sizes += values >= np.uint64(1 << (7 * i))
    ends = sizes.cumsum()
    out = np.zeros(int(ends[-1]), dtype=np.uint8)
    for i in range(_MAX_VARINT):
        has = sizes > i
        more = (sizes > i + 1)[has].astype(np.uint8) << 7
        out[(ends - sizes)[has] + i] = ((values[has] >> np.uint64(7 * i)) & np.uint64(127)).astype(
            np.uint8
        ) | more
    return out.tobytes()


def _decode_varints(body: np.ndarray) -> np.ndarray:
    """int64 values; raises InvalidArgument for a number that is cut off or longer than 5 bytes."""
    if not len(body) or body.max() < 128:  # by far the most common case
        return body.astype(np.int64)
    ends = np.flatnonzero(body < 128)
    if not len(ends) or ends[-1] != len(body) - 1:
        raise InvalidArgument("announcement: a number is cut off")
    starts = np.concatenate([[0], ends[:-1] + 1])
    if int((ends - starts).max()) >= _MAX_VARINT:
        raise InvalidArgument("announcement: a number is longer than 5 bytes")
    place = np.arange(len(body)) - np.repeat(starts, ends - starts + 1)
    return np.add.reduceat((body.astype(np.int64) & 127) << (7 * place), starts)


def _take_varints(body: np.ndarray, count: int) -> tuple[list[int], np.ndarray]:
    """The numbers that `body` starts with, and what follows them."""
    values, value, size = [], 0, 0
    for used, byte in enumerate(body[: count * _MAX_VARINT].tolist(), 1):
        value |= (byte & 127) << (7 * size)
        size += 1
        if byte < 128:
            values.append(value)
            if len(values) == count:
                return values, body[used:]
            value = size = 0
        elif size == _MAX_VARINT:
            raise InvalidArgument("announcement: a number is longer than 5 bytes")
    raise InvalidArgument("announcement: the header is cut off")
