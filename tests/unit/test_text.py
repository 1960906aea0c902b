"""Text that appears piece by piece is the text that all tokens together have."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders

from orchestrator.text.detokenizer import Detokenizer, StopFinder

REPLACEMENT = "\ufffd"
AWKWARD = [
    "Plain words, and  two spaces.\n\n\tA tab.",
    "naïve café « quoted » … €5",
    "北京的天气今天很好。",
    "🙂🙃👩‍👩‍👧‍👦🏳️‍🌈 and \U0001d518\U0001d52b\U0001d526",
    "नमस्ते दुनिया, عالم מרחבא",
    "a\u0301 combining, zero\u200bwidth, \U0010ffff last",
    "it's he's don't , . ! ? n't",  # what a tokenizer's clean-up would change
    " leading and trailing ",
]


def cut(rng: random.Random, tokens: list[int], most: int) -> Iterator[list[int]]:
    at = 0
    while at < len(tokens):
        size = rng.randint(1, most)
        yield tokens[at : at + size]
        at += size


def stream(tokenizer: Any, pieces: Iterator[list[int]] | list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


def whole(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", AWKWARD)
@pytest.mark.parametrize("most", [1, 2, 5])
def test_text_comes_out_whole(tokenizer: Any, text: str, most: int) -> None:
    """Characters of several bytes and tokens are never shown in part."""
    tokens = tokenizer.encode(text)
    chunks = stream(tokenizer, cut(random.Random(0), tokens, most))
    assert "".join(chunks) == text
    assert not any(REPLACEMENT in chunk for chunk in chunks)


@pytest.mark.parametrize("seed", range(10))
def test_random_tokens_come_out_as_one_decoding_has_them(tokenizer: Any, seed: int) -> None:
    """Any ids, special ones and broken UTF-8 included; replacement characters where the whole has them."""
    rng = random.Random(seed)
    vocabulary = len(tokenizer)
    low = vocabulary if seed % 2 else 260  # every other time single bytes above all
    tokens = [rng.randrange(low) for _ in range(rng.randint(1, 60))]
    tokens += [rng.choice(tokenizer.all_special_ids) for _ in range(3)]
    rng.shuffle(tokens)
    chunks = stream(tokenizer, cut(rng, tokens, rng.choice([1, 1, 4])))
    text = whole(tokenizer, tokens)
    assert "".join(chunks) == text
    place = 0
    for chunk in chunks:
        assert chunk == text[place : place + len(chunk)]
        place += len(chunk)


@pytest.fixture(scope="module")
def byte_fallback() -> Any:
    """A tokenizer that decodes as Llama 2's: bytes by runs, and no space before the first word."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    vocabulary = [*bytes_, "\u2581", "\u2581\u2581", "\u2581a", "b", "\u2581the", "\u00e9"]
    numbers = {name: i for i, name in enumerate(vocabulary)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, [], byte_fallback=True))
    parts = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    inner.decoder = decoders.Sequence(list(parts))
    inner.add_special_tokens(["<s>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")


@given(
    st.lists(
        st.sampled_from(
            [[256], [257], [258], [259], [260], [261], [262], [262] * 20, [0x80], *(list(c.encode()) for c in "é北🙂 ")]
        ),
        max_size=40,
    )
)
@example([[256], [262], [258]])
@example([[256], [262] * 20, [258]])
@example([[258], [262] * 20, [258]])
def test_bytes_and_words_with_spaces_come_out_as_one_decoding_has_them(
    byte_fallback: Any, parts: list[list[int]]
) -> None:
    tokens = [token for part in parts for token in part]
    one_by_one = "".join(stream(byte_fallback, [[token] for token in tokens]))
    assert one_by_one == "".join(stream(byte_fallback, [tokens]))
    if 0x80 not in tokens:  # a decoder of byte runs takes characters back that were shown before a wrong byte
        assert one_by_one == whole(byte_fallback, tokens)


def test_an_answer_keeps_the_space_before_its_first_word(byte_fallback: Any, tokenizer: Any) -> None:
    """And a character whose first bytes end the prompt comes whole."""
    assert "".join(stream(byte_fallback, [[260], [258]])) == "the a"  # a text of its own
    for before in ([258], [256, 258], [258] * 9):
        assert Detokenizer(byte_fallback, before=before).push([260, 258]) == " the a"
    first, *rest = tokenizer.encode("🙂")
    for before in ([first], [*tokenizer.encode("The sea"), first]):
        assert Detokenizer(tokenizer, before=before).push(rest) == "🙂"


@pytest.mark.parametrize("before", ["北京", "é北", "🙂🙂", "a🙂北"])
def test_an_answer_behind_characters_of_several_bytes_is_readable(byte_fallback: Any, before: str) -> None:
    """Decoders show a run of bytes that begins within a character as replacement characters."""
    prompt, (first, *rest) = list(before.encode()), list("é".encode())
    assert Detokenizer(byte_fallback, before=prompt).push([260, first, *rest]) == " theé"
    assert Detokenizer(byte_fallback, before=prompt).push([first, *rest, 258]) == "é a"
    assert Detokenizer(byte_fallback, before=[*prompt, first]).push([*rest, 258]) == "é a"


# Stop strings


def until_stop(text: str, stops: list[str], least: int = 0) -> tuple[str, bool]:
    """The text up to the stop string that is complete first beyond `least` characters; it may begin before them.

    Of several that are complete there, up to the one that began first.
    """
    for end in range(least + 1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


def feed(stops: list[str], pieces: list[str]) -> tuple[str, bool, list[str]]:
    finder, shown = StopFinder(stops), []
    for piece in pieces:
        text, stopped = finder.push(piece)
        shown.append(text)
        if stopped:
            return "".join(shown), True, shown
    shown.append(finder.finish())
    return "".join(shown), False, shown


letters = st.text("ab\n", max_size=4)


@given(st.lists(letters, max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3))
@example(["a", "b", "c"], ["abc", "b"])
@example(["abc"], ["abc", "b"])
@example(["aab"], ["ab"])
@example(["aa", "ab"], ["aab"])
@example(["abab", "b"], ["ababb", "abb"])
def test_stop_strings_are_found_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    """All in one piece, letter by letter, and as cut: the same text, without the stop string."""
    text = "".join(pieces)
    wanted = until_stop(text, stops)
    assert feed(stops, pieces)[:2] == wanted
    assert feed(stops, [text])[:2] == wanted
    assert feed(stops, list(text))[:2] == wanted


@given(
    st.lists(letters, max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3), st.integers(0, 12)
)
@example(["a", "b"], ["ab"], 1)
@example(["ab", "ab"], ["ab", "bab"], 1)
@example(["aaa", "a"], ["aa"], 1)
def test_a_stop_string_may_begin_where_it_may_not_end(pieces: list[str], stops: list[str], first: int) -> None:
    """As where it straddles min_tokens. first: pieces in which none ends."""
    finder, shown = StopFinder(stops), ""
    wanted = until_stop("".join(pieces), stops, len("".join(pieces[:first])))
    for number, piece in enumerate(pieces):
        text, stopped = finder.push(piece, number >= first)
        shown += text
        if stopped:
            assert (shown, True) == wanted
            return
    assert (shown + finder.finish(), False) == wanted


@given(st.lists(letters, max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=3))
def test_only_what_may_begin_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    finder, text, shown = StopFinder(stops), "", ""
    for piece in pieces:
        text += piece
        out, stopped = finder.push(piece)
        shown += out
        if stopped:
            return
        held = text[len(shown) :]
        assert text == shown + held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
