"""From token ids that arrive a few at a time to text that can be shown: detokenization and stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

_MOST_PENDING = 64  # tokens without text, after which their incomplete characters are shown as they are
_MOST_BYTES = 4  # of a character
_CONTEXT = 4  # tokens before, on which the text of a token may depend


class Detokenizer:
    """Passes on whole characters only: a character that is split over tokens waits for its last byte."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, before: Sequence[int] = ()) -> None:
        """tokenizer: a model's, by transformers. before: the tokens that the text continues.

        Some tokenizers leave out the space before the first word of a text, but not before one that continues it.
        """
        self._tokenizer, self._skip = tokenizer.backend_tokenizer, skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._context: list[int] = []  # the last tokens whose text was passed on
        self._pending: list[int] = []  # the tokens after them
        self.push(self._end_of(before))  # whose text is shown already

    def push(self, tokens: list[int]) -> str:
        """Return the text that more tokens add. It does not depend on how they are cut into pushes."""
        return "".join(map(self._push, tokens))

    def _push(self, token: int) -> str:
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # of tokenizers, whose decoder now shows the bytes before this token in another way
            return self.finish()
        if text is None:  # without this bound each token would have all pending ones decoded again
            return self.finish() if len(self._pending) >= _MOST_PENDING else ""
        self._context, self._pending = self._pending[-_CONTEXT:], []
        return text

    def finish(self) -> str:
        """Return the rest, with replacement characters for incomplete ones, and begin a new stream after it."""
        before, together = self._decode(self._context), self._decode(self._context + self._pending)
        text = together[len(before) :] if together.startswith(before) else self._decode(self._pending)
        if text:  # special tokens that are not shown have none
            self._context = self._pending[-_CONTEXT:]
        self._pending, self._stream = [], DecodeStream(self._context, self._skip)
        return text

    def _end_of(self, before: Sequence[int]) -> list[int]:
        """Return the last tokens of a text, from one on with which a character begins; none if there is no such token.

        Where bytes are tokens, decoders show a part of a character and all bytes behind it as replacement characters.
        """
        for count in range(_CONTEXT, _CONTEXT + _MOST_BYTES):
            last = list(before[-count:])
            beginnings = (self._decode(last[:size]) for size in range(1, _MOST_BYTES + 1))
            if count >= len(before) or any("\ufffd" not in text for text in beginnings):
                return last
        return []

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text


@dataclass
class StopFinder:
    """Holds text back while it may begin a stop string."""

    stop: list[str]
    include: bool = False
    """Whether the stop string itself is shown."""
    found: str = ""
    """The stop string that has ended the text."""
    _held: str = ""

    def push(self, text: str, ends: bool = True) -> tuple[str, bool]:
        """Return the text that may be shown now, and whether it ends at a stop string.

        ends: whether a stop string may end in `text`; else it may only begin there.
        """
        before = len(self._held)
        self._held += text
        places = [(self._held.find(stop, max(0, before + 1 - len(stop))), stop) for stop in self.stop if ends]
        # The one that is complete first counts, so that the result does not depend on how the text was cut.
        found = [(at + len(stop), at, stop) for at, stop in places if at >= 0]
        if found:
            end, begin, self.found = min(found)
            shown, self._held = self._held[: end if self.include else begin], ""
            return shown, True
        keep = max((self._overlap(stop) for stop in self.stop), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)
