"""litellm, which converts answers and errors into its own."""

import json
from typing import Any

import litellm
import pytest
from conftest import ENOUGH, MODEL

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
SUNNY = {
    "type": "function",
    "function": {
        "name": "sunny",
        "parameters": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}},
            "required": ["yes"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def ask(url: str) -> dict[str, Any]:
    return {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 16, "temperature": 0, "num_retries": 0}


def test_a_chat_is_the_same_whole_and_streamed(ask: dict[str, Any]) -> None:
    whole = litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, **ask)
    events = litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, stream=True, **ask)
    assert "".join(e.choices[0].delta.content or "" for e in events) == whole.choices[0].message.content != ""


def test_as_hosted_vllm(ask: dict[str, Any]) -> None:
    answer = litellm.completion(model=f"hosted_vllm/{MODEL}", messages=MESSAGES, **ask)
    assert answer.choices[0].message.content and answer.usage.prompt_tokens > 0


def test_a_completion(ask: dict[str, Any]) -> None:
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="The old man", **ask)
    assert answer.choices[0].text and answer.usage.completion_tokens == 16


async def test_asynchronously(ask: dict[str, Any]) -> None:
    answer = await litellm.acompletion(model=f"openai/{MODEL}", messages=MESSAGES, **ask)
    assert answer.choices[0].message.content


def test_a_tool_that_must_be_called(ask: dict[str, Any]) -> None:
    fields = {"tools": [SUNNY], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": ENOUGH}
    answer = litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, **ask | fields)
    arguments = json.loads(answer.choices[0].message.tool_calls[0].function.arguments)
    assert isinstance(arguments["yes"], bool)


def test_errors_have_their_kinds(ask: dict[str, Any]) -> None:
    long = [{"role": "user", "content": "the sea " * 40_000}]
    for error, model, messages in (
        (litellm.ContextWindowExceededError, f"openai/{MODEL}", long),
        (litellm.NotFoundError, "openai/none", MESSAGES),
    ):
        with pytest.raises(error):
            litellm.completion(model=model, messages=messages, **ask)
