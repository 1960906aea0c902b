"""The bytes of an announcement: what goes in comes out, in the smallest form; nothing else is let in."""

import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sparsity.selection import BlockSelection
from wire.errors import InvalidArgument
from wire.selection_codec import (
    MAX_KEYS,
    Reference,
    UnknownReference,
    decode_selection,
    encode_selection,
)

LIST, BITMAP, DIFFERENCE = 0, 1, 2
NAME = (3, 200)  # of the reference; two varints of one and two bytes


@st.composite
def selections(draw: st.DrawFn, heads: int | None = None) -> BlockSelection:
    """Of any density: each key is in with a chance drawn first."""
    heads = draw(st.integers(0, 5)) if heads is None else heads
    blocks = draw(st.integers(0, 300))
    seed, density = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
    return BlockSelection.from_matrix(np.random.default_rng(seed).random((heads, blocks)) < density)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[BlockSelection, BlockSelection]:
    """A selection and an earlier one of the same heads, in a context of any length, alike or not."""
    selection = draw(selections())
    if draw(st.booleans()):
        return selection, draw(selections(selection.num_heads))
    # A few blocks away, in a context that has grown since.
    lists = [[block for block in blocks if block % 7] for blocks in selection.lists()]
    return selection, BlockSelection.from_lists(lists, selection.num_blocks).resized(
        selection.num_blocks // 2
    )


def same(a: BlockSelection, b: BlockSelection) -> bool:
    return (a.num_heads, a.num_blocks) == (b.num_heads, b.num_blocks) and np.array_equal(a.keys, b.keys)


def is_valid(selection: BlockSelection, heads: int) -> bool:
    keys = selection.keys
    universe = selection.num_heads * selection.num_blocks
    inside = not len(keys) or (keys[0] >= 0 and keys[-1] < universe)
    return (
        selection.num_heads == heads and keys.dtype == np.int64 and bool(inside and (np.diff(keys) > 0).all())
    )


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def gaps(keys: list[int]) -> bytes:
    return b"".join(varint(b - a - 1) for a, b in zip([-1, *keys], keys, strict=False))


def checksum(keys: list[int]) -> bytes:
    return zlib.crc32(b"".join(key.to_bytes(8, "little") for key in keys)).to_bytes(4, "little")


def packet(mode: int, heads: int, blocks: int, payload: bytes, keys: list[int], version: int = 1) -> bytes:
    return bytes([version, mode]) + varint(heads) + varint(blocks) + payload + checksum(keys)


