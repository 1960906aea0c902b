"""What clients ask of a text's structure, and the grammars that it becomes; followed with the model's tokenizer."""

import asyncio
import copy
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import jsonschema
import openai
import pytest
import torch
from openai import AsyncOpenAI
from pydantic import BaseModel
from tokenizers import AddedToken

from orchestrator.requests.chat_request import ChatRequest
from orchestrator.requests.requests import read_request
from orchestrator.text import grammar_compiler
from orchestrator.text.chat_grammars import chat_grammar
from orchestrator.text.compile_grammar import find_error, make_source
from orchestrator.text.grammar_compiler import GrammarCompiler
from orchestrator.text.json_calls import Delta
from orchestrator.text.lark import Lark
from orchestrator.text.replies import ReplyFormat
from orchestrator.text.structural_tags import tag_grammar
from orchestrator.text.structured_outputs import COMPACT, Kind, Structure
from specahead.engine.loading.tokenizer import count_token_ids
from specahead.engine.sampling.grammars import Grammars, unpack_mask
from specahead.wire.errors import ServiceError
from tests.unit.gateway import MODEL, ScriptedRouter, running_gateway
from tests.unit.inline import Inline

MESSAGES: Any = [{"role": "user", "content": "Tell me of the sea."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"]


_MARKED: dict[tuple[str, ...], Any] = {}
_GRAMMARS: dict[int, Grammars] = {}


def with_marks(tokenizer: Any, marks: list[str]) -> Any:
    """A copy of a tokenizer in which these texts are tokens, special or not; the same copy for the same marks."""
    if tuple(marks) not in _MARKED:
        copied = _MARKED[tuple(marks)] = copy.deepcopy(tokenizer)
        copied.add_tokens([AddedToken(mark, special=mark[0] == "[", normalized=False) for mark in marks])
    return _MARKED[tuple(marks)]


def grammars_of(tokenizer: Any) -> Grammars:
    """The grammars of a tokenizer, which take a third of a second to make, once for each."""
    if id(tokenizer) not in _GRAMMARS:
        _GRAMMARS[id(tokenizer)] = Grammars(tokenizer, count_token_ids(tokenizer), [tokenizer.eos_token_id], Inline())
    return _GRAMMARS[id(tokenizer)]


def follows(source: str, text: str, tokenizer: Any) -> bool | None:
    """Return whether a text follows a grammar to its end; None if it begins as one that does."""
    end = tokenizer.eos_token_id
    tokens = tokenizer.encode(text, add_special_tokens=False)
    state = grammars_of(tokenizer).start(source, tokens, 0)
    if state.error:
        assert "is not what the grammar allows" in state.error
        return False
    mask = unpack_mask(torch.from_numpy(state.masks([])[0]), count_token_ids(tokenizer))
    return True if mask[end] else None


@pytest.fixture
def router(tokenizer: Any) -> ScriptedRouter:
    tokenizer = with_marks(tokenizer, MARKS[:4])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return ScriptedRouter(tokenizer)


@pytest.fixture
async def client(router: ScriptedRouter) -> AsyncIterator[AsyncOpenAI]:
    async with (
        running_gateway(router, reply_format=ReplyFormat("hermes", "")) as address,
        AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


WANTED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "json_object": ({"response_format": {"type": "json_object"}}, ['{"b": [1, "x"]}', "{}"], ["1", "[]"]),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        ['{"a": 1}', '{"a": -20}', '{"a":3}'],
        ["{}", '{"a": "x"}', '{"a": 1, "b": 2}', '{"a":  1}', '{ "a": 1}', '{\n  "a": 1\n}', '{"a" : 1}', '{"a": 1} '],
    ),
    "Lark": ({"structured_outputs": {"grammar": 'start: "a" start | "b"'}}, ["aab"], ["ba"]),
    "GBNF": ({"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}}, ["aab"], ["ba"]),
    "json": ({"structured_outputs": {"json": SCHEMA}}, ['{"a": 1}'], ["{}"]),
    "json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ['{"a": 1}'], ["{}"]),
    "tight json": (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, ['{"a":1}'], ['{"a": 1}']
    ),
    "json with any white space": (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}},
        ['{"a":1}', '{\n  "a": -20\n}'], ['{"a":' + " " * 40 + "1}"],
    ),
    "json with white space of a pattern": (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "~"}}, ['{~"a"~:1}'], ['{"a": 1}'],
    ),
    "json without any by its pattern": (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}}, ['{"a":1}'], ['{"a": 1}'],
    ),
    "any json": ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
    "regex": ({"structured_outputs": {"regex": "a{2}"}}, ["aa"], ["ab"]),
    "choice": ({"structured_outputs": {"choice": ["one"]}}, ["one"], ["two"]),
    "grammar": ({"structured_outputs": {"grammar": 'start: "a"'}}, ["a"], ["b"]),
}  # fmt: skip


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
async def test_a_request_becomes_the_grammar_of_its_session(
    client: AsyncOpenAI, router: ScriptedRouter, wanted: Any
) -> None:
    fields, good, bad = wanted
    await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=fields)
    await client.completions.create(model=MODEL, prompt="The sea", extra_body=fields | {"ignore_eos": True})
    for record in router.opened:
        assert record.asked.stop_token_ids == [0]  # also with ignore_eos: behind a complete text nothing can come
        assert [follows(record.asked.grammar, text, router.tokenizer) for text in good] == [True] * len(good)
        assert not any(follows(record.asked.grammar, text, router.tokenizer) for text in bad)


