"""The grammar of a chat's answer: calls that are forced or strict, and a structure after the model's reasoning.

The result is a Lark grammar in llguidance's dialect, in which @body stands for the structure that the request gives.
"""

from orchestrator.requests.chat_request import ChatRequest
from orchestrator.text.call_styles import CallStyle, calls_rules, known_style
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
    reasoning, rules = _reasoning(prompt, form, lark)
    if style is not None:
        several = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, dict)
        rules += calls_rules(style, _schemas(request), several, lark)
    if request.must_call:
        return f"start: {reasoning}calls\n{rules}"
    if structure is not None:  # takes the place of the free text
        answer = "(calls | @body)" if style is not None else "@body"
        return f"start: {reasoning}{answer}\n{rules}" if style is not None or reasoning else ""
    assert style is not None
    free = any_text("free", style.trigger) if style.trigger else "FREE: /[^{\\s](?s:.*)/\n"
    return f"start: {reasoning}{'FREE? calls?' if style.trigger else '(calls | FREE)?'}\n{rules}{free}"


def _call_style(request: ChatRequest, form: ReplyFormat, lark: Lark) -> CallStyle | None:
    """Return the style of calls that are forced or strict, None where there are none.

    Strict tools are left to the model where the style is not known, or calls begin with a text that is not a token.
    Raises InvalidArgument for forced calls whose style is not known.
    """
    if not request.must_call and not request.has_strict_tools:
        return None
    try:
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
    """Return the term of the reasoning that comes first, and its rules; both are empty if the model does not reason."""
    if not form.reasoning:
        return "", ""
    thought, rules = lark.before("</think>", "thought")
    if form.thinks(prompt):
        return f"{thought} {GAP} ", rules
    return f"({lark.spell('<think>')} {thought} {GAP})? ", rules
