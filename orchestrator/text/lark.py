"""Terms of grammars in llguidance's dialect of Lark, spelled with a tokenizer's own tokens."""

import json
import re
from typing import Any

from orchestrator.text.structured_outputs import COMPACT, WhiteSpace

# White space between parts and before the end, with a bound: a weak model might write it for ever.
GAP = r"/\s{0,8}/"


class Lark:
    """Writes terms of a grammar for a tokenizer's tokens. white_space: what JSON may have."""

    def __init__(self, tokenizer: Any, white_space: WhiteSpace = COMPACT) -> None:
        self._tokenizer, self._white_space = tokenizer, white_space
        added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added))) if added else None

    def has_token(self, text: str) -> bool:
        """Return whether a text is one token."""
        number = self._tokenizer.convert_tokens_to_ids(text)
        return number is not None and self._tokenizer.convert_ids_to_tokens(number) == text

    def first_token(self, text: str) -> str:
        """Return the token, of those that were added to the vocabulary, that a text begins with; empty if none."""
        found = self._added.match(text) if self._added else None
        return found[0] if found else ""

    def marker(self, text: str) -> str:
        """Return a term for what opens or closes a part: a token where it is one, else a text."""
        return f"<[{self._tokenizer.convert_tokens_to_ids(text)}]>" if self.has_token(text) else literal(text)

    def spell(self, text: str) -> str:
        """Return a term for a text in which the tokens that were added to the vocabulary are tokens; empty for none."""
        terms, at = list[str](), 0
        for found in self._added.finditer(text) if self._added else ():
            terms += [literal(text[at : found.start()]), self.marker(found[0])]
            at = found.end()
        return " ".join(term for term in [*terms, literal(text[at:])] if term != '""')

    def json(self, schema: dict[str, Any]) -> str:
        """Return a term for JSON of a schema."""
        return f"%json {json.dumps(schema | {'x-guidance': self._white_space})}"

    def before(self, marker: str, name: str, *but: str) -> tuple[str, str]:
        """Return a term for any text up to a marker and the marker, and the rules that define it.

        The text may be empty. name: of the rules. A marker that begins with a token is told from text by that; what the
        text must not spell is then the token, and what `but` says.
        """
        first = self.first_token(marker) or (marker if self.has_token(marker) else "")
        if first:
            rest = self.spell(marker[len(first) :])
            return f"({name.upper()}? {self.marker(first)} {rest})", any_text(name, first, *but)
        return name, f"{name}[lazy]: /(?s:.*){escaped(marker)}/\n"


def any_text(name: str, *but: str) -> str:
    """Return a rule of that name, in capitals, for any text, not empty, that spells none of `but`."""
    without = (f" & ~/(?s:.*){escaped(each)}(?s:.*)/" for each in but)
    return f"{name.upper()}: /(?s:.+)/{''.join(without)}\n"


def literal(text: str) -> str:
    """Return a term for a text."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return a text as a part of a regular expression between slashes."""
    return "".join(f"\\{each}" if each in r"\/.[](){}|*+?^$" else each for each in text)
