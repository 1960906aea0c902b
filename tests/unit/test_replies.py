"""What models write, split into content, reasoning and calls: the same however the text is cut."""

import itertools
import json
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.text.json_calls import Delta
from orchestrator.text.replies import TOOL_FORMATS, ReplyFormat, find_format

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
]
THINKS = ReplyFormat(reasoning="qwen3")


def split(form: ReplyFormat, text: str, size: int, prompt: str = "") -> tuple[str, str, list[Any]]:
    """Return content, reasoning, and the calls as (name, arguments)."""
    parser = form.parser(prompt, TOOLS)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    deltas = [delta for i, piece in enumerate(pieces, 1) for delta in parser.feed(piece, i == len(pieces))]
    calls = [(name, json.loads(arguments)) for kind, name, arguments in events(deltas) if kind == "call"]
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls


def events(deltas: list[Delta]) -> list[tuple[str, str, str]]:
    """Return what deltas add up to: (kind, name, text), pieces of one thing joined."""
    joined: list[tuple[str, str, str]] = []
    for delta in deltas:
        kind, name, text = "reasoning", "", delta.reasoning
        if delta.call is not None:
            joined.append(("call", delta.call.name, delta.call.arguments))
            continue
        if delta.arguments:
            kind, name, text = joined[-1][0], joined[-1][1], delta.arguments
            assert kind == "call"
        elif delta.content:
            kind, text = "content", delta.content
        if joined and joined[-1][:2] == (kind, name):
            joined[-1] = (kind, name, joined[-1][2] + text)
        else:
            joined.append((kind, name, text))
    return joined


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
    """JSON's arguments come in pieces, the first of them before the call is complete."""
    text, content, calls = case
    assert split(ReplyFormat(tools=name), text, size) == (content, "", calls)
    parser = ReplyFormat(tools=name).parser("", TOOLS)
    deltas, early = list[Delta](), False
    for character in text:
        deltas += parser.feed(character, False)
        told = [arguments for kind, _, arguments in events(deltas) if kind == "call"]
        early = early or told == ["{"]  # before the first key is written
    assert early == (bool(calls) and name != "qwen3_coder")


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
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("form", "text", "arguments"), CUT_OFF)
def test_forced_calls_that_are_cut_off_leave_no_text_beside_them(
    form: ReplyFormat, text: str, arguments: list[str], size: int
) -> None:
    """A call whose name is known is told with its arguments so far, of one before that nothing is."""
    parser = form.parser("assistant:", TOOLS, only_calls=True)
    told: list[str] = []
    for at in range(0, len(text), size):
        for delta in parser.feed(text[at : at + size], at + size >= len(text), cut=True):
            assert delta.content == ""
            if delta.call:
                told.append(delta.call.arguments)
            else:
                told[-1] += delta.arguments
    assert told == arguments


F = '{"name": "f", "arguments": {"a": 1, "name": "ls"}}'
SHAPES: list[tuple[ReplyFormat, str, list[tuple[str, str, str]]]] = [
    # MCP's shape: the arguments of a call have a name themselves.
    (
        ReplyFormat("mistral"),
        '[TOOL_CALLS]call_tool{"name": "ls", "arguments": {"path": "/"}}',
        [("call", "call_tool", '{"name": "ls", "arguments": {"path": "/"}}')],
    ),
    (ReplyFormat("hermes"), f"<tool_call>{F}</tool_call>", [("call", "f", '{"a": 1, "name": "ls"}')]),
    # Keys behind the arguments, and in any order.
    (
        ReplyFormat("hermes"),
        '<tool_call>{"name": "f", "arguments": {"a": {}}, "id": "x"}</tool_call>',
        [("call", "f", '{"a": {}}')],
    ),
    (
        ReplyFormat("hermes"),
        '<tool_call>{"id": [1], "arguments": {"a": "}\\""} , "name": "\\u0066"}</tool_call>\n',
        [("call", "f", '{"a": "}\\""}')],
    ),
    (
        ReplyFormat("llama3_json"),
        '{"parameters": {"name": "g"}, "name": "f"}; {"type": "x", "name": "g", "parameters": {}, "y": {"name": 1}}',
        [("call", "f", '{"name": "g"}'), ("call", "g", "{}")],
    ),
    (
        ReplyFormat("llama3_json"),
        '{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}',
        [("call", "f", '{"a": 1}')],
    ),
    (ReplyFormat("llama3_json"), '{"name": "f"}', [("call", "f", "{}")]),
    (ReplyFormat("llama3_json"), '{"name": "f", "parameters": null, "x": 1}', [("call", "f", "null")]),
    (ReplyFormat("llama3_json"), 'A\n{"type": "x", "a": 1} b', [("content", "", 'A\n{"type": "x", "a": 1} b')]),
    (
        ReplyFormat("mistral"),
        '[TOOL_CALLS] [{"arguments": {"name": "x"}, "id": 1, "name": "f"}, {"a": 1}, {"name": "g", "arguments": []}]',
        [("call", "f", '{"name": "x"}'), ("content", "", '{"a": 1}'), ("call", "g", "[]")],
    ),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(("form", "text", "expected"), SHAPES)
def test_calls_of_any_shape(form: ReplyFormat, text: str, expected: list[tuple[str, str, str]], size: int) -> None:
    parser = form.parser("", TOOLS)
    deltas = [d for i in range(0, len(text), size) for d in parser.feed(text[i : i + size], i + size >= len(text))]
    assert events(deltas) == expected


ALL_FORMS: list[tuple[ReplyFormat, str]] = [
    *((ReplyFormat(tools, reasoning), prompt) for tools in ["", *TOOL_FORMATS] for reasoning, prompt in
      [("", ""), ("qwen3", ""), ("qwen3", "<think>\n"), ("deepseek_r1", "")]),
]  # fmt: skip
# What models write, and what nearly is that.
PARTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]ab1", "<|python_tag|>"),
    *("<function=f>", "</function>", "<parameter=a>", "</parameter>", "<call>", "<call=f>", "</call>", "<answer>"),
    *("</answer>", "call_tool", "f", "1", "é", "null", "Let me see.", "<tool_c", "</", "<", "[TOOL_", "assistant:"),
    *'[]{},:;"\\\n ', *(", ", ": ", "; ", "\n\n", F, "{}", '{"a": "} x', '"x"', '{"name": "f", "arguments": '),
    *('"name"', '"arguments"', '"parameters"', '"function"', '"type"', '"tool"'),
    *(text for cases in WRITTEN.values() for text, *_ in cases),
    *(text for _, text, _ in [*CUT_OFF, *SHAPES]),
]  # fmt: skip


