"""Structured output and forced calls over a real launch, by the real `openai` package."""

import json
from typing import Any

import jsonschema
import pytest
import torch
from openai import OpenAI

from orchestrator.text.compile_grammar import make_source
from orchestrator.text.structured_outputs import COMPACT
from protos import inference_pb2
from specahead.engine.sampling.grammars import Grammars
from tests.client import make_request
from tests.stack import Stack
from tests.unit.inline import Inline

MODEL = "tiny-target"
MESSAGES: Any = [{"role": "user", "content": "Tell me of the sea."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "pages": {"type": "integer", "minimum": 0, "maximum": 999},
        "kinds": {"type": "array", "items": {"enum": ["novel", "history", "letter"]}, "maxItems": 3},
    },
    "required": ["title", "pages", "kinds"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "book", "schema": SCHEMA, "strict": True}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (("find_book", SCHEMA), ("count", {"properties": {}, "additionalProperties": False}))
]  # fmt: skip
FREE: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1200}


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_a_json_schema_streamed_and_not(client: OpenAI, temperature: float) -> None:
    fields = FREE | {"response_format": FORMAT, "temperature": temperature, "seed": 3}
    answer = client.chat.completions.create(**fields)
    assert answer.choices[0].finish_reason == "stop"
    text = answer.choices[0].message.content or ""
    jsonschema.validate(json.loads(text), SCHEMA)
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**fields, stream=True)]
    if temperature == 0:
        assert "".join(pieces) == text
    jsonschema.validate(json.loads("".join(pieces)), SCHEMA)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find_book"}}])
def test_a_call_that_is_forced_streamed_and_not(client: OpenAI, choice: Any) -> None:
    fields = FREE | {"tools": TOOLS, "tool_choice": choice, "temperature": 0, "parallel_tool_calls": False}
    (found,) = client.chat.completions.create(**fields).choices
    assert found.finish_reason == "tool_calls"
    (call,) = found.message.tool_calls or []
    arguments = json.loads(call.function.arguments)
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    jsonschema.validate(arguments, parameters[call.function.name])
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, stream=True)]
    told = [part.function for delta in deltas for part in delta.tool_calls or []]
    assert "".join(part.name or "" for part in told) == call.function.name
    assert json.loads("".join(part.arguments or "" for part in told)) == arguments
    assert not any(delta.content for delta in deltas)


def test_the_result_of_a_call_goes_back(client: OpenAI) -> None:
    """The model may then call again or speak; its prompt goes on from the first turn's."""
    fields: Any = FREE | {"tools": TOOLS, "temperature": 0}
    first = client.chat.completions.create(**fields | {"tool_choice": "required", "parallel_tool_calls": False})
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is on the second shelf."}
    history = [*fields["messages"], message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(**fields | {"messages": history, "tool_choice": "auto", "max_tokens": 8})
    assert second.choices[0].message.content or second.choices[0].message.tool_calls
    assert second.usage.prompt_tokens > first.usage.total_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 16


@torch.inference_mode()
def assert_greedy_alone(model: Any, prompt: list[int], found: list[int], source: str, tokenizer: Any) -> None:
    """Each token is the likeliest of those that a grammar allows, by the target's own model after those before it.

    One pass says it of all, which makes them, one after the other, what it generates without a draft.
    """
    state = Grammars(tokenizer, model.config.vocab_size, [0], Inline()).start(source, prompt, len(prompt))
    rows = model(torch.tensor([prompt + found[:-1]]), logits_to_keep=len(found)).logits[0].float()
    for at, token in enumerate(found):
        logits = rows[at : at + 1]
        state.apply(logits, prompt + found[:at], [])
        assert token == int(logits.argmax()), f"token {at}"


@pytest.mark.parametrize(
    "outputs", [{"json": json.dumps(SCHEMA)}, {"regex": "[A-Z][a-z ,']{20,60}[.]"}, {"choice": ["The sea", "Old men"]}]
)
def test_greedy_with_a_draft_is_greedy_of_the_target_alone(
    stack: Stack, target_module: Any, tokenizer: Any, outputs: Any
) -> None:
    drafted = accepted = 0
    for text in ("The old man looked at the sea and", "It was a dark night;", "Chapter One."):
        prompt = tokenizer.encode(text)
        wanted = inference_pb2.StructuredOutputs(**outputs)
        request = make_request(text, max_tokens=80, temperature=0, structured_outputs=wanted)
        responses = list(stack.stub().Generate(request))
        found = [token for response in responses for token in response.token_ids]
        ((kind, value),) = outputs.items()
        source = make_source(kind, value if isinstance(value, str) else json.dumps(value), COMPACT, "")
        assert len(found) == 80 or found[-1] == 0
        assert_greedy_alone(target_module, prompt, found, source, tokenizer)
        drafted += responses[-1].speculation.drafted
        accepted += responses[-1].speculation.accepted
    assert accepted > drafted / 4
