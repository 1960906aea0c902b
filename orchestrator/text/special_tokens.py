"""Special tokens in users' text stay text; only a chat template or a list of token ids can make special tokens.

A template writes special tokens and users' text into one string. To keep them apart, special tokens that users wrote
pass through the template as marks, made of characters that Unicode reserves for internal use.
"""

import copy
import re
from typing import Any

from orchestrator.text.text_pieces import PieceEncoder, any_of

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"{_OPEN}([0-9]{{1,6}}){_CLOSE}")


class TextEncoder:
    """Makes token ids of texts."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a model's, by transformers."""
        self._pieces = PieceEncoder(tokenizer)
        self._plain = copy.deepcopy(tokenizer)  # split_special_tokens is a state of a tokenizer
        self._special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._pattern = any_of(self._special)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a user's text. add_special_tokens: whether the model's own are put around it."""
        return self._plain.encode(text, add_special_tokens=add_special_tokens, split_special_tokens=True)

    def mark(self, values: Any) -> Any:
        """Return a user's values for a template, with marks for special tokens in all strings."""
        if isinstance(values, str):
            return self._pattern.sub(lambda found: f"{_OPEN}{self._special.index(found[0])}{_CLOSE}", values)
        if isinstance(values, dict):
            return {key: self.mark(value) for key, value in values.items()}
        return [self.mark(value) for value in values] if isinstance(values, list) else values

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of a template's text. Marks become plain text, special tokens stay special tokens."""
        pieces = _MARK.split(text)  # texts, with the numbers of marks between them
        ids = self._pieces.encode(pieces[0])
        for number, piece in zip(map(int, pieces[1::2]), pieces[2::2], strict=True):
            if number < len(self._special):
                ids += self.encode(self._special[number], add_special_tokens=False)
            ids += self._pieces.encode(piece)
        return ids
