"""What a model has to write so that its tokenizer's own response template finds it: calls, reasoning, content.

A template says by which texts or patterns the parts of an answer are found. Of a pattern the simplest text is written
that it finds.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from re import _parser as patterns  # type: ignore[attr-defined]
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from orchestrator.text.lark import GAP, Lark, literal
from orchestrator.text.xml_calls import Schema, TagStyle, parameter_terms, rules_of
from specahead.wire.errors import InvalidArgument

Template = dict[str, Any]
_PLACE = "\0{}\0"  # of a pattern's group in the text that stands for the pattern
_DIALECTS = {"unquoted_keys", "string_delims"}  # of JSON, that no schema can be followed in


@dataclass(frozen=True)
class _Style:
    """How calls are written.

    opening: with the place of the name, if that is not a key of the content. keys: of name and arguments in the
    content, None where the content is the arguments. listed: whether all calls stand in one list. tags: how parameters
    are written that are no JSON.
    """

    opening: str
    closing: str
    keys: tuple[str, str] | None
    listed: bool
    repeats: bool
    tags: TagStyle | None


def own_calls(template: Template, tools: list[tuple[str, Schema]], several: bool, lark: Lark) -> str:
    """Return the Lark rules of `calls`: one call of a tool, or several if that is wanted and can be written.

    tools: their names, and the schemas of their arguments. Raises InvalidArgument for a template in which no call can
    be forced.
    """
    try:
        style = _style(_field(template, "tool_call") or {})
        for name, _ in tools:
            _check(template, style, name)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        message = f"tool_choice: the model's own response template has calls that cannot be forced: {error}"
        raise InvalidArgument(message, "tool_choice", "unsupported_value") from None
    terms = [_call(style, name, schema, lark) for name, schema in tools]
    rules = "".join(f"call_{i}: {term}\n" for i, term in enumerate(terms))
    rules += f"call: {' | '.join(f'call_{i}' for i in range(len(terms)))}\n"
    closing = lark.spell(style.closing)
    if style.listed:
        listed = 'call (", " call)*' if several else "call"
        return f'calls: {lark.spell(style.opening)} "[" {listed} "]" {closing} {GAP}\n{rules}'
    # A token that closes the last one may be the one that ends a text.
    end = f"({closing})?" if lark.has_token(style.closing) else closing
    more = f"({closing} {GAP} call)*" if several and style.repeats and closing else ""
    return f"calls: call {more} {end} {GAP}\n{rules}{rules_of(style.tags) if style.tags else ''}"


def reasoning_marks(template: Template) -> tuple[str, str] | None:
    """Return what opens and closes reasoning, None if there is none. Raises ValueError where that cannot be told."""
    field = _field(template, "reason") or _field(template, "think")
    return None if field is None else (_text_of(field, "open").strip(), _text_of(field, "close").strip())


def content_mark(template: Template) -> str:
    """Return what opens content, empty if nothing has to. Raises ValueError where that cannot be told."""
    return _text_of(_field(template, "content") or {}, "open")


def closing_tag(template: Template) -> str:
    """Return the tag that closes a call whose parameters are no JSON, empty if there is none or it is not known."""
    field = _field(template, "tool_call") or {}
    try:
        return ["", *_text_of(field, "close").split()][-1] if field.get("content") == "xml-inline" else ""
    except ValueError:
        return ""


def reasons_behind(template: Template, prompt: str) -> bool:
    """Return whether what follows a prompt begins with reasoning that was opened in it."""
    events = ResponseParser(template, prefix=prompt).initial_events
    return bool(events) and events[-1]["type"] != "region_close" and events[-1]["field"].startswith(("reason", "think"))


def _field(template: Template, name: str) -> dict[str, Any] | None:
    return next((field for key, field in template["fields"].items() if key.startswith(name)), None)


def _style(field: dict[str, Any]) -> _Style:
    """Return how the calls of a field are written. Raises ValueError, KeyError and the like where that is unknown."""
    kind, given = field.get("content", "text"), field.get("content_args", {})
    if kind not in ("json", "xml-inline") or _DIALECTS & set(given):
        raise ValueError(f"their arguments are {'a dialect of JSON' if kind == 'json' else kind}")
    transform, each = field.get("transform", "{content}"), bool(field.get("transform_each"))
    function: Any = transform.get("function", transform) if isinstance(transform, dict) else transform
    if function == "{content}":
        function = {"name": "{content.name}", "arguments": "{content.arguments}"}
    places = [function["name"], function.get("arguments", function.get("parameters"))]
    name, arguments = (place.strip("{}").removeprefix("content.") for place in places)
    in_content = each or places[0].startswith("{content.")
    if (arguments == "content") == in_content or "." in name + arguments or (kind != "json" and in_content):
        raise ValueError(f"its transform is {str(transform)[:200]}")
    tags = None
    if kind == "xml-inline":
        opening, rest = _simplest(given["tag_pattern"]).split(_PLACE.format("key"))
        middle, closing = rest.split(_PLACE.format("value"))
        tags = TagStyle(opening, middle, f"{closing}\n")
    opening = _text_of(field, "open").lstrip().replace(_PLACE.format(name), _PLACE.format("name"))
    keys = (name, arguments) if in_content else None
    return _Style(opening, _text_of(field, "close").rstrip(), keys, each, bool(field.get("repeats")), tags)


def _call(style: _Style, name: str, schema: Schema, lark: Lark) -> str:
    """Return the term of a call, up to what closes it."""
    opening = "" if style.listed else lark.spell(style.opening.replace(_PLACE.format("name"), name))
    if style.tags is not None:
        return f'{opening} "\\n" {parameter_terms(schema, style.tags, lark)}'
    arguments = lark.json({"type": "object"} | schema)
    if style.keys is not None:
        head = f"{{{json.dumps(style.keys[0])}: {json.dumps(name)}, {json.dumps(style.keys[1])}: "
        arguments = f'{literal(head)} {arguments} "}}"'
    return f"{opening} {arguments}" if style.listed else f'{opening} "\\n"? {arguments} "\\n"?'


def _check(template: Template, style: _Style, name: str) -> None:
    """Raise ValueError if a call that is written so is not found by the template."""
    content = "" if style.tags else "{}"
    if style.keys is not None:
        content = json.dumps({style.keys[0]: name, style.keys[1]: {}})
    content = f"[{content}]" if style.listed else content
    opening = style.opening.replace(_PLACE.format("name"), name)
    parser = ResponseParser(template, prefix="")
    events = parser.feed(f"{opening}{content}{style.closing}") + parser.finalize()[1]
    found = [event["value"] for event in events if event["type"] == "region_close" and "tool_call" in event["field"]]
    if len(found) != 1 or json.dumps(name) not in json.dumps(found):
        raise ValueError(f"it does not find {opening}{content}{style.closing!r}")


def _text_of(field: dict[str, Any], end: str) -> str:
    """Return a text that a field is opened or closed by, empty if there is none."""
    given = field.get(end, field.get(f"{end}_pattern", ""))
    return _simplest(given) if f"{end}_pattern" in field else given if isinstance(given, str) else given[0]


def _simplest(pattern: str) -> str:
    """Return the simplest text that a pattern finds, with the places of its named groups; a line's end where there may
    be white space. Raises ValueError for a pattern of which it is not known."""
    try:
        parsed = patterns.parse(pattern)
    except re.error as error:
        raise ValueError(f"its pattern {pattern!r}: {error}") from None
    names = {number: name for name, number in parsed.state.groupdict.items()}

    def write(parts: Any) -> str:
        return "".join(_WRITTEN.get(str(kind), _unknown)(value, write, names) for kind, value in parts)

    return write(parsed)


def _unknown(value: Any, *_: Any) -> str:
    raise ValueError(f"no text is known for a part of a pattern ({str(value)[:80]})")


def _write_repeat(value: Any, write: Callable[[Any], str], names: dict[int, str]) -> str:
    least, _, inner = value
    return write(inner) * least if least else "\n" if "CATEGORY_SPACE" in str(inner) and len(inner) == 1 else ""


def _write_group(value: Any, write: Callable[[Any], str], names: dict[int, str]) -> str:
    number, _, _, inner = value
    return _PLACE.format(names[number]) if number in names else write(inner)


_WRITTEN: dict[str, Callable[..., str]] = {
    "LITERAL": lambda value, write, names: chr(value),
    "SUBPATTERN": _write_group,
    "BRANCH": lambda value, write, names: write(value[1][0]),
    "MAX_REPEAT": _write_repeat,
    "MIN_REPEAT": _write_repeat,
    **dict.fromkeys(("AT", "ASSERT", "ASSERT_NOT"), lambda value, write, names: ""),
}