PAIRS = [
    *(("<tool_call>", "</tool_call>"), ("<call>", "</call>"), ("<call=f>", "</call>"), ("<think>", "</think>")),
    *(("<tool_call><function=f>", "</function></tool_call>"), ("[TOOL_CALLS]f", ""), ("[TOOL_CALLS][", "]")),
]
PART = st.sampled_from(PARTS) | st.text(max_size=3)
INNER = st.lists(PART, max_size=4).map("".join)
REGION = st.builds(lambda ends, inner: inner.join(ends), st.sampled_from(PAIRS), INNER)
EXAMPLES = settings(max_examples=int(os.environ.get("REPLIES", "200")), deadline=None)


def cut(draw: st.DrawFn, text: str) -> list[str]:
    """Return the pieces of a text, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


def tell(form: ReplyFormat, prompt: str, pieces: list[str], **how: bool) -> list[tuple[str, str, str]]:
    """Return the events of a text that comes in pieces."""
    parser = form.parser(prompt, TOOLS, only_calls=how.get("only_calls", False))
    deltas = [delta for piece in pieces[:-1] for delta in parser.feed(piece, False)]
    return events(deltas + parser.feed(pieces[-1], True, how.get("cut", False)))


@EXAMPLES
@given(st.sampled_from(ALL_FORMS), st.lists(PART | REGION, max_size=5), st.booleans(), st.booleans(), st.data())
def test_however_a_text_is_cut_it_says_the_same(
    form: tuple[ReplyFormat, str], parts: list[str], only_calls: bool, cut_off: bool, data: st.DataObject
) -> None:
    """In one piece, token by token or character by character: the same events, of each format."""
    text, how = "".join(parts), {"only_calls": only_calls, "cut": cut_off}
    whole = tell(*form, [text], **how)
    assert tell(*form, cut(data.draw, text), **how) == whole
    assert tell(*form, [*text, ""], **how) == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["name", '"}', "\\", "; {"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "arguments", "a"]), inner),
    max_leaves=4,
)
OBJECT = st.dictionaries(st.sampled_from(["name", "arguments", "parameters", "a", 'q"']), JSON, max_size=3)
WRITERS: dict[str, tuple[str, Callable[[list[str], list[str]], str]]] = {
    "hermes": ("hermes", lambda calls, _: "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)),
    "llama": ("llama3_json", lambda calls, _: "; ".join(calls)),
    "mistral": ("mistral", lambda calls, _: f"[TOOL_CALLS] [{', '.join(calls)}]"),
    "later mistral": ("mistral", lambda _, named: "".join(f"[TOOL_CALLS]{call}" for call in named)),
}


@EXAMPLES
@given(
    st.sampled_from(sorted(WRITERS)),
    st.lists(st.tuples(st.sampled_from("fg"), OBJECT), min_size=1, max_size=3),
    st.data(),
)
def test_calls_of_json_are_passed_on(writer: str, meant: list[tuple[str, dict[str, Any]]], data: st.DataObject) -> None:
    """With any arguments, keys in any order, other keys beside them, white space: however the text is cut."""
    calls, named, arguments = list[str](), list[str](), list[str]()
    for name, value in meant:
        dump = partial(json.dumps, indent=data.draw(st.sampled_from([None, 2])), ensure_ascii=data.draw(st.booleans()))
        arguments.append(dump(value))
        keys = {"name": json.dumps(name), data.draw(st.sampled_from(["arguments", "parameters"])): arguments[-1]}
        keys |= {key: dump(data.draw(JSON)) for key in data.draw(st.sets(st.sampled_from(["id", "x"])))}
        order = data.draw(st.permutations(sorted(keys)))
        if writer == "llama":  # which is told from text by its first key
            order.sort(key=["id", "x"].count)
        calls.append(f"{{{', '.join(f'{json.dumps(key)}: {keys[key]}' for key in order)}}}")
        named.append(f"{name}{data.draw(st.sampled_from(['', '[ARGS]', '[CALL_ID]a1[ARGS]']))}{arguments[-1]}")
    tools, write = WRITERS[writer]
    pieces = cut(data.draw, write(calls, named))
    told = [each for each in tell(ReplyFormat(tools), "", pieces) if each[2].strip()]
    assert [(kind, name, json.loads(text)) for kind, name, text in told] == [("call", *each) for each in meant]


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
