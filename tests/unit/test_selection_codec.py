"""The bytes of an announcement: what goes in comes out; nothing else is let in, nor much memory taken."""

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specahead.sparsity.selection import BlockSelection
from specahead.wire.errors import InvalidArgument
from specahead.wire.selection_codec import NamedSelection, Reference, decode_selection, encode_selection
from tests.plans import selection_of

NAME: Reference = (2**40 + 3, 200)  # epochs go on over all sessions, beyond 32 bits within a year
DENSITIES = [0.0, 0.01, 0.1, 0.5, 1.0]


def random_selection(heads: int, blocks: int, density: float, seed: int, churn: float = 0.0) -> BlockSelection:
    """churn: share of the bits that another seed decides."""
    chosen = np.random.default_rng(0).random((heads, blocks)) < density
    rng = np.random.default_rng(seed)
    return BlockSelection.from_matrix(
        np.where(rng.random(chosen.shape) < churn, rng.random(chosen.shape) < density, chosen)
    )


@st.composite
def sessions(draw: st.DrawFn) -> tuple[BlockSelection, NamedSelection | None]:
    """A selection, and mostly an earlier one of the same heads, alike or not, in a context of about the same length."""
    heads, blocks = draw(st.integers(0, 5)), draw(st.integers(0, 300))
    churn = draw(st.sampled_from([0.0, 0.02, 0.2, 1.0]))

    def selection(blocks: int) -> BlockSelection:
        seed, density = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(DENSITIES))
        return random_selection(heads, blocks, density, seed, churn)

    length = draw(st.none() | st.integers(max(0, blocks - 70), blocks + 70))
    return selection(blocks), None if length is None else (NAME, selection(length))


def decode(data: bytes, reference: NamedSelection | None, like: BlockSelection) -> BlockSelection:
    held = {} if reference is None else dict([reference])
    return decode_selection(data, held, like.num_heads, like.num_blocks)


def same(a: BlockSelection, b: BlockSelection) -> bool:
    return (a.num_heads, a.num_blocks) == (b.num_heads, b.num_blocks) and np.array_equal(a.words, b.words)


def is_valid(selection: BlockSelection) -> bool:
    return same(selection, BlockSelection.from_matrix(selection.matrix()))


# The format, written out once more from its description


