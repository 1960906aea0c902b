"""What the text of a chat must follow: calls that are forced or strict, and a structure behind the model's reasoning.

The result is a Lark grammar in llguidance's dialect, in which @body stands for the structure that the request gives.
"""

import json
from typing import Any

from orchestrator.requests.chat_request import ChatRequest, Tool
from orchestrator.text.lark import GAP, Lark, any_text, literal
from orchestrator.text.replies import ReplyFormat
from orchestrator.text.response_templates import content_mark, own_calls, reasoning_marks, reasons_behind
from orchestrator.text.xml_calls import QWEN, call_body, rules_of
from specahead.wire.errors import InvalidArgument

# How calls are written, for which a grammar can be made: what opens each, stands around its arguments,
# closes it, and the term of what separates two.
_JSON_CALLS = {
    "hermes": ("<tool_call>", '\n{"name": NAME, "arguments": ', "}\n", "</tool_call>", GAP),
    "llama3_json": ("", '{"name": NAME, "parameters": ', "}", "", '"; "'),
    "mistral": ("", '{"name": NAME, "arguments": ', "}", "", '", "'),
}


_OPENINGS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "qwen3_coder": "<tool_call>"}


def chat_grammar(request: ChatRequest, prompt: str, form: ReplyFormat, lark: Lark) -> str:
    """Return the Lark grammar of a chat's text, empty where that is free or @body alone.

    prompt: its text. Raises InvalidArgument for what cannot be followed in the format that the model writes.
    """
    structure = request.structure
    calls = _calls_grammar(request, form, lark) if request.must_call or request.has_strict_tools else ""
    if not calls and structure is None:
        return ""
    try:
        reasoning, rules = _reasoning(prompt, form, lark)
        opening = lark.spell(content_mark(form.own)) if form.own is not None and structure is not None else ""
    except ValueError as error:
        message = f"nothing can be put behind what the model's own response template says: {error}"
        raise InvalidArgument(message, structure.param if structure else "tool_choice", "unsupported_value") from None
    if request.must_call:
        return f"start: {reasoning}calls\n{rules}{calls}"
    if structure is not None:  # in place of the free text beside calls
        answer = "(calls | @body)" if calls else f"{opening} @body"
        return f"start: {reasoning}{answer}\n{rules}{calls}" if calls or reasoning or opening else ""
    return f"start: {reasoning}{_FREE[form.tools][0]}\n{rules}{calls}{_FREE[form.tools][1]}"


def _reasoning(prompt: str, form: ReplyFormat, lark: Lark) -> tuple[str, str]:
    """Return a term for the reasoning that goes first, and its rules; both empty if the model does not reason.

    Raises ValueError where an own response template does not tell what opens and closes it.
    """
    marks = ("<think>", "</think>") if form.reasoning else None
    if form.own is not None:
        marks = reasoning_marks(form.own)
    if marks is None:
        return "", ""
    thought, rules = lark.before(marks[1], "thought")
    if form.thinks(prompt) if form.own is None else reasons_behind(form.own, prompt):
        return f"{thought} {GAP} ", rules
    return f"({lark.spell(marks[0])} {thought} {GAP})? ", rules


# Calls.


def _calls_grammar(request: ChatRequest, form: ReplyFormat, lark: Lark) -> str:
    """Return the rules of `calls`: one call of a tool that may be called, or several; one alone where the request
    names it. Empty where none can be made.

    Strict tools are left to the model where it writes another format, or opens calls by text that is no token.

    Raises InvalidArgument if calls are forced in a format whose grammar is not known.
    """
    several = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, dict)
    if form.own is not None and request.must_call:
        functions = (tool.function for tool in request.callable_tools)
        return own_calls(form.own, [(each.name, each.parameters or {}) for each in functions], several, lark)
    known_format = form.own is None and (form.tools in _JSON_CALLS or form.tools == "qwen3_coder")
    opened_by = _OPENINGS.get(form.tools, "")
    if not request.must_call and not (known_format and (not opened_by or lark.has_token(opened_by))):
        return ""
    if not known_format:
        known = ", ".join([*_JSON_CALLS, "qwen3_coder"])
        message = f"tool_choice: calls can be forced in the formats {known}; the model writes {form.tools or 'none'}"
        raise InvalidArgument(message, "tool_choice", "unsupported_value")
    calls = [_call(request, tool, form, lark) for tool in request.callable_tools]
    rules = f"call: {' | '.join(f'call_{i}' for i in range(len(calls)))}\n"
    rules += "".join(f"call_{i}: {call}\n" for i, call in enumerate(calls))
    return f"calls: {_sequence(form, several, lark)}\n{rules}{rules_of(QWEN) if form.tools == 'qwen3_coder' else ''}"


def _call(request: ChatRequest, tool: Tool, form: ReplyFormat, lark: Lark) -> str:
    """Return a term for a call of a tool."""
    name = tool.function.name
    if form.tools == "qwen3_coder":
        parameters = tool.function.parameters if _follows_schema(request, tool) else None
        return f"{lark.marker('<tool_call>')} {call_body(name, parameters, lark)} {lark.marker('</tool_call>')}"
    arguments = _arguments(request, tool, lark)
    if _has_arguments_marked(form, lark):
        return f"{lark.marker('[TOOL_CALLS]')} {literal(name)} {lark.marker('[ARGS]')} {arguments}"
    opening, before, after, closing, _ = _JSON_CALLS[form.tools]
    marks = [lark.marker(mark) if mark else "" for mark in (opening, closing)]
    head = literal(before.replace("NAME", json.dumps(name)))
    return f"{marks[0]} {head} {arguments} {literal(after)} {marks[1]}"


def _sequence(form: ReplyFormat, several: bool, lark: Lark) -> str:
    """Return a term for one `call`, or for one or several; white space may follow the last one."""
    marked = form.tools == "qwen3_coder" or _has_arguments_marked(form, lark)
    between = GAP if marked else _JSON_CALLS[form.tools][-1]
    listed = f"call ({between} call)*" if several else "call"
    if form.tools == "mistral" and not marked:
        listed = f'{lark.marker("[TOOL_CALLS]")} " "? "[" {listed} "]"'
    return f"{listed} {GAP}"


def _has_arguments_marked(form: ReplyFormat, lark: Lark) -> bool:
    """Return whether a model writes calls as later ones of Mistral's do, each behind a mark of its own."""
    return form.tools == "mistral" and lark.has_token("[ARGS]")


def _follows_schema(request: ChatRequest, tool: Tool) -> bool:
    """Return whether the arguments of a tool's call must be of its schema."""
    return request.must_call or bool(tool.function.strict)


def _arguments(request: ChatRequest, tool: Tool, lark: Lark) -> str:
    """Return a term for the arguments of a tool's call: by its schema if calls are forced or the tool is strict."""
    schema: dict[str, Any] = {"type": "object"}
    if _follows_schema(request, tool):
        schema |= tool.function.parameters or {}
    return lark.json(schema)


# Free text in which calls may begin, by format: a term and its rules. A call of Llama's is all that there is.
_FREE = {name: ("FREE? calls?", any_text("free", opening)) for name, opening in _OPENINGS.items()} | {
    "llama3_json": ("(calls | FREE)?", "FREE: /[^{\\s](?s:.*)/\n")
}
