"""What an agent asks of a real instruct model: turns of a chat, calls of tools, answers in a structure."""

import json
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

MODEL = "real"
ENOUGH = 400  # tokens for a call or a small object
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris for the next 3 days?"}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "skills": {"type": "array", "items": {"type": "string"}, "maxItems": 5},  # some models know no end of them
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}


def chat(client: OpenAI, messages: Any, **fields: Any) -> Any:
    how: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": ENOUGH}
    return client.chat.completions.create(messages=messages, **(how | fields))


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]


@pytest.mark.parametrize("exactness", ["exact", "approximate"])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_comes_and_ends(client: OpenAI, exactness: str, parallel: bool) -> None:
    asked = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": parallel}
    (choice,) = chat(client, QUESTION, **asked, extra_body={"exactness": exactness}).choices
    calls = calls_of(choice)
    assert choice.finish_reason == "tool_calls"
    assert {name for name, _ in calls} == {"get_weather"} and (parallel or len(calls) == 1)
    assert "paris" in calls[0][1]["city"].lower()


def test_a_named_call_is_streamed_as_it_is_given_whole(client: OpenAI) -> None:
    asked = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    whole = calls_of(chat(client, QUESTION, **asked).choices[0])
    name, arguments = "", ""
    for chunk in chat(client, QUESTION, **asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            assert call.index == 0
            name, arguments = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    assert [(name, json.loads(arguments))] == whole


def test_an_object_of_a_schema_comes_compact_and_ends(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Describe a fictional engineer as JSON."}]
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    (choice,) = chat(client, messages, response_format=schema).choices
    answer = json.loads(choice.message.content)
    jsonschema.validate(answer, PERSON)
    assert choice.finish_reason == "stop"
    assert len(choice.message.content) <= len(json.dumps(answer, ensure_ascii=False))


def test_turns_of_a_chat_reuse_what_is_known(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Write a Python function that adds two numbers. Only code."}]
    first = chat(client, messages)
    assert "def " in first.choices[0].message.content
    known = first.usage.prompt_tokens
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Now one that multiplies them. Only code."},
    ]
    second = chat(client, messages)
    assert "*" in second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens >= known // 16 * 16


def test_a_stop_string_ends_an_answer_and_its_count(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="1, 2, 3, 4,",
        max_tokens=60,
        temperature=0,
        stop=["9"],
        extra_body={"return_token_ids": True},
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop" and "9" not in choice.text and "8" in choice.text
    assert answer.usage.completion_tokens == len(choice.token_ids)
