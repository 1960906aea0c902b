"""What is known of a text's tokens without encoding it is never more than it has."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from orchestrator.text.special_tokens import TextEncoder
from orchestrator.text.token_bounds import TokenBound
from tests.books import read_books

PIECES = [" ", " " * 40, "the", "e\u0301", "\u1112\u1161\u11ab", "é", "=" * 30, "\n", "<s>", "[gap]", "\U0001f600", "a"]
TEXTS = st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=60).map("".join))


def byte_level(normalizer: Any = None, **added: bool) -> PreTrainedTokenizerFast:
    """A tokenizer whose longest tokens are runs, with a special token that is one of `added`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder, backend.normalizer = decoders.ByteLevel(), normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = [" " * 60, "=" * 60, "the rain in Spain and the plain", "é" * 20, "\u1112\u1161\u11ab"] * 50
    backend.train_from_iterator(text, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("[gap]", **added)]})
    return tokenizer


TOKENIZERS = {
    "plain": byte_level(),
    "composing": byte_level(normalizers.NFC()),
    "taking spaces": byte_level(lstrip=True, rstrip=True),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    encoder = TextEncoder(TOKENIZERS[name])
    counts = {len(encoder.encode(text, False)), len(encoder.encode_rendered(text))}
    marked = encoder.mark(text)
    assert encoder.bound.least_tokens(text) <= min(counts)
    assert encoder.bound.least_tokens(marked) <= len(encoder.encode_rendered(marked))


def test_prose_is_bounded_well(tokenizer: Any) -> None:
    text = read_books()[0][:100_000]
    encoder = TextEncoder(tokenizer)
    tokens = len(encoder.encode(text, False))
    assert tokens / 5 < encoder.bound.least_tokens(text) <= tokens
    # Tokens of 60 spaces do not loosen the bound of letters, and special tokens that take spaces with them do not.
    for name in ("plain", "taking spaces"):
        assert TokenBound(TOKENIZERS[name]).least_tokens("word " * 3000) >= 1000


def test_where_text_may_vanish_nothing_is_known() -> None:
    backends = {
        "unknown words": Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
        "bytes that are no tokens": Tokenizer(models.BPE({"a": 0}, [])),
        "spaces that are removed": byte_level().backend_tokenizer,
        "accents that are removed": byte_level(normalizers.StripAccents()).backend_tokenizer,
    }
    backends["bytes that are no tokens"].pre_tokenizer = pre_tokenizers.ByteLevel()
    split = pre_tokenizers.Split(" ", "removed")
    backends["spaces that are removed"].pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
    for what, backend in backends.items():
        bound = TokenBound(PreTrainedTokenizerFast(tokenizer_object=backend))
        assert bound.least_tokens("a word " * 1000) == 0, what
    assert TokenBound(object()).least_tokens("a word") == 0
