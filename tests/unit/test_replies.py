"""What models write, split into content, reasoning and calls: the same however the text is cut."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from config.sections import REASONING_PARSERS, TOOL_CALL_PARSERS
from orchestrator.replies import TOOL_FORMATS, ReplyFormat, find_format

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
]
THINKS = ReplyFormat(reasoning="qwen3")


def split(form: ReplyFormat, text: str, size: int, prompt: str = "", tools: Any = TOOLS) -> tuple[str, str, list[Any]]:
    """Return content, reasoning, and the calls as (name, arguments)."""
    parser = form.parser(prompt, tools)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    deltas = [delta for i, piece in enumerate(pieces, 1) for delta in parser.feed(piece, i == len(pieces))]
    calls = [(delta.call.name, json.loads(delta.call.arguments)) for delta in deltas if delta.call]
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls


CALLS = [("f", {"a": 1}), ("g", {})]
WRITTEN: dict[str, list[tuple[str, str, list[Any]]]] = {
    "hermes": [
        (
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
            "Let me see.",
            CALLS,
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", CALLS[:1]),  # the end token stands for the closing
        ('<tool_call>\n{"name": f}\n</tool_call>', '{"name": f}', []),
        ('<tool_call>{"a": 1}</tool_call>', '{"a": 1}', []),
        ("1 < 2 <tool> end", "1 < 2 <tool> end", []),
    ],
    "llama3_json": [
        ('{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", CALLS),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", CALLS[:1]),
        ('{"name": "f", "parameters": {"a": "x; {y"}}', "", [("f", {"a": "x; {y"})]),
        ("Just {braces} and text", "Just {braces} and text", []),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "", CALLS),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', "", CALLS),
    ],
    "qwen3_coder": [
        (
            "ok\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n y\n</parameter>\n"
            "</function>\n</tool_call>",
            "ok",
            [("f", {"a": 1, "b": "x\n y"})],
        )
    ],
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in WRITTEN.items() for case in cases])
def test_tool_calls(name: str, case: tuple[str, str, list[Any]], size: int) -> None:
    text, content, calls = case
    assert split(ReplyFormat(tools=name), text, size) == (content, "", calls)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in WRITTEN.items() for case in cases])
def test_tool_calls_that_are_told_as_they_come(name: str, case: tuple[str, str, list[Any]], size: int) -> None:
    """The same calls; JSON's arguments in pieces, the first of them before the call is complete."""
    text, content, calls = case
    parser = ReplyFormat(tools=name).parser("", TOOLS, stream=True)
    told: list[list[str]] = []
    shown, early = "", False
    for at in range(0, len(text), size):
        for delta in parser.feed(text[at : at + size], at + size >= len(text)):
            shown += delta.content
            if delta.call:
                told.append([delta.call.name, delta.call.arguments])
            elif delta.arguments:
                told[-1][1] += delta.arguments
        early = early or (bool(told) and told[0][1] == "{")  # before its first key is written
    assert (shown, [(name, json.loads(arguments)) for name, arguments in told]) == (content, calls)
    if size == 1:
        assert early == (bool(calls) and name in ("hermes", "llama3_json"))


def test_a_call_that_is_cut_short_is_told_so_far_as_it_came() -> None:
    parser = ReplyFormat(tools="hermes").parser("", TOOLS, stream=True)
    deltas = parser.feed('<tool_call>{"name": "f", "arguments": {"a": {"b": 1', False) + parser.feed("}", True)
    assert "".join(delta.arguments for delta in deltas) == '{"a": {"b": 1}'
    assert [delta.call.name for delta in deltas if delta.call] == ["f"]


