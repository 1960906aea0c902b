"""From token ids that arrive a few at a time to text that can be shown: detokenization and stop strings."""

from dataclasses import dataclass, field
from typing import Any

_INCOMPLETE = "\ufffd"


@dataclass
class Detokenizer:
    """Gives out only whole characters: a character split over tokens waits for its last byte.

    Text is the difference of two decodings from a recent token on, so that a token's text may depend on the
    one before it (as in text-generation-inference's `decode_token`).
    """

    tokenizer: Any
    skip_special_tokens: bool = True
    tokens: list[int] = field(default_factory=list)
    _start: int = 0  # decode from here
    _shown: int = 0  # tokens whose text is out

    def push(self, tokens: list[int]) -> str:
        """Return the text that more tokens add to what is out."""
        if not tokens:
            return ""
        self.tokens += tokens
        shown, text = self._decode(self._start, self._shown), self._decode(self._start, len(self.tokens))
        if len(text) <= len(shown) or text.endswith(_INCOMPLETE):
            return ""
        self._start, self._shown = self._shown, len(self.tokens)
        return text[len(shown) :]

    def finish(self) -> str:
        """What is left, incomplete characters replaced."""
        shown, text = self._decode(self._start, self._shown), self._decode(self._start, len(self.tokens))
        self._shown = len(self.tokens)
        return text[len(shown) :]

    def _decode(self, start: int, end: int) -> str:
        return self.tokenizer.decode(
            self.tokens[start:end], skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )


@dataclass
class StopFinder:
    """Holds text back as long as it may be the beginning of a stop string, which is shown only if `include` is set."""

    stop: list[str]
    include: bool = False
    _held: str = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was met."""
        self._held += text
        # The one that is complete first counts, so that it does not matter how the text was cut.
        found = [(at + len(stop), at) for stop in self.stop if (at := self._held.find(stop)) >= 0]
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
