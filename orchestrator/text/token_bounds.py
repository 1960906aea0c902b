"""How many tokens a text has at least, found without encoding it: a text that is far too long is refused at once."""

import json
import string
import unicodedata
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_NO_LETTERS = bytes(set(range(256)) - set((string.ascii_letters + string.digits).encode()))
_LONGEST_MARK = 12  # bytes of a special token in a user's text, as special_tokens.py marks it in a template
_PRE_TOKENIZERS = {"Sequence", "ByteLevel", "Digits", "Split"}  # that keep each byte, but for a Split that removes


class TokenBound:
    """Bounds the tokens of a text by what one token holds at most. tokenizer: a model's, by transformers.

    With the usual tokenizers, which make each byte of a text a part of one token, a text of N bytes has at least
    N / (bytes of the longest token) tokens. The same holds for its ASCII letters and digits alone, which is a better
    bound where the longest tokens are runs of spaces. Nothing is known of other tokenizers: the bound is 0.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._bytes = self._letters = 0  # of a token, at most; 0: not known
        self._composes = False  # whether the text is brought into Unicode's form NFC first
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not _keeps_bytes(backend):
            return
        self._composes = backend.normalizer is not None
        added = list(tokenizer.added_tokens_decoder.values())
        # In the vocabulary each byte is one character, and letters and digits are themselves.
        tokens = [token.encode("utf-8", "replace") for token in backend.get_vocab(with_added_tokens=False)]
        tokens += [token.content.encode() for token in added]
        self._letters = max(_LONGEST_MARK, *(_letters(token) for token in tokens))
        if not any(token.lstrip or token.rstrip for token in added):  # these take any number of spaces with them
            lengths = map(len, backend.get_vocab(with_added_tokens=False))
            self._bytes = max(_LONGEST_MARK, *lengths, *(len(token.content.encode()) for token in added))

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that the text has at least."""
        if not self._letters or (self._composes and not unicodedata.is_normalized("NFC", text)):
            return 0
        data = text.encode("utf-8", "replace")
        return max(-(-_letters(data) // self._letters), -(-len(data) // self._bytes) if self._bytes else 0)


def _letters(data: bytes) -> int:
    return len(data.translate(None, _NO_LETTERS))


def _keeps_bytes(backend: Any) -> bool:
    """Return whether each byte of a text, at most composed, becomes part of exactly one token."""
    model, normalizer = backend.model, backend.normalizer
    if type(model).__name__ != "BPE" or type(normalizer).__name__ not in ("NoneType", "NFC"):
        return False
    if backend.pre_tokenizer is None or backend.truncation is not None:
        return False
    parts = [json.loads(backend.pre_tokenizer.__getstate__())]
    parts += parts[0].get("pretokenizers", [])
    kinds = {part["type"] for part in parts}
    removes = any(part.get("behavior") == "Removed" for part in parts)
    known = kinds <= _PRE_TOKENIZERS and "ByteLevel" in kinds and not removes
    return known and all(model.token_to_id(byte) is not None for byte in ByteLevel.alphabet())
