"""Remembers the token ids of a prompt's pieces between special tokens, since the next turn of a chat has most of them.

A tokenizer cuts a text at its added tokens first, and encodes each piece by itself, so that the ids of the pieces are
together those of the text. Tokenizers that differ from this, by their kind or in a test with a sample text, have their
texts encoded whole.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock
from typing import Any

MOST_CHARACTERS = 1 << 25  # of all remembered pieces
LEAST_CHARACTERS = 256  # of a remembered piece; shorter ones are encoded as fast as found


class PieceEncoder:
    """Encodes texts, and remembers their latest pieces. May be called from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a model's, by transformers."""
        self._tokenizer = tokenizer
        # The first cut is at tokens that are not normalized. Tokens that are not special (Gemma has many, of spaces and
        # line ends) stay within pieces, and so do tokens that take the white space around them.
        added = {number: token for number, token in tokenizer.added_tokens_decoder.items() if not token.normalized}
        plain = {number: each for number, each in added.items() if not (each.lstrip or each.rstrip or each.single_word)}
        self._ids = {token.content: number for number, token in plain.items() if token.special}
        others = [token.content for token in added.values() if token.content not in self._ids]
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self._lock = Lock()
        self._cuts = any_of(self._ids)
        self.remembers = self._cuts_alone(others)
        """Whether pieces are encoded by themselves; otherwise texts are encoded whole."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it."""
        return self._encode_in_pieces(text) if self.remembers else self._encode(text)

    def _encode_in_pieces(self, text: str) -> list[int]:
        ids: list[int] = []
        for index, piece in enumerate(self._cuts.split(text)):  # pieces, with added tokens between them
            if index % 2:
                ids.append(self._ids[piece])
            elif len(piece) < LEAST_CHARACTERS:
                ids += self._encode(piece) if piece else []
            else:
                ids += self._remembered(piece)
        return ids

    def _remembered(self, piece: str) -> "array[int]":
        with self._lock:
            known = self._known.get(piece)
            if known is not None:
                self._known.move_to_end(piece)
                return known
        found = array("I", self._encode(piece))
        with self._lock:
            if piece not in self._known:
                self._known[piece] = found
                self._characters += len(piece)
            while self._characters > MOST_CHARACTERS:
                oldest, _ = self._known.popitem(last=False)
                self._characters -= len(oldest)
        return found

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _cuts_alone(self, others: list[str]) -> bool:
        """Return whether the tokenizer cuts texts as the pattern does, and encodes each piece by itself.

        others: tokens at which it cuts too.
        """
        if not self._ids or not getattr(self._tokenizer, "is_fast", False):
            return False
        meet = any(_overlap(token, other) for token in self._ids for other in (*self._ids, *others))
        if meet or any(token in other for token in self._ids for other in others):
            return False
        text = "".join(f" One{token}\n two {token}{token}three" for token in self._ids)
        text += "".join(f"{token} {other}" for token in list(self._ids)[:1] for other in others) + " four\n"
        return self._encode_in_pieces(text) == self._encode(text)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of any of these texts, the longest first, as a group; a pattern without matches for none."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True))) or '(?!)'})")


def _overlap(one: str, other: str) -> bool:
    """Return whether one of two different tokens may begin within the other and end after it."""
    return _begins_in(one, other) or _begins_in(other, one)


def _begins_in(token: str, other: str) -> bool:
    return token[0] in other[1:] and any(other[1:].endswith(token[:size]) for size in range(1, len(token)))
