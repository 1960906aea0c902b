"""Terms of grammars in llguidance's dialect of Lark, spelled with a tokenizer's own tokens."""

import json
from typing import Any

from orchestrator.text.structured_outputs import COMPACT, WhiteSpace
from orchestrator.text.text_pieces import any_of

# White space between parts and before the end. It is bounded, since weak models might write it for ever.
GAP = r"/\s{0,8}/"


class Lark:
    """Writes terms of a grammar with a tokenizer's tokens."""

    def __init__(self, tokenizer: Any, white_space: WhiteSpace = COMPACT) -> None:
        """white_space: allowed in JSON."""
        self._tokenizer, self._white_space = tokenizer, white_space
        self._added = any_of(tokenizer.get_added_vocab())

    def has_token(self, text: str) -> bool:
        """Return whether a text is one token."""
        number = self._tokenizer.convert_tokens_to_ids(text)
        return number is not None and self._tokenizer.convert_ids_to_tokens(number) == text

    def first_token(self, text: str) -> str:
        """Return the added token that a text begins with, empty if there is none."""
        found = self._added.match(text)
        return found[0] if found else ""

    def marker(self, text: str) -> str:
        """Return a term for a mark that opens or closes a part: a token if it is one, else a text."""
        return f"<[{self._tokenizer.convert_tokens_to_ids(text)}]>" if self.has_token(text) else literal(text)

    def spell(self, text: str) -> str:
        """Return a term for a text, with added tokens as tokens; empty for an empty text."""
        terms, at = list[str](), 0
        for found in self._added.finditer(text):
            terms += [literal(text[at : found.start()]), self.marker(found[0])]
            at = found.end()
        return " ".join(term for term in [*terms, literal(text[at:])] if term != '""')

    def json(self, schema: dict[str, Any]) -> str:
        """Return a term for JSON of a schema."""
        return f"%json {json.dumps(schema | {'x-guidance': self._white_space})}"

    def before(self, marker: str, name: str, *but: str) -> tuple[str, str]:
        """Return a term for any text up to a marker, and the marker; and the rules that it refers to.

        The text may be empty. If the marker begins with a token, the text must not spell that token nor `but`. name: of
        the rules.
        """
        first = self.first_token(marker) or (marker if self.has_token(marker) else "")
        if first:
            rest = self.spell(marker[len(first) :])
            return f"({name.upper()}? {self.marker(first)} {rest})", any_text(name, first, *but)
        return name, f"{name}[lazy]: /(?s:.*){escaped(marker)}/\n"


def any_text(name: str, *but: str) -> str:
    """Return a rule for any text, not empty, without `but`. name: of the rule, which is in capitals."""
    without = (f" & ~/(?s:.*){escaped(each)}(?s:.*)/" for each in but)
    return f"{name.upper()}: /(?s:.+)/{''.join(without)}\n"


def literal(text: str) -> str:
    """Return a term for a text."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return a text as a part of a regular expression between slashes."""
    return "".join(f"\\{each}" if each in r"\/.[](){}|*+?^$" else each for each in text)
