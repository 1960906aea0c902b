"""From token ids that arrive a few at a time to text that can be shown: detokenization and stop strings."""

from dataclasses import dataclass, field
from typing import Any

_INCOMPLETE = "\ufffd"
_MOST_PENDING = 16  # tokens: a character has at most four bytes, and a token at least one
_KEPT = 8  # of these tokens, more than a character is split over


@dataclass
class Detokenizer:
    """Gives out only whole characters: a character split over tokens waits for its last byte.

    A token's text may depend on the tokens before it, so it is what decoding a window of the last ones adds to the text
    of this window so far. The window begins where the last whole characters began; where nothing becomes whole it is
    cut, so that a token takes no longer for that.
    """

    tokenizer: Any
    skip_special_tokens: bool = True
    _window: list[int] = field(default_factory=list)
    _pending: int = 0  # the last tokens of the window, whose text was not whole before them
    _shown: str = ""  # what is out of the window's text

    def push(self, tokens: list[int]) -> str:
        """Return the text that more tokens add to what is out. It does not depend on how they are cut into pushes."""
        return "".join(self._push(tokens[at : at + _MOST_PENDING]) for at in range(0, len(tokens), _MOST_PENDING))

    def finish(self) -> str:
        """Return what is left, incomplete characters replaced."""
        text, shown = self._decode(self._window), self._shown
        self._shown = text
        return text[len(shown) :]

    def _push(self, tokens: list[int]) -> str:
        text = self._decode(self._window + tokens)
        if len(tokens) > 1 and (_INCOMPLETE in text or text == self._shown):
            return "".join(self._push([token]) for token in tokens)
        self._window += tokens
        self._pending += len(tokens)
        if not text.startswith(self._shown):
            # Of bytes side by side some decoders show none if the last ones are incomplete: those begin a window.
            self._window, self._pending, self._shown = tokens[:], len(tokens), ""
            text = self._decode(tokens)
        whole = text.rstrip(_INCOMPLETE)
        if whole != text:
            return self._show_incomplete(text) if self._pending >= _MOST_PENDING else self._show(whole)
        if text == self._shown:  # a token without text, such as a special one; or a first space that is left out
            if self._pending < len(self._window) or self._pending > _MOST_PENDING:
                self._window.pop()
                self._pending -= 1
            return ""
        added = self._show(text)
        self._window, self._pending = self._window[-self._pending :], 0
        self._shown = self._decode(self._window)
        return added

    def _show(self, text: str) -> str:
        """Return what a text adds to the window's that is out, and count it as shown."""
        added = text[len(self._shown) :]
        self._shown += added
        return added

    def _show_incomplete(self, text: str) -> str:
        """Return all that a text adds but its last character, which may become whole; of the window, keep the end."""
        self._window = self._window[-_KEPT:]
        self._pending = len(self._window)
        end = self._decode(self._window)
        held = end.endswith(_INCOMPLETE)  # else no token that is kept has text
        added = text[len(self._shown) : len(text) - held]
        self._shown = end[: len(end) - held]
        return added

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


@dataclass
class StopFinder:
    """Holds text back as long as it may be the beginning of a stop string, which is shown only if `include` is set."""

    stop: list[str]
    include: bool = False
    _held: str = ""

    def push(self, text: str, ends: bool = True) -> tuple[str, bool]:
        """Return the text that may be shown now, and whether a stop string was met.

        ends: whether a stop string may end in the text; else it may only begin there.
        """
        before = len(self._held)
        self._held += text
        places = [(self._held.find(stop, max(0, before + 1 - len(stop))), stop) for stop in self.stop if ends]
        # The one that is complete first counts, so that it does not matter how the text was cut.
        found = [(at + len(stop), at) for at, stop in places if at >= 0]
        if found:
            end, begin = min(found)
            shown, self._held = self._held[: end if self.include else begin], ""
            return shown, True
        keep = max((self._overlap(stop) for stop in self.stop), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)
