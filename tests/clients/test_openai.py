"""OpenAI's own package in versions 2 and 3, synchronous and asynchronous."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from conftest import ENOUGH, MODEL
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

PROMPT = "The old man looked at the sea and"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me of the sea."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]
    sunny: bool


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "specahead"


def test_a_completion_is_the_same_whole_and_streamed(client: OpenAI) -> None:
    ask: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**ask)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 24
    events = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for event in events for choice in event.choices) == whole.choices[0].text
    assert len(events) > 3 and events[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_chat_is_the_same_whole_and_streamed(client: OpenAI) -> None:
    ask: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    events = list(client.chat.completions.create(**ask, stream=True))
    assert "".join(e.choices[0].delta.content or "" for e in events) == whole.choices[0].message.content
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_stream_helper_gathers_a_chat(client: OpenAI) -> None:
    """The answer comes to its end, since the helper does not parse one that is cut off."""
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, stop=["e"], temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        assert "".join(pieces) == stream.get_final_completion().choices[0].message.content != ""


def test_several_prompts_and_choices(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=[PROMPT, "Once"], n=2, max_tokens=4, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_a_history_with_tools_and_a_refusal_of_null_is_taken(client: OpenAI) -> None:
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER], max_tokens=8)
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_asked_for_fits_its_schema(client: OpenAI, choice: Any) -> None:
    ask: Any = {"model": MODEL, "messages": MESSAGES, "tools": [WEATHER], "parallel_tool_calls": False}
    answer = client.chat.completions.create(**ask, tool_choice=choice, max_tokens=ENOUGH, seed=3)
    assert answer.choices[0].finish_reason in ("tool_calls", "stop")
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) in ({"city": "Rome"}, {"city": "Oslo"})


def test_a_streamed_call_fits_its_schema(client: OpenAI) -> None:
    ask: Any = {"model": MODEL, "messages": MESSAGES, "tools": [WEATHER], "parallel_tool_calls": False}
    with client.chat.completions.stream(**ask, tool_choice="required", max_tokens=ENOUGH, seed=3) as stream:
        message = stream.get_final_completion().choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) in ({"city": "Rome"}, {"city": "Oslo"})


def test_an_answer_fits_the_model_that_is_asked_for(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Weather, max_tokens=ENOUGH, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_log_probabilities(client: OpenAI) -> None:
    """Each token of a greedy answer is the likeliest of its position."""
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        assert entry.logprob == pytest.approx(max(top.logprob for top in entry.top_logprobs), abs=1e-3)


def test_responses(client: OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Tell me of the sea.", max_output_tokens=16, temperature=0)
    assert answer.output_text and answer.usage.output_tokens <= 16
    with client.responses.stream(
        model=MODEL, input="Tell me of the sea.", max_output_tokens=16, temperature=0
    ) as stream:
        streamed = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert streamed == answer.output_text


async def test_many_at_once(url: str) -> None:
    """Each request gets the answer that it gets alone."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def ask(prompt: str) -> str:
            answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0)
            return answer.choices[0].text

        prompts = [f"{PROMPT} {number}" for number in range(8)]
        assert await asyncio.gather(*map(ask, prompts)) == [await ask(prompt) for prompt in prompts]


def test_errors_have_their_kinds(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `gpt-5` does not exist") as missing:
        client.completions.create(model="gpt-5", prompt=PROMPT)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="maximum context length") as long:
        client.completions.create(model=MODEL, prompt=[5] * 40_000)
    assert long.value.code == "context_length_exceeded"


def test_the_request_id_comes_back(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=PROMPT, max_tokens=2, extra_headers={"x-request-id": "mine-7"}
    )
    assert raw.headers["x-request-id"] == "mine-7" and raw.parse().id.startswith("cmpl-mine-7")