async def test_json_is_compact_unless_a_request_says_otherwise(router: ScriptedRouter) -> None:
    """In answers, structural tags and the arguments of calls."""
    tags = {"structural_tag": {"triggers": ["<a>"], "structures": [{"begin": "<a>", "schema": SCHEMA, "end": ""}]}}
    tools = {"tools": [TOOLS[0]], "tool_choice": "required"}
    call = '<tool_call>\n{{"name": "weather", "arguments": {}}}\n</tool_call>'.format
    async with (
        running_gateway(router, reply_format=ReplyFormat("hermes")) as address,
        AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        for fields in ({"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": tags}, tools):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=fields)
        for nothing in (False, True):
            own = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": nothing}}
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=own)
    *compact, anything, none = [record.asked.grammar for record in router.opened]
    written = {"none": '{"a":1}', "compact": '{"a": 1}', "any": '{\n  "a": 1}'}

    def allowed(source: str, text: Callable[[str], str] = str) -> list[str]:
        return [name for name, value in written.items() if follows(source, text(value), router.tokenizer)]

    for source, text in zip(compact, (str, "<a>{}".format, call), strict=True):
        assert allowed(source, text) == ["none", "compact"]
    assert (allowed(anything), allowed(none)) == (["none", "compact", "any"], ["none"])


async def test_a_parsed_response_and_a_response_of_the_other_endpoint(
    client: AsyncOpenAI, router: ScriptedRouter
) -> None:
    class Answer(BaseModel):
        a: int

    router.answer = '{"a": 5}'
    parsed = await client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(a=5)
    response = await client.responses.parse(model=MODEL, input="Hello", text_format=Answer)
    assert response.output_parsed == Answer(a=5)
    form: Any = response.text.format if response.text is not None else None  # as the request has it
    assert (form.type, form.name, form.schema_["required"]) == ("json_schema", "Answer", ["a"])
    for record in router.opened:
        assert follows(record.asked.grammar, '{"a": 5}', router.tokenizer)
        assert not follows(record.asked.grammar, "{}", router.tokenizer)