def words_of(keys: set[int], heads: int, blocks: int) -> list[int]:
    out = [0] * (heads * -(-blocks // 64))
    for key in keys:
        head, block = divmod(key, blocks)
        out[head * -(-blocks // 64) + block // 64] |= 1 << block % 64
    return out


def packet(
    heads: int,
    blocks: int,
    words: list[int],
    reference: list[int] | None = None,
    name: Reference = (0, 0),
    version: int = 4,
) -> bytes:
    """words: of the selection. reference: of the reference's words, as many."""
    known = reference or [0] * len(words)
    difference = b"".join((a ^ b).to_bytes(8, "little") for a, b in zip(words, known, strict=True))
    flags = sum(1 << i for i, byte in enumerate(difference) if byte).to_bytes(len(words), "little")
    checksum = sum(word * ((i * 0x9E3779B97F4A7C15) % 2**64 | 1) for i, word in enumerate(words)) % 2**64
    header = struct.pack("<4IQIQ", version, reference is not None, heads, blocks, *name, checksum)
    return header + flags + difference.replace(b"\0", b"")


# What encoders send


@given(sessions())
def test_round_trip(session: tuple[BlockSelection, NamedSelection | None]) -> None:
    """The reference may be of a shorter or longer context."""
    selection, reference = session
    decoded = decode(encode_selection(selection, reference), reference, selection)
    assert same(decoded, selection)
    assert is_valid(decoded)


@given(st.sets(st.integers(0, 3 * 90 - 1)), st.sets(st.integers(0, 3 * 90 - 1)))
def test_the_format_is_as_described(wanted: set[int], before: set[int]) -> None:
    lists = ([[key % 90 for key in keys if key // 90 == head] for head in range(3)] for keys in (wanted, before))
    selection, held = (selection_of(rows, 90) for rows in lists)
    words, known = words_of(wanted, 3, 90), words_of(before, 3, 90)
    assert encode_selection(selection) == packet(3, 90, words)
    assert encode_selection(selection, (NAME, held)) == packet(3, 90, words, known, NAME)


# Bytes that no encoder made

HELD = random_selection(2, 40, 0.4, 1)


@settings(max_examples=500)
@given(
    st.binary(max_size=40),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 200),
    st.lists(st.integers(0, 2**64 - 1), max_size=8),
)
@example(b"", False, 0, 0, [])
def test_any_bytes(data: bytes, refers: bool, heads: int, blocks: int, words: list[int]) -> None:
    """By themselves, and behind the header of other words."""
    header = packet(heads, blocks, words, words if refers else None, NAME)[:36]
    for sent in (data, header + data):
        try:
            decoded = decode_selection(sent, {NAME: HELD}, heads, blocks)
        except InvalidArgument:
            continue
        assert (decoded.num_heads, decoded.num_blocks) == (heads, blocks)
        assert is_valid(decoded)


@settings(max_examples=300)
@given(sessions(), st.data())
def test_any_changed_byte(session: tuple[BlockSelection, NamedSelection | None], data: st.DataObject) -> None:
    """What is let in is what was sent, but for a name that says the same."""
    selection, reference = session
    changed = bytearray(encode_selection(selection, reference))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode(bytes(changed), reference, selection)
    except InvalidArgument:
        return
    assert same(decoded, selection)


@given(sessions())
def test_any_truncation(session: tuple[BlockSelection, NamedSelection | None]) -> None:
    selection, reference = session
    data = encode_selection(selection, reference)
    for size in range(len(data)) if len(data) < 100 else (*range(40), len(data) // 2, len(data) - 1):
        with pytest.raises(InvalidArgument, match="bytes"):
            decode(data[:size], reference, selection)
    with pytest.raises(InvalidArgument, match="bytes after the header"):
        decode(data + b"\0", reference, selection)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (packet(2, 9, [2, 8], version=3), "version 3, expected 4"),
        (packet(3, 9, [2, 8, 0]), "3 heads x 9 blocks, expected 2 x 9"),
        (packet(2, 10, [2, 8]), "2 heads x 10 blocks, expected 2 x 9"),
        (packet(2, 9, [2, 8])[:35], "35 bytes, a header has 36"),
        (packet(2, 9, [2, 8])[:37], "1 bytes after the header, its bitmap asks for 3"),
        (packet(2, 9, [2, 8])[:39], "3 bytes after the header, its bitmap asks for 4"),
        (packet(2, 9, [2, 8]) + b"\1", "5 bytes after the header, its bitmap asks for 4"),
        (packet(2, 9, [2, 8])[:-1] + b"\7", "checksum"),
        (packet(2, 9, [2, 512]), "beyond the last block"),
        (packet(2, 9, [2, 8], [2, 0], NAME), f"no selection of epoch {NAME[0]}, round 200"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        decode_selection(data, {}, 2, 9)


@pytest.mark.parametrize("expected", [(2**31, 2**31), (3, 9)])
def test_a_huge_header_allocates_nothing(expected: tuple[int, int]) -> None:
    """Even where that many heads and blocks are expected."""
    data = struct.pack("<4IQIQ", 4, 0, 2**31, 2**31, 0, 0, 0) + bytes(100)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument):
            decode_selection(data, {}, *expected)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


# BlockSelection, which the codec's bits are


@given(st.integers(0, 4), st.integers(0, 200), st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_selections_are_what_their_matrices_are(heads: int, blocks: int, other: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.random((heads, blocks)) < 0.3
    selection = BlockSelection.from_matrix(a)
    assert np.array_equal(selection.matrix(), a)
    resized = np.zeros((heads, other), dtype=bool)
    resized[:, :blocks] = a[:, :other]
    assert np.array_equal(selection.resized(other).matrix(), resized)
    assert is_valid(selection.resized(other))