def bodies(selection: BlockSelection, reference: BlockSelection | None) -> dict[int, bytes]:
    """Every way to say it, written out from the format's description."""
    keys, blocks = selection.keys.tolist(), selection.num_blocks
    bits = sum(1 << key for key in keys).to_bytes(-(-selection.num_heads * blocks // 8), "little")
    out = {LIST: gaps(keys), BITMAP: bits}
    if reference is not None:
        held = {h * blocks + b for h, row in enumerate(reference.lists()) for b in row if b < blocks}
        out[DIFFERENCE] = varint(NAME[0]) + varint(NAME[1]) + gaps(sorted(held ^ set(keys)))
    return {m: packet(m, selection.num_heads, blocks, payload, keys) for m, payload in out.items()}


@given(selections())
def test_round_trip(selection: BlockSelection) -> None:
    data = encode_selection(selection)
    decoded = decode_selection(data, {}, selection.num_heads)
    assert same(decoded, selection)
    assert is_valid(decoded, selection.num_heads)


@given(pairs())
def test_round_trip_with_a_reference(pair: tuple[BlockSelection, BlockSelection]) -> None:
    """The reference may be of a shorter or a longer context."""
    selection, reference = pair
    data = encode_selection(selection, reference, NAME)
    assert same(decode_selection(data, {NAME: reference}, selection.num_heads), selection)


@given(pairs(), st.booleans())
def test_the_smallest_form_is_sent_and_all_are_understood(
    pair: tuple[BlockSelection, BlockSelection], with_reference: bool
) -> None:
    selection, reference = pair
    forms = bodies(selection, reference if with_reference else None)
    sent = encode_selection(selection, reference if with_reference else None, NAME)
    assert sent == forms[sent[1]]
    assert len(sent) == min(map(len, forms.values()))
    for form in forms.values():
        assert same(decode_selection(form, {NAME: reference}, selection.num_heads), selection)


def test_each_mode_is_chosen_where_it_is_smallest() -> None:
    blocks = 200
    sparse = BlockSelection.from_lists([[3, 70], [199]], blocks)
    half = BlockSelection.from_matrix(np.random.default_rng(0).random((2, blocks)) < 0.5)
    moved = BlockSelection.from_lists([[*half.lists()[0], blocks], half.lists()[1]], blocks + 1)
    assert encode_selection(sparse)[1] == LIST
    assert encode_selection(half)[1] == BITMAP
    difference = encode_selection(moved, half, NAME)
    assert difference[1] == DIFFERENCE
    assert len(difference) < 20


def test_a_reference_of_other_heads_is_not_used() -> None:
    selection = BlockSelection.from_lists([[1, 2], [3]], 50)
    reference = BlockSelection.from_lists([[1, 2], [3], []], 50)
    assert encode_selection(selection, reference, NAME) == encode_selection(selection)


def test_an_unknown_reference_is_told_apart() -> None:
    dense = BlockSelection.from_matrix(np.random.default_rng(0).random((2, 200)) < 0.5)
    data = encode_selection(dense, dense, NAME)
    assert data[1] == DIFFERENCE
    for held in ({}, {(3, 201): dense}, {(4, 200): dense}):
        with pytest.raises(UnknownReference, match="epoch 3, round 200"):
            decode_selection(data, held, 2)
    other = BlockSelection.from_lists([[5], []], 200)
    with pytest.raises(InvalidArgument, match="checksum"):
        decode_selection(data, {NAME: other}, 2)


# Bytes that no encoder made


def decodes_or_refuses(data: bytes, references: dict[Reference, BlockSelection], heads: int) -> None:
    try:
        decoded = decode_selection(data, references, heads)
    except InvalidArgument:
        return
    assert is_valid(decoded, heads)


HELD = BlockSelection.from_matrix(np.random.default_rng(1).random((2, 40)) < 0.4)


@settings(max_examples=300)
@given(st.binary(max_size=40), st.integers(0, 3))
@example(b"", 0)
@example(bytes(6), 0)
def test_any_bytes(data: bytes, heads: int) -> None:
    decodes_or_refuses(data, {NAME: HELD} if heads == 2 else {}, heads)


@settings(max_examples=500)
@given(st.integers(0, 3), st.integers(0, 60), st.binary(max_size=30), st.binary(min_size=4, max_size=4))
def test_any_payload_under_a_valid_header(mode: int, blocks: int, payload: bytes, crc: bytes) -> None:
    data = packet(mode, 2, blocks, payload, [])
    decodes_or_refuses(data[:-4] + crc, {NAME: HELD}, 2)
    named = packet(mode, 2, blocks, varint(NAME[0]) + varint(NAME[1]) + payload, [])
    decodes_or_refuses(named, {NAME: HELD}, 2)


@given(pairs(), st.data())
def test_any_changed_byte(pair: tuple[BlockSelection, BlockSelection], data: st.DataObject) -> None:
    """Found out by the checksum unless the change is of the header alone; what is let in is a selection."""
    selection, reference = pair
    for form in bodies(selection, reference).values():
        at = data.draw(st.integers(0, len(form) - 1))
        changed = bytearray(form)
        changed[at] ^= data.draw(st.integers(1, 255))
        decodes_or_refuses(bytes(changed), {NAME: reference}, selection.num_heads)
        header = 2 + len(varint(selection.num_heads) + varint(selection.num_blocks))
        if at >= header:
            assume(form[1] != DIFFERENCE or at >= header + 3)
            with pytest.raises(InvalidArgument):
                decode_selection(bytes(changed), {NAME: reference}, selection.num_heads)


@given(pairs())
def test_any_truncation(pair: tuple[BlockSelection, BlockSelection]) -> None:
    selection, reference = pair
    for form in bodies(selection, reference).values():
        for size in range(len(form)) if len(form) < 60 else (0, 5, 6, 40, len(form) - 4, len(form) - 1):
            decodes_or_refuses(form[:size], {NAME: reference}, selection.num_heads)
        with pytest.raises(InvalidArgument):
            decode_selection(form[:-1], {NAME: reference}, selection.num_heads)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (packet(LIST, 2, 9, gaps([1, 12]), [1, 12], version=2), "version"),
        (packet(3, 2, 9, gaps([1, 12]), [1, 12]), "unknown mode 3"),
        (packet(LIST, 3, 9, gaps([1, 12]), [1, 12]), "3 heads, the plan announces 2"),
        (packet(LIST, 2, 9, gaps([1, 18]), [1, 18]), "index 18 outside 18"),
        (packet(LIST, 2, 9, gaps([1]) + b"\x80", [1]), "cut off"),
        (packet(LIST, 2, 9, b"\x80" * 5 + b"\x01", [1]), "longer than 5"),
        (packet(BITMAP, 2, 9, b"\x02\x00", [1]), "bitmap of 2 bytes for 18 bits"),
        (packet(BITMAP, 2, 9, b"\x02\x00\x04", [1, 18]), "beyond the last block"),
        (packet(LIST, 2, 9, gaps([1, 12]), [1, 13]), "checksum"),
        (bytes([1, 0]) + b"\x80" * 8, "cut off"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        decode_selection(data, {}, 2)


# Caps


def peak_bytes(data: bytes, references: dict[Reference, BlockSelection], heads: int) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument):
            decode_selection(data, references, heads)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("mode", [LIST, BITMAP, DIFFERENCE])
@pytest.mark.parametrize(("heads", "blocks"), [(2**31, 1), (2**31, 2**31), (2, 2**31), (2, MAX_KEYS // 2)])
def test_a_huge_header_allocates_nothing(mode: int, heads: int, blocks: int) -> None:
    """Even where the plan would announce that many heads. The last one is as large as is let in."""
    payload = varint(NAME[0]) + varint(NAME[1]) if mode == DIFFERENCE else b"\x05"
    data = packet(mode, heads, blocks, payload, [])
    assert peak_bytes(data, {NAME: HELD}, heads) < 200_000
    assert peak_bytes(data, {NAME: HELD}, 3) < 200_000


def test_a_selection_that_no_one_would_accept_is_not_sent() -> None:
    with pytest.raises(InvalidArgument, match="at most"):
        encode_selection(BlockSelection(2, MAX_KEYS // 2 + 1, np.zeros(0, dtype=np.int64)))