INT = {"type": "json_schema", "json_schema": {"type": "integer"}}
ADD = {"begin": "<add>", "content": INT, "end": "</add>"}
SAY = {"begin": "<say>", "content": {"type": "any_text"}, "end": ["</say>", "<end>"]}
OLDER = {"structures": [{"begin": "<add>", "schema": {"type": "integer"}, "end": "</add>"}], "triggers": ["<add"]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<add", "<say"], "tags": [ADD, SAY]}
TAGGED = [  # what follows it, what does not
    (OLDER, ["Hello", "", "one <add>1</add> and <add>22</add>.", "a <sub>"], ["<add>x</add>", "<adder>"]),
    ({"format": TRIGGERED}, ["Hello", "<add>1</add> <say>any <thing></say>", "<say>x<end>"], ["<add>x", "<sayx"]),
    ({"format": TRIGGERED | {"at_least_one": True}}, ["Hm <add>1</add>, so"], []),
    ({"format": TRIGGERED | {"stop_after_first": True}}, ["Hello", "Hm <add>1</add>"], ["<add>1</add>x"]),
]


@pytest.mark.parametrize("marks", [[], ["<add>", "<say>", "</say>"], ["<add"]])
@pytest.mark.parametrize(("given", "right", "wrong"), TAGGED)
async def test_structural_tags(
    tokenizer: Any, given: Any, right: list[str], wrong: list[str], marks: list[str]
) -> None:
    """The same whether tags are text, tokens, or begin with tokens."""
    tokenizer = with_marks(tokenizer, marks)
    lark = tag_grammar(json.dumps(given), "response_format", Lark(tokenizer))
    source = source_of(Structure("lark", lark, "response_format"))
    for text in right:
        assert follows(source, text, tokenizer), text
    for text in wrong:
        assert follows(source, text, tokenizer) is False, text
    assert bool(follows(source, "", tokenizer)) != bool(given.get("format", {}).get("at_least_one"))


async def test_structural_tags_of_a_request(client: AsyncOpenAI, router: ScriptedRouter) -> None:
    router.answer = "Well, <add>12</add>."
    tags: Any = {"type": "structural_tag", "format": TRIGGERED}
    chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=tags)
    assert chat.choices[0].message.content == router.answer
    outputs = {"structured_outputs": {"structural_tag": json.dumps(OLDER)}}
    await client.completions.create(model=MODEL, prompt="The sea", extra_body=outputs)
    for record in router.opened:
        assert follows(record.asked.grammar, router.answer, router.tokenizer)
        assert follows(record.asked.grammar, "<add>x", router.tokenizer) is False


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ({"format": {"type": "grammar", "grammar": "root ::= x"}}, "format must be triggered_tags, got 'grammar'"),
        ({"format": TRIGGERED | {"tags": [{"begin": "<add>", "end": "</add>"}]}}, "lacks 'content'"),
        ({"format": TRIGGERED | {"tags": [ADD | {"content": {"type": "or"}}]}}, "must be json_schema or any_text"),
        ({"format": TRIGGERED | {"triggers": ["<x"]}}, "'<add>' begins with none of the triggers"),
        ({"format": "all"}, "not a structural tag"),
        ({}, "lacks 'structures'"),
    ],
)
async def test_structural_tags_that_are_not_known_are_refused_by_name(
    client: AsyncOpenAI, tags: Any, words: str
) -> None:
    form: Any = {"type": "structural_tag", **tags}
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form)
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"regex": "(a"}, "structured_outputs.regex", "unclosed group"),
        ({"json": {"type": "array", "uniqueItems": True}}, "structured_outputs.json", "uniqueItems"),
        ({"json": "{"}, "structured_outputs.json", "Expecting"),
        ({"json": {"$ref": "https://example.org/x"}}, "structured_outputs.json", "does not fetch"),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar", "unknown name"),
    ],
)
async def test_a_grammar_that_does_not_compile_is_refused_in_its_compilers_words(
    client: AsyncOpenAI, router: ScriptedRouter, fields: Any, param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        await client.completions.create(model=MODEL, prompt="The sea", extra_body={"structured_outputs": fields})
    assert refused.value.param == param
    assert not router.opened


async def test_compiling_has_a_limit_and_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """This number's multiples take llguidance minutes and gigabytes."""
    monkeypatch.setattr(grammar_compiler, "SECONDS", 1)
    compiler, slowest = GrammarCompiler(), 0.0
    endless = Structure("json", '{"type": "integer", "multipleOf": 9999999}', "json")
    compiling = asyncio.create_task(compiler.compile(endless))
    while not compiling.done():
        started = time.perf_counter()
        await asyncio.sleep(0.01)
        slowest = max(slowest, time.perf_counter() - started)
    with pytest.raises(ServiceError, match=r"within (1|2) seconds"):  # of CPU time, unless the machine gave it less
        await compiling
    assert slowest < 0.5


LONG = "a" * 200_000
TOO_LARGE: dict[str, tuple[Kind, str, str]] = {  # the last: a text that begins what is too large
    "a repetition": ("regex", "a{1000000}", "aaaa"),
    "within another": ("regex", "b?|(?:a{1000}[}]){1000,}", "aaaa"),
    "a choice": ("choice", json.dumps(["b", LONG]), "aaaa"),
    "a pattern": ("json", '{"type": "array", "items": {"pattern": "^(ab){900000}"}}', '["abab'),
}


@pytest.mark.parametrize(("kind", "text", "begun"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_mask_that_would_take_long_ends_its_session(tokenizer: Any, kind: Kind, text: str, begun: str) -> None:
    """Other sessions of the step wait no longer."""
    source = make_source(kind, text, COMPACT, "")
    state = grammars_of(tokenizer).start(source, [], 0)
    tokens = tokenizer.encode(begun, add_special_tokens=False)
    for count in range(len(tokens) + 1):
        started = time.process_time()
        state.follow(tokens[:count])
        state.masks([])
        assert time.process_time() - started < 0.2
        if state.error:
            break
    assert "too many" in state.error


# Calls.

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "sea", "strict": True, "parameters": {
        "properties": {"of": {"$ref": "#/$defs/sea"}}, "required": ["of"], "additionalProperties": False,
        "$defs": {"sea": {"enum": ["north", "south"]}}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
FORMATS = {
    "hermes": (ReplyFormat("hermes"), MARKS),
    "hermes by text": (ReplyFormat("hermes"), []),
    "hermes that reasons": (ReplyFormat("hermes", "qwen3"), MARKS),
    "hermes that reasons by text": (ReplyFormat("hermes", "qwen3"), MARKS[:2]),
    "llama": (ReplyFormat("llama3_json"), []),
    "mistral": (ReplyFormat("mistral"), MARKS[:5]),
    "later mistral": (ReplyFormat("mistral"), MARKS),
    "qwen3_coder": (ReplyFormat("qwen3_coder"), MARKS),
    "qwen3_coder by text": (ReplyFormat("qwen3_coder"), []),
}


def source_of(structure: Structure | None, main: str = "") -> str:
    """The source of a grammar, made here: a process for each would take most of the time."""
    kind, text = (structure.kind, structure.text) if structure else ("", "")
    source = make_source(kind, text, COMPACT, main)
    assert find_error(source) == ""
    return source


def call_source(tokenizer: Any, form: ReplyFormat, **fields: Any) -> str:
    request = read_request(ChatRequest, {"messages": MESSAGES, "tools": TOOLS} | fields)
    main = chat_grammar(request, "", form, Lark(tokenizer))
    return source_of(None if request.must_call else request.structure, main)


def calls_of(deltas: list[Delta]) -> list[tuple[str, str]]:
    """Return the names and arguments of calls; nothing else may stand beside them but reasoning."""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        assert not delta.content
        if delta.call is not None:
            calls.append((delta.call.name, delta.call.arguments))
        elif delta.arguments:
            calls[-1] = calls[-1][0], calls[-1][1] + delta.arguments
    return calls


def write(source: str, tokenizer: Any, rng: random.Random, most: int = 200) -> list[int] | None:
    """Return random tokens that follow a grammar up to the end, None if they do not come to it."""
    vocab, end = count_token_ids(tokenizer), tokenizer.eos_token_id
    state = grammars_of(tokenizer).start(source, [], 0)
    tokens: list[int] = []
    ends = {i for token, i in tokenizer.get_vocab().items() if set('"]}>') & set(token)}  # of a part of JSON or a tag
    while len(tokens) < most:
        state.follow(tokens)
        assert not state.error
        allowed = unpack_mask(torch.from_numpy(state.masks([])[0]), vocab).nonzero()[:, 0].tolist()
        if end in allowed:
            return tokens
        closing = [token for token in allowed if token in ends]
        tokens.append(rng.choice(closing if closing and rng.random() < 0.5 else allowed))
    return None


@pytest.mark.parametrize(("form", "marks"), FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sea"}}])
async def test_forced_calls_parse_and_their_arguments_are_valid(
    tokenizer: Any, form: ReplyFormat, marks: list[str], choice: Any
) -> None:
    tokenizer = with_marks(tokenizer, marks)
    rng, written = random.Random(1), 0
    source = call_source(tokenizer, form, tool_choice=choice)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in TOOLS}
    for _ in range(5):
        tokens = write(source, tokenizer, rng)
        if tokens is None:
            continue
        parser = form.parser("", TOOLS)
        calls = calls_of(parser.feed(tokenizer.decode(tokens, skip_special_tokens=False), True))
        assert calls
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[name])
            assert choice == "required" or name == "sea"
        written += 1
    assert written > 1


SEA = {
    "hermes": '<tool_call>\n{"name": "sea", "arguments": {"of": "north"}}\n</tool_call>',
    "llama": '{"name": "sea", "parameters": {"of": "north"}}',
    "mistral": '[TOOL_CALLS][{"name": "sea", "arguments": {"of": "north"}}]',
    "later mistral": '[TOOL_CALLS]sea[ARGS]{"of": "north"}',
    "qwen3_coder": "<tool_call>\n<function=sea>\n<parameter=of>\nnorth\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", SEA)
async def test_what_forced_and_strict_calls_leave_open(tokenizer: Any, name: str) -> None:
    form, marks = FORMATS[name]
    tokenizer, call = with_marks(tokenizer, marks), SEA[name]
    forced = call_source(tokenizer, form, tool_choice="required")
    assert follows(forced, call, tokenizer)
    assert not follows(forced, "No.", tokenizer)
    assert follows(forced, call.replace("north", "east"), tokenizer) is False
    strict = call_source(tokenizer, form)
    assert follows(strict, call, tokenizer)
    assert follows(strict, "No, there is none.", tokenizer)
    assert follows(strict, call.replace("north", "east"), tokenizer) is False
    weather = call.replace("sea", "weather").replace('"of": "north"', '"any": "thing"').replace("=of>", "=any>")
    assert follows(strict, weather, tokenizer)  # whose arguments are an object, and are not strict
    if name != "llama":
        assert follows(strict, f"Let me see. {call}", tokenizer)


TYPED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": ["integer", "null"]},
        "size": {"enum": [1, 2.5, None, "big"]},
        "place": {"$ref": "#/$defs/place"},
        "kind": {"anyOf": [{"$ref": "#/$defs/kind"}, {"type": "null"}]},
        "all": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["text", "place", "kind"],
    "$defs": {
        "place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "kind": {"enum": ["new", "old"]},
    },
}


async def test_parameters_between_tags_are_of_their_types(tokenizer: Any) -> None:
    """A string is written as it is, all else as JSON; the call that is told has values of the schema."""
    form, tools = ReplyFormat("qwen3_coder"), [{"type": "function", "function": {"name": "f", "parameters": TYPED}}]
    source = call_source(tokenizer, form, tools=tools, tool_choice="required")
    values = {
        "text": 'two\nlines "</x>',
        "count": "null",
        "size": "2.5",
        "place": '{"x": 1}',
        "kind": "old",
        "all": "[]",
    }
    tags = {key: f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()}
    call = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>".format
    assert follows(source, call("".join(tags.values())), tokenizer)
    for key, value in {"count": "x", "size": "3", "place": "{}", "kind": "other", "all": "[1]"}.items():
        wrong = tags | {key: tags[key].replace(values[key], value)}
        assert follows(source, call("".join(wrong.values())), tokenizer) is False
    assert follows(source, call(tags["text"] + tags["place"]), tokenizer) is False  # `kind` is missing
    parser = form.parser("", tools)
    (delta,) = parser.feed(call("".join(tags.values())), True)
    expected = {"text": values["text"], "count": None, "size": 2.5, "place": {"x": 1}, "kind": "old", "all": []}
    assert delta.call is not None and json.loads(delta.call.arguments) == expected


async def test_a_structure_beside_tools_and_behind_reasoning(tokenizer: Any) -> None:
    form, marks = FORMATS["hermes that reasons"]
    tokenizer = with_marks(tokenizer, marks)
    source = call_source(tokenizer, form, structured_outputs={"regex": "yes|no"})
    for text in ("yes", "<think>Well, it is so.</think>\n\nno"):
        assert follows(source, text, tokenizer)
    assert follows(source, "<think>Well", tokenizer) is None
    assert follows(source, "Well", tokenizer) is False
    strict = call_source(tokenizer, form, structured_outputs={"regex": "yes|no"}, tools=[TOOLS[1]])
    assert follows(strict, f"<think>hm</think>{SEA['hermes']}", tokenizer)
    assert follows(strict, "no", tokenizer)
    request = read_request(ChatRequest, {"messages": MESSAGES, "structured_outputs": {"regex": "yes"}})
    opened = chat_grammar(request, "user: hi<think>\n", form, Lark(tokenizer))
    source = source_of(request.structure, opened)
    assert follows(source, "so it is</think>\nyes", tokenizer)
    assert follows(source, "yes", tokenizer) is None
