"""Hints by themselves: ranks, what a hint may name, how many bytes it takes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draft_service.hints import FIRST_QUERY, LIKELY, Hint, make_hint, without
from engine.draft_rounds import ranked_blocks
from kernels.shared_top_k import rank_over_all
from sparsity.selection import BlockSelection
from wire.errors import InvalidArgument
from wire.selection_codec import decode_selection, encode_blocks, encode_selection

Pairs = list[tuple[int, int]]


def array(pairs: Pairs) -> np.ndarray:
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


def selection(pairs: Pairs, heads: int, blocks: int) -> BlockSelection:
    keys = [head * blocks + block for head, block in pairs]
    return BlockSelection(heads, blocks, np.array(keys, dtype=np.int64))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, Pairs]:
    """heads, blocks, some blocks in any order"""
    heads, blocks = draw(st.integers(1, 12)), draw(st.integers(1, 700))
    pair = st.tuples(st.integers(0, heads - 1), st.integers(0, blocks - 1))
    return heads, blocks, draw(st.lists(pair, unique=True, max_size=150))


def test_blocks_are_ranked_by_hand() -> None:
    scores = torch.tensor([[[0.1, 0.0, 0.5], [0.4, 0.2, 0.0]], [[0.0, 0.0, 0.0], [0.0, 0.0, 7.0]]])
    keys = rank_over_all(scores, 3)
    assert keys.tolist() == [[2, 3, 4], [5, -1, -1]]
    assert rank_over_all(scores, 8)[0].tolist() == [2, 3, 4, 0, -1, -1, -1, -1]
    assert ranked_blocks(keys[0].numpy(), 3).tolist() == [[0, 2], [1, 0], [1, 1]]
    assert ranked_blocks(keys[1].numpy(), 3).tolist() == [[1, 2]]


@given(shapes())
def test_blocks_are_encoded_as_the_selection_of_them(shape: tuple[int, int, Pairs]) -> None:
    heads, blocks, pairs = shape
    chosen = selection(pairs, heads, blocks)
    data = encode_blocks(heads, blocks, array(pairs))
    assert data == encode_selection(chosen)
    assert decode_selection(data, {}, heads, blocks).lists() == chosen.lists()


def test_more_blocks_than_can_be_sent_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at most"):
        encode_blocks(1 << 12, 1 << 13, array([]))


@given(shapes(), st.data(), st.integers(0, 200))
def test_a_hint_is_the_heaviest_of_what_is_not_known_within_its_bytes(
    shape: tuple[int, int, Pairs], data: st.DataObject, most: int
) -> None:
    heads, blocks, pairs = shape
    pair = st.tuples(st.integers(0, heads - 1), st.integers(0, blocks + 70))
    # The last selection was made in a context that may have been shorter.
    last_blocks = data.draw(st.integers(1, blocks))
    named = [p for p in data.draw(st.lists(pair, unique=True)) + pairs[::3] if p[1] < last_blocks]
    last = data.draw(st.sampled_from([None, selection(named, heads, last_blocks)]))
    known = set() if last is None else set(named)
    said_before = data.draw(st.sampled_from([[], pairs[1::5]]))
    said = [Hint(LIKELY, b"", array(said_before))] if said_before else []
    left = [p for p in pairs if p not in known and p not in said_before]
    assert without(array(pairs), last, [hint.blocks for hint in said]).tolist() == [list(p) for p in left]
    hint = make_hint(FIRST_QUERY, array(pairs), last, said, heads, blocks, most)
    if hint is None:
        assert not left or len(encode_blocks(heads, blocks, array(left[:1]))) > most
        return
    count = len(hint.blocks)
    assert hint.part == FIRST_QUERY
    assert len(hint.data) <= most
    assert hint.blocks.tolist() == [list(p) for p in left[:count]]
    found = decode_selection(hint.data, {}, heads, blocks)
    assert found.lists() == selection(left[:count], heads, blocks).lists()
    if count < min(len(left), most):  # it is cut because it must be
        assert len(encode_blocks(heads, blocks, array(left[:most]))) > most


def test_a_hint_uses_most_of_its_bytes() -> None:
    """At the size of an 8B target at 100K context, where there is more to say than fits."""
    generator = np.random.default_rng(0)
    keys = generator.choice(256 * 6250, 8192, replace=False).astype(np.int32)
    for most in (1024, 2048, 4096, 8192):
        hint = make_hint(LIKELY, ranked_blocks(keys, 6250), None, [], 256, 6250, most)
        assert hint is not None
        assert 0.9 * most < len(hint.data) <= most
        # With the last one to begin with, too, whatever that was.
        for like in (hint, Hint(LIKELY, hint.data[: most * 3 // 4], hint.blocks)):
            again = make_hint(LIKELY, ranked_blocks(keys, 6250), None, [], 256, 6250, most, like)
            assert again is not None
            assert 0.9 * most < len(again.data) <= most
