"""The bytes of an announcement: what goes in comes out; nothing else is let in, nor much memory taken."""

import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sparsity.selection import BlockSelection
from wire.errors import InvalidArgument
from wire.selection_codec import (
    MAX_PAIRS,
    MAX_REFERENCES,
    NamedSelection,
    Reference,
    UnknownReference,
    decode_selection,
    encode_selection,
)

BITMAP, GAPS, COMPRESSED, WORDS = 0, 1, 2, 4
NAMES: list[Reference] = [(3, 200), (3, 199), (2, 198), (2, 70), (0, 1)]
DENSITIES = [0.0, 0.01, 0.1, 0.5, 1.0]


def random_selection(heads: int, blocks: int, density: float, seed: int, churn: float = 0.0) -> BlockSelection:
    """churn: share of the bits that another seed decides."""
    chosen = np.random.default_rng(0).random((heads, blocks)) < density
    rng = np.random.default_rng(seed)
    return BlockSelection.from_matrix(
        np.where(rng.random(chosen.shape) < churn, rng.random(chosen.shape) < density, chosen)
    )


@st.composite
def sessions(draw: st.DrawFn) -> tuple[BlockSelection, list[NamedSelection]]:
    """A selection and earlier ones of the same heads, alike or not, in contexts of about the same length."""
    heads, blocks = draw(st.integers(0, 5)), draw(st.integers(0, 300))
    churn = draw(st.sampled_from([0.0, 0.02, 0.2, 1.0]))

    def selection(blocks: int) -> BlockSelection:
        seed, density = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from(DENSITIES))
        return random_selection(heads, blocks, density, seed, churn)

    lengths = draw(st.lists(st.integers(max(0, blocks - 70), blocks + 70), max_size=MAX_REFERENCES))
    held = [(name, selection(length)) for name, length in zip(NAMES, lengths, strict=False)]
    return selection(blocks), held


def same(a: BlockSelection, b: BlockSelection) -> bool:
    return (a.num_heads, a.num_blocks) == (b.num_heads, b.num_blocks) and np.array_equal(a.words, b.words)


def is_valid(selection: BlockSelection, heads: int) -> bool:
    again = BlockSelection.from_keys(selection.num_heads, selection.num_blocks, selection.keys)
    return selection.num_heads == heads and same(selection, again)


# The format, written out once more from its description


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def checksum(heads: int, blocks: int, words: list[int]) -> bytes:
    weight = 0x9E3779B97F4A7C15
    total = sum(word * ((i * weight) % 2**64 | 1) for i, word in enumerate(words))
    return struct.pack("<Q", (total + heads * weight + blocks * weight**2) % 2**64)