OWN = {
    "start_anchor": "assistant:",
    "fields": {"tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True}, "content": {}},
}
OWN_TAGS = {"start_anchor": "assistant:", "fields": {"tool_calls": TOOL_FORMATS["qwen3_coder"]["tool_calls"]}}
WHOLE, BEGUN = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {"b": "} x'
CUT_OFF = [
    (ReplyFormat("hermes"), f"<tool_call>{WHOLE}</tool_call>\n<tool_call>{BEGUN}", ['{"a": 1}', '{"b": "} x']),
    (ReplyFormat("hermes"), f'<tool_call>{WHOLE}</tool_call>\n<tool_call>{{"name": "g"', ['{"a": 1}']),
    (ReplyFormat("hermes"), '<tool_call>\n{"na', []),
    (ReplyFormat("hermes"), "<tool_c", []),
    (ReplyFormat("llama3_json"), BEGUN.replace("arguments", "parameters"), ['{"b": "} x']),
    (ReplyFormat("mistral"), f"[TOOL_CALLS] [{WHOLE}, {WHOLE}, {BEGUN}", ['{"a": 1}', '{"a": 1}', '{"b": "} x']),
    (ReplyFormat("mistral"), '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": "} x', ['{"a": 1}', '{"b": "} x']),
    (
        ReplyFormat("qwen3_coder"),
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        "<tool_call>\n<function=f>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n} x",
        ['{"a": 1}', '{"a": 2'],
    ),
    (
        ReplyFormat(own=OWN_TAGS),
        "<tool_call><function=f>\n<parameter=a>\n1\n</parameter></function>\n</tool_call>"
        "<tool_call><function=f><parameter=a>2</parameter><para",
        ['{"a": 1}', '{"a": 2'],
    ),
    (ReplyFormat(own=OWN), f"<call>{WHOLE}</call><call>{BEGUN}", ['{"a": 1}', '{"b": "} x']),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("form", "text", "arguments"), CUT_OFF)
def test_forced_calls_that_are_cut_off_leave_no_text_beside_them(
    form: ReplyFormat, text: str, arguments: list[str], size: int, stream: bool
) -> None:
    """A call whose name is known is told with its arguments so far, of one before that nothing is."""
    parser = form.parser("assistant:", TOOLS, stream, only_calls=True)
    told: list[str] = []
    for at in range(0, len(text), size):
        for delta in parser.feed(text[at : at + size], at + size >= len(text), cut=True):
            assert delta.content == ""
            if delta.call:
                told.append(delta.call.arguments)
            else:
                told[-1] += delta.arguments
    assert told == arguments


def test_a_call_that_is_not_forced_is_text_until_its_name_is_known() -> None:
    assert split(ReplyFormat("hermes"), '<tool_call>{"na', 3) == ('{"na', "", [])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("form", "prompt", "text"),
    [
        (THINKS, "", "<think>\nhm, hm\n</think>\n\nThe answer"),
        (THINKS, "assistant: <think>\n", "\nhm, hm\n</think>\n\nThe answer"),
        (ReplyFormat(reasoning="deepseek_r1"), "", "hm, hm</think>The answer"),
    ],
)
def test_reasoning(form: ReplyFormat, prompt: str, text: str, size: int) -> None:
    assert split(form, text, size, prompt) == ("The answer", "hm, hm", [])


@pytest.mark.parametrize("text", ["The answer", "1 < 2"])
def test_an_answer_without_reasoning(text: str) -> None:
    assert split(THINKS, text, 1) == (text, "", [])


def test_reasoning_before_a_call() -> None:
    text = 'hm</think>\n\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert split(ReplyFormat("hermes", "qwen3"), text, 2, "<think>") == ("", "hm", CALLS[:1])


def test_a_tokenizers_own_template_goes_first() -> None:
    """What breaks its rules is given as it is."""
    tokenizer = SimpleNamespace(chat_template="<tool_call>", response_template=OWN)
    form = find_format(tokenizer, "auto", "auto")
    assert split(form, 'Yes <call>{"name": "f", "arguments": {"a": 1}}</call>', 1, "assistant:") == (
        "Yes ",
        "",
        CALLS[:1],
    )
    assert split(form, "<call>{</call> more", 1000, "assistant:")[0] == "<call>{</call> more"
    assert find_format(tokenizer, "hermes", "none") == ReplyFormat("hermes")


def test_mistrals_call_ids_have_nine_characters() -> None:
    parser = ReplyFormat(tools="mistral").parser("", TOOLS)
    (delta,) = parser.feed('[TOOL_CALLS]f{"a": 1}', last=True)
    assert delta.call is not None and len(delta.call.id) == 9


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>' }} {{ '<think>' }}", ReplyFormat("hermes", "qwen3")),
        ("<tool_call>\n<function=", ReplyFormat("qwen3_coder")),
        ("[TOOL_CALLS]", ReplyFormat("mistral")),
        ('{{- "Environment: ipython\\n" }}', ReplyFormat("llama3_json")),
        ("{{ '<tool_call>' + name }}\n<arg_key>", ReplyFormat()),
        ("{{ messages }}", ReplyFormat()),
        (None, ReplyFormat()),
    ],
)
def test_a_format_is_found_by_the_chat_template(template: str | None, expected: ReplyFormat) -> None:
    assert find_format(SimpleNamespace(chat_template=template), "auto", "auto") == expected
    assert find_format(SimpleNamespace(chat_template=template), "none", "none") == ReplyFormat()


def test_all_is_content_without_tools_and_reasoning() -> None:
    assert not ReplyFormat("hermes").parser("", []).splits


def test_settings_name_all_formats() -> None:
    assert ("auto", "none", *TOOL_FORMATS) == TOOL_CALL_PARSERS
    assert REASONING_PARSERS[:2] == ("auto", "none")
