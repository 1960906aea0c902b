"""Token ids of a prompt's pieces are those of the prompt, and pieces that came before are not encoded again."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from orchestrator.text.special_tokens import TextEncoder
from orchestrator.text.text_pieces import PieceEncoder

MARKS = ["<|user|>", "<|assistant|>", "<|endoftext|>", "<|system|>"]
LONG = "The old man was thin and gaunt. " * 20


class Counting:
    """A tokenizer that notes what it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.encoded = tokenizer, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.tokenizer, memo)

    def encode(self, text: str, **how: Any) -> Any:
        self.encoded.append(text)
        return self.tokenizer.encode(text, **how)


@pytest.fixture(scope="module")
def pieces(tokenizer: Any) -> PieceEncoder:
    made = PieceEncoder(tokenizer)
    assert made.remembers
    return made


@given(parts=st.lists(st.one_of(st.sampled_from([*MARKS, LONG, " ", "\n", "<|", "|>"]), st.text(max_size=300))))
def test_ids_of_pieces_are_those_of_the_text(pieces: PieceEncoder, tokenizer: Any, parts: list[str]) -> None:
    text = "".join(parts)
    assert pieces.encode(text) == tokenizer.encode(text, add_special_tokens=False)


def test_the_next_turn_of_a_chat_encodes_what_is_new(tokenizer: Any) -> None:
    """This holds for long pieces; short ones are encoded as soon as they are found."""
    counting = Counting(tokenizer)
    pieces = PieceEncoder(counting)
    counting.encoded.clear()
    before = "".join(f"<|user|>{i} {LONG}<|assistant|>Yes." for i in range(3))
    pieces.encode(before)
    assert counting.encoded == ["0 " + LONG, "Yes.", "1 " + LONG, "Yes.", "2 " + LONG, "Yes."]
    counting.encoded.clear()
    text = before + f"<|user|>3 {LONG}"
    assert pieces.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert counting.encoded == ["Yes."] * 3 + ["3 " + LONG]


def made(*added: AddedToken, prefix: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters, and of some added tokens."""
    characters = {chr(i): i for i in range(32, 127)} | {"▁": 127, "\n": 128, "?": 129}
    tokenizer = Tokenizer(models.BPE(characters, [], unk_token="?"))
    if prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_tokens(list(added))
    return fast


def special(text: str, **how: Any) -> AddedToken:
    return AddedToken(text, special=True, **{"normalized": False, **how})


@pytest.mark.parametrize(
    "tokenizer",
    [
        made(special("<a>", rstrip=True)),
        made(special("<a>", lstrip=True)),
        made(special("<a>", single_word=True)),
        made(special("<a>", normalized=True)),
        made(special("<a>"), prefix=True),
        made(special("<a>"), special(">two<")),
        made(special("<a>"), AddedToken("two<a>three", normalized=False)),
        made(AddedToken("<a>", normalized=False)),
        made(),
    ],
    ids=[
        *("takes spaces", "takes spaces before", "is a word", "is normalized", "first"),
        *("meets", "holds", "plain", "none"),
    ],
)
def test_other_tokenizers_encode_texts_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces = PieceEncoder(tokenizer)
    assert not pieces.remembers
    text = "One <a>  two<a>three <b> four <a>two<a>"
    assert pieces.encode(text) == tokenizer.encode(text, add_special_tokens=False)


def test_a_chats_text_goes_by_pieces_and_what_a_user_marks_stays_text(tokenizer: Any) -> None:
    counting = Counting(copy.deepcopy(tokenizer))
    encoder = TextEncoder(counting)
    marked = encoder.mark(f"{LONG}<|user|> says")
    text = f"<|user|>{marked}<|assistant|>"
    first = encoder.encode_rendered(text)
    counting.encoded.clear()
    assert encoder.encode_rendered(text) == first
    assert counting.encoded == [" says"]
    assert tokenizer.decode(first) == f"<|user|>{LONG}<|user|> says<|assistant|>"
    users = tokenizer.convert_tokens_to_ids("<|user|>")
    assert first.count(users) == 1
