"""Anthropic's own package: messages whole and streamed, tools that are called for, results that go back."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from conftest import ENOUGH, MODEL

GREEDY = {"temperature": 0}  # not among the arguments of the package from version 2 on
ASK: Any = {
    "model": MODEL,
    "max_tokens": 16,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "Tell me of the sea."}],
}
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_a_message_is_the_same_whole_and_streamed(client: Anthropic) -> None:
    whole = client.messages.create(**ASK, extra_body=GREEDY)
    assert (whole.role, whole.stop_reason, whole.usage.output_tokens) == ("assistant", "max_tokens", 16)
    with client.messages.stream(**ASK, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == whole.content[0].text == message.content[0].text
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 16)


def test_a_stop_sequence_is_named(client: Anthropic) -> None:
    message = client.messages.create(**(ASK | {"max_tokens": ENOUGH}), stop_sequences=["e"], extra_body=GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "e")


def test_tokens_are_counted_as_they_are_read(client: Anthropic) -> None:
    asked = {name: value for name, value in ASK.items() if name != "max_tokens"}
    count = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**ASK).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


def test_a_tool_is_called_and_its_result_goes_back(client: Anthropic) -> None:
    tools: Any = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    with client.messages.stream(**(ASK | {"max_tokens": ENOUGH}), **tools) as stream:
        message = stream.get_final_message()
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use" and call.input in ({"city": "Rome"}, {"city": "Oslo"})
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
    history = [
        *ASK["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**(ASK | {"messages": history}), tools=[WEATHER]).usage.output_tokens <= 16


def test_errors_have_their_kinds(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="The model `claude` does not exist"):
        client.messages.create(**(ASK | {"model": "claude"}))
    with pytest.raises(anthropic.BadRequestError, match="the client runs each tool"):
        client.messages.create(**ASK, tools=[{"type": "web_search_20250305", "name": "web_search"}])