def words_of(keys: set[int], heads: int, blocks: int) -> list[int]:
    out = [0] * (heads * -(-blocks // 64))
    for key in keys:
        head, block = divmod(key, blocks)
        out[head * -(-blocks // 64) + block // 64] |= 1 << block % 64
    return out


def one_set(kind: int, content: bytes, stated: int | None = None) -> bytes:
    sent = zstandard.ZstdCompressor().compress(content) if kind & COMPRESSED else content
    return bytes([kind]) + varint(len(content) if stated is None else stated) + varint(len(sent)) + sent


def gaps(members: list[int]) -> bytes:
    out, last = b"", -1
    for member in members:
        more, gap = divmod(member - last - 1, 255)
        out, last = out + b"\xff" * more + bytes([gap]), member
    return out


def bitmap(members: list[int], size: int) -> bytes:
    return sum(1 << i for i in members).to_bytes(-(-size // 8), "little")


def packet(
    heads: int, blocks: int, sets: bytes, keys: set[int], names: list[Reference] | None = None, version: int = 2
) -> bytes:
    head = bytes([version, len(names or [])]) + varint(heads) + varint(blocks)
    head += b"".join(varint(epoch) + varint(round_) for epoch, round_ in names or [])
    return head + sets + checksum(heads, blocks, words_of(keys, heads, blocks))


# What encoders send


@given(sessions(), st.booleans())
def test_round_trip(session: tuple[BlockSelection, list[NamedSelection]], compact: bool) -> None:
    """References may be of shorter or longer contexts."""
    selection, held = session
    data = encode_selection(selection, held, compact)
    for blocks in (None, selection.num_blocks):
        decoded = decode_selection(data, dict(held), selection.num_heads, blocks)
        assert same(decoded, selection)
        assert is_valid(decoded, selection.num_heads)


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize(("heads", "blocks"), [(1, 61376), (1, 61377), (33, 2100), (256, 1250)])
def test_round_trip_of_large_ones(heads: int, blocks: int, density: float) -> None:
    """Around the sizes of Roaring's containers, of which these make one or several."""
    held = [(name, random_selection(heads, blocks - 1, density, i, 0.2)) for i, name in enumerate(NAMES[:3])]
    selection = random_selection(heads, blocks, density, 9, 0.2)
    for references in ([], held[:1], held):
        for compact in (True, False):
            decoded = decode_selection(encode_selection(selection, references, compact), dict(held), heads)
            assert same(decoded, selection)


@given(
    st.sets(st.integers(0, 3 * 90 - 1), max_size=12),
    st.sets(st.integers(0, 3 * 90 - 1)),
    st.sets(st.integers(0, 3 * 90 - 1)),
    st.lists(st.sampled_from([BITMAP, GAPS, BITMAP | COMPRESSED, GAPS | COMPRESSED]), min_size=3, max_size=3),
)
def test_the_format_is_as_described(wanted: set[int], one: set[int], two: set[int], kinds: list[int]) -> None:
    """Every set in every form, made by hand; the decoder's limit on gaps is the encoder's rule for using them."""
    newest = sorted(one)
    further = sorted(two - one)
    rest = sorted(wanted - one - two)
    sets = b""
    placed = [key // 90 * 128 + key % 90 for key in rest]
    for kind, members, size in zip(
        kinds,
        (
            [i for i, key in enumerate(newest) if key not in wanted],
            [i for i, key in enumerate(further) if key in wanted],
            placed,
        ),
        (len(newest), len(further), 3 * 128),
        strict=True,
    ):
        assume(not kind & GAPS or len(gaps(members)) <= size // 16 + size // 255 + 1)
        sets += one_set(kind, gaps(members) if kind & GAPS else bitmap(members, size))
    held = {
        name: BlockSelection.from_keys(3, 90, np.array(sorted(keys), dtype=np.int64))
        for name, keys in zip(NAMES, (one, two), strict=False)
    }
    decoded = decode_selection(packet(3, 90, sets, wanted, NAMES[:2]), held, 3)
    assert decoded.keys.tolist() == sorted(wanted)


def test_what_an_encoder_sends_is_as_described() -> None:
    selection = BlockSelection.from_lists([[3, 70], [199], []], 200)
    placed = [3, 70, 256 + 199]
    assert encode_selection(selection) == packet(3, 200, one_set(GAPS, gaps(placed)), {3, 70, 399})
    words = np.array(words_of({3, 70, 399}, 3, 200), dtype="<u8").tobytes()
    assert encode_selection(selection, compact=False) == packet(3, 200, one_set(WORDS, words), {3, 70, 399})
    newest = BlockSelection.from_lists([[3, 5], [199], []], 200)
    sets = one_set(BITMAP, bitmap([1], 3)) + one_set(GAPS, gaps([70]))
    assert encode_selection(selection, [(NAMES[0], newest)]) == packet(3, 200, sets, {3, 70, 399}, NAMES[:1])


def test_references_make_it_smaller() -> None:
    """Each further one too, where what is selected now was selected lately."""
    rounds = [random_selection(64, 2000, 0.1, seed, 0.1) for seed in range(6)]
    held = list(zip(NAMES, rounds, strict=False))
    sizes = [len(encode_selection(rounds[5], held[:count])) for count in (0, 1, 2)]
    assert sizes[2] < 0.7 * sizes[1] < 0.7 * sizes[0]


def test_no_more_references_are_named_than_are_taken() -> None:
    selection = random_selection(2, 90, 0.1, 0)
    held = [(name, selection) for name in NAMES]
    data = encode_selection(selection, held)
    assert data[1] == MAX_REFERENCES
    assert same(decode_selection(data, dict(held), 2), selection)


def test_references_of_other_heads_are_not_used() -> None:
    selection = BlockSelection.from_lists([[1, 2], [3]], 50)
    other = BlockSelection.from_lists([[1, 2], [3], []], 50)
    assert encode_selection(selection, [(NAMES[0], other)]) == encode_selection(selection)
    data = encode_selection(selection, [(NAMES[0], selection)])
    with pytest.raises(InvalidArgument, match="reference of 3 heads"):
        decode_selection(data, {NAMES[0]: other}, 2)


def test_an_unknown_reference_is_told_apart() -> None:
    dense = random_selection(2, 200, 0.5, 0)
    data = encode_selection(dense, [(NAMES[0], dense)])
    for held in ({}, {(3, 201): dense}, {(4, 200): dense}):
        with pytest.raises(UnknownReference, match="epoch 3, round 200"):
            decode_selection(data, held, 2)
    other = BlockSelection.from_lists([list(range(len(dense.keys))), []], 200)
    with pytest.raises(InvalidArgument, match="checksum"):
        decode_selection(data, {NAMES[0]: other}, 2)


def test_threads_do_not_disturb_each_other() -> None:
    rounds = [random_selection(64, 700, 0.1, seed, 0.3) for seed in range(8)]

    def ok(i: int) -> bool:
        data = encode_selection(rounds[i], [(NAMES[0], rounds[0])])
        return same(decode_selection(data, {NAMES[0]: rounds[0]}, 64), rounds[i])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ok, list(range(8)) * 20))


# Bytes that no encoder made

HELD = random_selection(2, 40, 0.4, 1)


def decodes_or_refuses(data: bytes, references: dict[Reference, BlockSelection], heads: int) -> None:
    try:
        decoded = decode_selection(data, references, heads)
    except InvalidArgument:
        return
    assert is_valid(decoded, heads)


@settings(max_examples=300)
@given(st.binary(max_size=40), st.integers(0, 3))
@example(b"", 0)
@example(bytes(6), 0)
def test_any_bytes(data: bytes, heads: int) -> None:
    decodes_or_refuses(data, {NAMES[0]: HELD}, heads)


@settings(max_examples=500)
@given(
    st.integers(0, 2),
    st.integers(0, 200),
    st.lists(
        st.tuples(st.integers(0, 4), st.one_of(st.none(), st.integers(0, 40)), st.binary(max_size=30)), max_size=3
    ),
    st.binary(max_size=9),
)
def test_any_sets_under_a_valid_head(
    names: int, blocks: int, sets: list[tuple[int, int | None, bytes]], end: bytes
) -> None:
    body = b"".join(one_set(kind, content, stated) for kind, stated, content in sets)
    data = packet(2, blocks, body, set(), NAMES[:names])
    held = {NAMES[0]: HELD, NAMES[1]: random_selection(2, 50, 0.3, 2)}
    decodes_or_refuses(data, held, 2)
    decodes_or_refuses(data[:-8] + end, held, 2)


@given(sessions(), st.booleans(), st.data())
def test_any_changed_byte(
    session: tuple[BlockSelection, list[NamedSelection]], compact: bool, data: st.DataObject
) -> None:
    """What is let in is what was sent, but for a name or a form that says the same."""
    selection, held = session
    changed = bytearray(encode_selection(selection, held, compact))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode_selection(bytes(changed), dict(held), selection.num_heads)
    except InvalidArgument:
        return
    assert same(decoded, selection)


@given(sessions(), st.booleans())
def test_any_truncation(session: tuple[BlockSelection, list[NamedSelection]], compact: bool) -> None:
    selection, held = session
    data = encode_selection(selection, held, compact)
    sizes = range(len(data)) if len(data) < 60 else (*range(12), 40, len(data) - 9, len(data) - 8, len(data) - 1)
    for size in sizes:
        with pytest.raises(InvalidArgument):
            decode_selection(data[:size], dict(held), selection.num_heads)
    with pytest.raises(InvalidArgument, match="1 bytes too many"):
        decode_selection(data + b"\0", dict(held), selection.num_heads)


def frame(content: bytes, stated: int, **options: bool) -> bytes:
    sent = zstandard.ZstdCompressor(**options).compress(content)
    return bytes([BITMAP | COMPRESSED]) + varint(stated) + varint(len(sent)) + sent


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (packet(2, 9, one_set(GAPS, gaps([1, 67])), {1, 12}, version=1), "version 1"),
        (packet(3, 9, one_set(GAPS, gaps([1, 67])), {1, 12}), "3 heads, the plan announces 2"),
        (packet(2, 10, one_set(GAPS, gaps([1, 67])), {1, 12}), "10 blocks, the context has 9"),
        (packet(2, 9, b"", set(), [(0, 0)] * 5), "5 references"),
        (packet(2, 9, one_set(8, b"\1"), {1}), "unknown kind 8"),
        (packet(2, 9, one_set(4, b"\1"), {1}), "1 bytes for 128"),
        (packet(2, 9, one_set(4, bytes(16), 15), set()), "15 bytes for 128"),
        (packet(2, 9, one_set(4, bytes(15)), set()), "15 bytes for 128"),
        (packet(2, 9, one_set(5, b"\1"), {1}), "unknown kind 5"),
        (packet(2, 9, one_set(6, bytes(16)), set()), "unknown kind 6"),
        (bytes([2, 0, 2, 9]) + one_set(4, b"\0\2" + bytes(14)) + checksum(2, 9, [512, 0]), "beyond the last block"),
        (packet(2, 9, one_set(GAPS, gaps([1, 128])), {1}), "index 128 in a set of 128"),
        (packet(2, 9, one_set(GAPS, b"\1\xff"), {1}), "gap is cut off"),
        (packet(2, 9, one_set(GAPS, bytes(10)), set(range(10))), "10 bytes for 128"),
        (packet(2, 9, one_set(BITMAP, bytes(15)), set()), "15 bytes for 128"),
        (packet(2, 9, one_set(BITMAP, bytes(15), 16), set()), "15 bytes in a set, 16 are stated"),
        (packet(2, 9, one_set(GAPS, gaps([1, 66])), {1, 12}), "checksum"),
        (bytes([2, 0, 2, 9]) + one_set(GAPS, gaps([9])) + checksum(2, 9, [512, 0]), "beyond the last block"),
        (packet(2, 9, frame(bytes(16), 15), set()), "15 bytes for 128"),
        (packet(2, 9, frame(bytes(17), 16), set()), "does not state its set's size"),
        (packet(2, 9, frame(bytes(16), 16, write_content_size=False), set()), "does not state"),
        (packet(2, 9, one_set(BITMAP, bytes(16)).replace(b"\0", b"\2", 1), set()), "announcement: "),
        (packet(2, 9, frame(bytes(16), 16)[:-1], set()), "announcement: "),
        (bytes([2, 0]) + b"\x80" * 8, "longer than 5"),
        (bytes([2, 0]) + b"\x80" * 3, "cut off"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        decode_selection(data, {}, 2, 9)


# Caps


def peak_bytes(data: bytes, references: dict[Reference, BlockSelection], heads: int) -> int:
    tracemalloc.start()
    try:
        decodes_or_refuses_unchecked(data, references, heads)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def decodes_or_refuses_unchecked(data: bytes, references: dict[Reference, BlockSelection], heads: int) -> None:
    try:
        decode_selection(data, references, heads)
    except InvalidArgument:
        return


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize(
    ("heads", "blocks"), [(2**31, 1), (2**31, 2**31), (2, 2**31), (2, MAX_PAIRS // 2 + 1), (MAX_PAIRS, 1)]
)
def test_a_huge_head_allocates_nothing(kind: int, heads: int, blocks: int) -> None:
    """Even where the plan would announce that many heads."""
    head = bytes([2, 1]) + varint(heads) + varint(blocks) + varint(NAMES[0][0]) + varint(NAMES[0][1])
    data = head + one_set(kind, b"\5") * 2 + bytes(8)
    assert peak_bytes(data, {NAMES[0]: HELD}, heads) < 100_000
    assert peak_bytes(data, {NAMES[0]: HELD}, 3) < 100_000


@pytest.mark.parametrize("kind", [GAPS, BITMAP])
def test_what_unpacks_to_much_stays_in_the_cap(kind: int) -> None:
    """The largest selection let in, from a few kilobytes, in the form that takes the most."""
    size = MAX_PAIRS // 16
    content = bytes(size // 16) if kind else b"\xff" * (size // 8)
    data = bytes([2, 0]) + varint(1) + varint(size) + one_set(kind | COMPRESSED, content) + bytes(8)
    assert len(data) < 5000
    assert peak_bytes(data, {}, 1) < 4 * size


def test_a_frame_that_states_much_allocates_nothing() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    data = bytes([2, 0, 2, 9, BITMAP | COMPRESSED]) + varint(16) + varint(len(bomb)) + bomb + bytes(8)
    assert peak_bytes(data, {}, 2) < 100_000


def test_a_selection_that_no_one_would_accept_is_not_sent() -> None:
    with pytest.raises(InvalidArgument, match="at most"):
        encode_selection(BlockSelection.from_keys(2, MAX_PAIRS // 2 + 1, np.zeros(0, dtype=np.int64)))


# BlockSelection, which the codec's bits are


@given(st.integers(0, 4), st.integers(0, 200), st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_selections_are_what_their_matrices_are(heads: int, blocks: int, other: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.random((heads, blocks)) < 0.3
    selection = BlockSelection.from_matrix(a)
    assert np.array_equal(selection.matrix(), a)
    assert selection.keys.tolist() == np.flatnonzero(a).tolist()
    assert selection.keys.dtype == np.int64
    assert selection.lists() == [np.flatnonzero(row).tolist() for row in a]
    assert same(BlockSelection.from_lists(selection.lists(), blocks), selection)
    assert same(BlockSelection.from_keys(heads, blocks, selection.keys[::-1]), selection)
    resized = np.zeros((heads, other), dtype=bool)
    resized[:, :blocks] = a[:, :other]
    assert np.array_equal(selection.resized(other).matrix(), resized)
    assert is_valid(selection.resized(other), heads)
