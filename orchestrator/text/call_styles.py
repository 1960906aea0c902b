"""How models write tool calls, and the Lark grammar of calls whose arguments follow their schemas.

The styles of the known formats are listed here. The style of a tokenizer's own response template is read off that
template, which says by which texts or patterns the parts of a call are found: each pattern becomes the simplest text
that it matches.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from re import _parser as patterns  # type: ignore[attr-defined]
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from orchestrator.text.lark import GAP, Lark, literal
from orchestrator.text.xml_calls import QWEN, Schema, TagStyle, parameter_rules, parameter_terms, tag_name

Template = dict[str, Any]
NAME = "\0name\0"  # the place of the function's name in CallStyle.opening
_OTHER_JSON = {"unquoted_keys", "string_delims"}  # dialects of JSON for which llguidance has no schemas


@dataclass(frozen=True)
class CallStyle:
    """How a model writes calls."""

    opening: str
    """The text before a call, with NAME in it if `keys` is None; in a list, the text before the list."""
    closing: str = ""
    """The text after a call or a list of calls."""
    keys: tuple[str, str] | None = None
    """The JSON keys of name and arguments; None where the call's JSON is the arguments alone."""
    tags: TagStyle | None = None
    """How parameters are written that are not JSON."""
    is_list: bool = False
    """Whether all calls stand in one JSON list."""
    repeats: bool = True
    """Whether several calls may follow each other."""
    separator: str = GAP
    """The Lark term between two calls."""
    trigger: str = ""
    """The token that begins a call within free text; empty where calls are all of an answer."""


_NAME_AND_ARGUMENTS = ("name", "arguments")
_STYLES = {
    "hermes": CallStyle("<tool_call>", "</tool_call>", _NAME_AND_ARGUMENTS, trigger="<tool_call>"),
    "llama3_json": CallStyle("", "", ("name", "parameters"), separator='"; "'),
    "mistral": CallStyle("[TOOL_CALLS]", "", _NAME_AND_ARGUMENTS, is_list=True, trigger="[TOOL_CALLS]"),
    "qwen3_coder": CallStyle(
        f"<tool_call>\n<function={NAME}>", "</function>\n</tool_call>", tags=QWEN, trigger="<tool_call>"
    ),
}


def known_style(tools: str, lark: Lark) -> CallStyle:
    """Return the style of a tool format. Raises ValueError for an unknown format."""
    if tools not in _STYLES:
        raise ValueError(f"calls can be forced in the formats {', '.join(_STYLES)}; the model writes {tools or 'none'}")
    style = _STYLES[tools]
    if tools == "mistral" and lark.has_token("[ARGS]"):  # later models put a mark before each call
        return replace(style, opening=f"[TOOL_CALLS]{NAME}[ARGS]", keys=None, is_list=False)
    return style


def calls_rules(style: CallStyle, tools: list[tuple[str, Schema | None]], several: bool, lark: Lark) -> str:
    """Return the Lark rules of `calls`: one call of one of the tools or, if `several`, one or more.

    tools: each tool's name and the schema of its arguments, None where they may be any. White space may follow the
    last call. Raises InvalidArgument for names that cannot stand in a tag.
    """
    terms = [_call(style, name, schema, lark) for name, schema in tools]
    rules = "".join(f"call_{i}: {term}\n" for i, term in enumerate(terms))
    rules += f"call: {' | '.join(f'call_{i}' for i in range(len(terms)))}\n"
    closing = lark.spell(style.closing)
    if style.is_list:
        listed = 'call (", " call)*' if several else "call"
        return f'calls: {lark.spell(style.opening)} " "? "[" {listed} "]" {closing} {GAP}\n{rules}'
    # A token that closes the last call may be the one that ends the text, which is not part of it.
    end = f"({closing})?" if lark.has_token(style.closing) else closing
    more = f"({closing} {style.separator} call)*" if several and style.repeats else ""
    return f"calls: call {more} {end} {GAP}\n{rules}{parameter_rules(style.tags) if style.tags else ''}"


def _call(style: CallStyle, name: str, schema: Schema | None, lark: Lark) -> str:
    """Return the Lark term of a call, up to what closes it."""
    opening = "" if style.is_list else lark.spell(style.opening.replace(NAME, tag_name(name) if style.tags else name))
    if style.tags is not None:
        return f'{opening} "\\n" {parameter_terms(schema, style.tags, lark)}'
    arguments = lark.json({"type": "object"} | (schema or {}))
    if style.keys is not None:
        head = f"{{{json.dumps(style.keys[0])}: {json.dumps(name)}, {json.dumps(style.keys[1])}: "
        arguments = f'{literal(head)} {arguments} "}}"'
    return f'{opening} "\\n"? {arguments} "\\n"?' if opening else arguments


# A tokenizer's own response template.


def own_style(template: Template, names: list[str]) -> CallStyle:
    """Return the style of a response template, tried with the names of some tools.

    Raises ValueError for a template in which calls cannot be forced.
    """
    try:
        style = _style(_field(template, "tool_call") or {})
        for name in names:
            _check(template, style, name)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"the model's own response template has calls that cannot be forced: {error}") from None
    return style


def reasoning_marks(template: Template) -> tuple[str, str] | None:
    """Return the texts that open and close reasoning, None if there is none. Raises ValueError if they are unknown."""
    field = _field(template, "reason") or _field(template, "think")
    return None if field is None else (_text_of(field, "open").strip(), _text_of(field, "close").strip())


