"""How models write tool calls, and the Lark grammar of calls whose arguments follow their schemas."""

import json
from dataclasses import dataclass, replace

from orchestrator.text.lark import GAP, Lark, literal
from orchestrator.text.xml_calls import PARAMETER_RULES, Schema, parameter_terms, tag_name

NAME = "\0name\0"  # the place of the function's name in CallStyle.opening


@dataclass(frozen=True)
class CallStyle:
    """How a model writes calls."""

    opening: str
    """The text before a call, with NAME in it if `keys` is None; in a list, the text before the list."""
    closing: str = ""
    """The text after a call or a list of calls."""
    keys: tuple[str, str] | None = None
    """The JSON keys of name and arguments; None where the call's JSON is the arguments alone."""
    in_tags: bool = False
    """Whether parameters stand one by one between tags, not in JSON."""
    is_list: bool = False
    """Whether all calls stand in one JSON list."""
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
        f"<tool_call>\n<function={NAME}>", "</function>\n</tool_call>", in_tags=True, trigger="<tool_call>"
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
    more = f"({closing} {style.separator} call)*" if several else ""
    return f"calls: call {more} {end} {GAP}\n{rules}{PARAMETER_RULES if style.in_tags else ''}"


def _call(style: CallStyle, name: str, schema: Schema | None, lark: Lark) -> str:
    """Return the Lark term of a call, up to what closes it."""
    opening = (
        "" if style.is_list else lark.spell(style.opening.replace(NAME, tag_name(name) if style.in_tags else name))
    )
    if style.in_tags:
        return f'{opening} "\\n" {parameter_terms(schema, lark)}'
    arguments = lark.json({"type": "object"} | (schema or {}))
    if style.keys is not None:
        head = f"{{{json.dumps(style.keys[0])}: {json.dumps(name)}, {json.dumps(style.keys[1])}: "
        arguments = f'{literal(head)} {arguments} "}}"'
    return f'{opening} "\\n"? {arguments} "\\n"?' if opening else arguments
