"""The grammar of a chat's answer: calls that are forced or strict, and a structure after the model's reasoning.

The result is a Lark grammar in llguidance's dialect, in which @body stands for the structure that the request gives.
"""

from orchestrator.requests.chat_request import ChatRequest
from orchestrator.text.call_styles import (
    CallStyle,
    begins_with_reasoning,
    calls_rules,
    content_mark,
    known_style,
    own_style,
    reasoning_marks,
)
from orchestrator.text.lark import GAP, Lark, any_text
from orchestrator.text.replies import ReplyFormat
from orchestrator.text.xml_calls import Schema
from specahead.wire.errors import InvalidArgument


def chat_grammar(request: ChatRequest, prompt: str, form: ReplyFormat, lark: Lark) -> str:
    """Return the Lark grammar of a chat's answer, empty where that is free text or @body alone.

    prompt: its text. Raises InvalidArgument where the model's format of answers has no such grammar.
    """
    structure = request.structure
    style = _call_style(request, form, lark)
    if style is None and structure is None:
        return ""
    try:
        reasoning, rules = _reasoning(prompt, form, lark)
        opening = lark.spell(content_mark(form.own)) if form.own is not None and structure is not None else ""
    except ValueError as error:
        message = f"a grammar needs the marks of the model's own response template: {error}"
        raise InvalidArgument(message, structure.param if structure else "tool_choice", "unsupported_value") from None
    if style is not None:
        several = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, dict)
        rules += calls_rules(style, _schemas(request), several, lark)
    if request.must_call:
        return f"start: {reasoning}calls\n{rules}"
    if structure is not None:  # takes the place of the free text
        answer = "(calls | @body)" if style is not None else f"{opening} @body"
        return f"start: {reasoning}{answer}\n{rules}" if style is not None or reasoning or opening else ""
    assert style is not None
    free = any_text("free", style.trigger) if style.trigger else "FREE: /[^{\\s](?s:.*)/\n"
    return f"start: {reasoning}{'FREE? calls?' if style.trigger else '(calls | FREE)?'}\n{rules}{free}"


def _call_style(request: ChatRequest, form: ReplyFormat, lark: Lark) -> CallStyle | None:
    """Return the style of calls that are forced or strict, None where there are none.

    Strict tools are left to the model where the style is not known, or calls begin with a text that is not a token.
    Raises InvalidArgument for forced calls whose style is not known.
    """
    if not request.must_call and not (request.has_strict_tools and form.own is None):
        return None
    try:
        if form.own is not None:
            return own_style(form.own, [tool.function.name for tool in request.callable_tools])
        style = known_style(form.tools, lark)
    except ValueError as error:
        if not request.must_call:
            return None
        raise InvalidArgument(f"tool_choice: {error}", "tool_choice", "unsupported_value") from None
    can_be_strict = not style.trigger or lark.has_token(style.trigger)
    return style if request.must_call or can_be_strict else None


def _schemas(request: ChatRequest) -> list[tuple[str, Schema | None]]:
    """Return the name of each tool that may be called, and the schema that its arguments must follow."""
    return [
        (tool.function.name, tool.function.parameters if request.must_call or tool.function.strict else None)
        for tool in request.callable_tools
    ]


def _reasoning(prompt: str, form: ReplyFormat, lark: Lark) -> tuple[str, str]:
    """Return the term of the reasoning that comes first, and its rules; both are empty if the model does not reason.

    Raises ValueError if a tokenizer's own response template does not say what opens and closes reasoning.
    """
    marks = ("<think>", "</think>") if form.reasoning else None
    if form.own is not None:
        marks = reasoning_marks(form.own)
    if marks is None:
        return "", ""
    thought, rules = lark.before(marks[1], "thought")
    if form.thinks(prompt) if form.own is None else begins_with_reasoning(form.own, prompt):
        return f"{thought} {GAP} ", rules
    return f"({lark.spell(marks[0])} {thought} {GAP})? ", rules