def content_mark(template: Template) -> str:
    """Return the text that opens content, empty if nothing has to. Raises ValueError if it is unknown."""
    return _text_of(_field(template, "content") or {}, "open")


def closing_tag(template: Template) -> str:
    """Return the tag that closes a call whose parameters are not JSON, empty if there is none or it is unknown."""
    field = _field(template, "tool_call") or {}
    try:
        return ["", *_text_of(field, "close").split()][-1] if field.get("content") == "xml-inline" else ""
    except ValueError:
        return ""


def begins_with_reasoning(template: Template, prompt: str) -> bool:
    """Return whether the prompt has opened reasoning, so that an answer begins with it."""
    events = ResponseParser(template, prefix=prompt).initial_events
    return bool(events) and events[-1]["type"] != "region_close" and events[-1]["field"].startswith(("reason", "think"))


def _field(template: Template, name: str) -> dict[str, Any] | None:
    return next((field for key, field in template["fields"].items() if key.startswith(name)), None)


def _style(field: dict[str, Any]) -> CallStyle:
    """Return how the calls of a field are written. Raises ValueError, KeyError and the like where that is unknown."""
    kind, given = field.get("content", "text"), field.get("content_args", {})
    if kind not in ("json", "xml-inline") or _OTHER_JSON & set(given):
        raise ValueError(f"their arguments are {'a dialect of JSON' if kind == 'json' else kind}")
    transform, is_list = field.get("transform", "{content}"), bool(field.get("transform_each"))
    function: Any = transform.get("function", transform) if isinstance(transform, dict) else transform
    if function == "{content}":
        function = {"name": "{content.name}", "arguments": "{content.arguments}"}
    places = [function["name"], function.get("arguments", function.get("parameters"))]
    name, arguments = (place.strip("{}").removeprefix("content.") for place in places)
    in_content = is_list or places[0].startswith("{content.")
    if (arguments == "content") == in_content or "." in name + arguments or (kind != "json" and in_content):
        raise ValueError(f"its transform is {str(transform)[:200]}")
    tags = None
    if kind == "xml-inline":
        before_key, rest = _simplest(given["tag_pattern"]).split("\0key\0")
        before_value, after_value = rest.split("\0value\0")
        tags = TagStyle(before_key, before_value, f"{after_value}\n")
    return CallStyle(
        _text_of(field, "open").lstrip().replace(f"\0{name}\0", NAME),
        _text_of(field, "close").rstrip(),
        (name, arguments) if in_content else None,
        tags,
        is_list,
        repeats=bool(field.get("repeats") and _text_of(field, "close").rstrip()),
    )


def _check(template: Template, style: CallStyle, name: str) -> None:
    """Raise ValueError if the template does not find a call that is written in the style."""
    content = "" if style.tags else "{}"
    if style.keys is not None:
        content = json.dumps({style.keys[0]: name, style.keys[1]: {}})
    content = f"[{content}]" if style.is_list else content
    text = style.opening.replace(NAME, name) + content + style.closing
    parser = ResponseParser(template, prefix="")
    events = parser.feed(text) + parser.finalize()[1]
    found = [event["value"] for event in events if event["type"] == "region_close" and "tool_call" in event["field"]]
    if len(found) != 1 or json.dumps(name) not in json.dumps(found):
        raise ValueError(f"it does not find {text!r}")


def _text_of(field: dict[str, Any], end: str) -> str:
    """Return a text that opens or closes a field, empty if there is none. end: `open` or `close`."""
    if f"{end}_pattern" in field:
        return _simplest(field[f"{end}_pattern"])
    given = field.get(end, "")
    return given if isinstance(given, str) else given[0]


def _simplest(pattern: str) -> str:
    """Return the simplest text that a pattern matches, with \\0 around the names of its groups.

    White space that may be left out becomes the end of a line. Raises ValueError for a pattern that is not understood.
    """
    try:
        parsed = patterns.parse(pattern)
    except re.error as error:
        raise ValueError(f"its pattern {pattern!r}: {error}") from None
    names = {number: name for name, number in parsed.state.groupdict.items()}

    def write(parts: Any) -> str:
        return "".join(_WRITERS.get(str(kind), _unknown)(value, write, names) for kind, value in parts)

    return write(parsed)


def _unknown(value: Any, *_: Any) -> str:
    raise ValueError(f"no text is known for a part of a pattern ({str(value)[:80]})")


def _write_repeat(value: Any, write: Callable[[Any], str], names: dict[int, str]) -> str:
    least, _, inner = value
    if least:
        return write(inner) * least
    return "\n" if "CATEGORY_SPACE" in str(inner) and len(inner) == 1 else ""


def _write_group(value: Any, write: Callable[[Any], str], names: dict[int, str]) -> str:
    number, _, _, inner = value
    return f"\0{names[number]}\0" if number in names else write(inner)


_WRITERS: dict[str, Callable[..., str]] = {
    "LITERAL": lambda value, write, names: chr(value),
    "SUBPATTERN": _write_group,
    "BRANCH": lambda value, write, names: write(value[1][0]),
    "MAX_REPEAT": _write_repeat,
    "MIN_REPEAT": _write_repeat,
    **dict.fromkeys(("AT", "ASSERT", "ASSERT_NOT"), lambda value, write, names: ""),
}
