"""Structural tags in XGrammar's format, as in vLLM: free text in which the parts between tags follow a structure.

They become a Lark grammar in llguidance's dialect, in which tags that are tokens of the model are tokens.
llguidance.StructTag knows triggered tags alone, and takes each tag between angle brackets for a token.
"""

import json
from typing import Any

from orchestrator.text.lark import Lark, any_text
from specahead.wire.errors import InvalidArgument

Format = dict[str, Any]


def tag_grammar(text: str, param: str, lark: Lark) -> str:
    """Return the Lark grammar of structural tags. text: their JSON, {format} or the older {structures, triggers}.

    Raises InvalidArgument, with the request's field `param`, for tags that are unknown or incomplete.
    """
    try:
        given = json.loads(text)
        form = given["format"] if "format" in given else _older(given)
        tags = _Tags(lark)
        return f"start: {tags.term(form)}\n{''.join(tags.rules)}"
    except KeyError as error:
        raise InvalidArgument(f"{param}: a structural tag lacks {error}", param) from None
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"{param}: not a structural tag: {error}", param) from None


def _older(given: Format) -> Format:
    """Return the older form as a format."""
    schemas = ((each, {"type": "json_schema", "json_schema": each["schema"]}) for each in given["structures"])
    tags = [{"begin": each["begin"], "content": schema, "end": each["end"]} for each, schema in schemas]
    return {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}


class _Tags:
    """Makes Lark terms of formats."""

    def __init__(self, lark: Lark) -> None:
        self._lark = lark
        self.rules: list[str] = []  # that the terms refer to

    def term(self, form: Format) -> str:
        """Return the term of a format."""
        match form["type"]:
            case "const_string":
                return self._lark.spell(form["value"])
            case "json_schema":
                schema = form["json_schema"]
                return self._lark.json({} if schema is True else schema)
            case "regex":
                return f"/{form['pattern'].replace('/', chr(92) + '/')}/"
            case "any_text":
                return self._text()
            case "sequence":
                return " ".join(self.term(each) for each in form["elements"])
            case "or":
                return f"({' | '.join(self.term(each) for each in form['elements'])})"
            case "tag":
                return self._tag(form, "")
            case "triggered_tags":
                return self._triggered(form)
            case "tags_with_separator":
                return self._separated(form)
            case other:
                known = "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags"
                raise ValueError(f"formats are {known} and tags_with_separator, got {str(other)[:80]!r}")

    def _tag(self, form: Format, trigger: str) -> str:
        """Return the term of the rest of a tag after its trigger, if it has one."""
        begin, ends, content = form["begin"][len(trigger) :], form["end"], form["content"]
        ends = [ends] if isinstance(ends, str) else ends
        if content["type"] == "any_text" and all(ends):
            return f"{self._lark.spell(begin)} ({' | '.join(map(self._before, ends))})"
        closings = " | ".join(self._lark.spell(end) for end in ends if end)
        closed = f"({closings}){'' if all(ends) else '?'}" if closings else ""
        return f"{self._lark.spell(begin)} {self.term(content)} {closed}"

    def _triggered(self, form: Format) -> str:
        """Return the term of free text in which each trigger must begin one of its tags."""
        triggers, of_trigger = form["triggers"], dict[str, list[str]]()
        for tag in form["tags"]:
            trigger = next((each for each in triggers if each and tag["begin"].startswith(each)), None)
            if trigger is None:
                raise ValueError(f"{tag['begin']!r} begins with none of the triggers {triggers}")
            trigger = max(trigger, self._lark.first_token(tag["begin"]), key=len)
            of_trigger.setdefault(trigger, []).append(self._tag(tag, trigger))
        parts = [f"{self._before(trigger, *triggers)} ({' | '.join(tags)})" for trigger, tags in of_trigger.items()]
        part, text = f"({' | '.join(parts)})", self._text(*triggers)
        if form.get("stop_after_first"):
            return part if form.get("at_least_one") else f"({part} | {text})"
        return f"{part}{'+' if form.get('at_least_one') else '*'} {text}"

    def _separated(self, form: Format) -> str:
        """Return the term of tags with a separator between them."""
        part = f"({' | '.join(self._tag(tag, '') for tag in form['tags'])})"
        listed = part if form.get("stop_after_first") else f"{part} ({self._lark.spell(form['separator'])} {part})*"
        return listed if form.get("at_least_one") else f"({listed})?"

    def _before(self, marker: str, *but: str) -> str:
        """Return the term of any text up to a marker, and the marker. Before a token, the text has none of `but`."""
        term, rules = self._lark.before(marker, f"before_{len(self.rules)}", *but)
        self.rules.append(rules)
        return term

    def _text(self, *but: str) -> str:
        """Return the term of any text without `but`; it may be empty."""
        name = f"TEXT_{len(self.rules)}"
        self.rules.append(any_text(name, *but))
        return f"{name}?"
