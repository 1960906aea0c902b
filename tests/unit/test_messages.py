"""Anthropic's Messages over the HTTP gateway: what the chat template sees, and the answers in Anthropic's form."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from orchestrator.requests.callers import Callers
from orchestrator.requests.keys import Key, digest_of
from orchestrator.text.replies import ReplyFormat
from tests.unit.gateway import LIMITS, MODEL, ScriptedRouter, router_of_chats, running_gateway
from tests.unit.test_http import CALL

PATH = "/v1/messages"
ASK: Any = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "Is it sunny?"}]}
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
FORMAT = ReplyFormat("hermes", "qwen3")


@pytest.fixture
def router(tokenizer: Any) -> ScriptedRouter:
    return router_of_chats(tokenizer)


@pytest.fixture
async def raw(router: ScriptedRouter) -> AsyncIterator[aiohttp.ClientSession]:
    async with running_gateway(router, reply_format=FORMAT) as address, aiohttp.ClientSession(address) as session:
        yield session


async def ask(raw: aiohttp.ClientSession, path: str = PATH, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with raw.post(path, json=ASK | fields, headers={"anthropic-version": "2023-06-01"}) as response:
        return response.status, await response.json()


async def events_of(raw: aiohttp.ClientSession, **fields: Any) -> list[dict[str, Any]]:
    async with raw.post(PATH, json=ASK | {"stream": True} | fields) as response:
        text = (await response.read()).decode()
    events = []
    for part in text.split("\n\n"):
        if part.startswith("event: "):
            name, data = part.split("\n", 1)
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def gathered(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events build, as Anthropic's own clients do."""
    message, texts = events[0]["message"], dict[int, str]()
    for event in events[1:]:
        index, delta = event.get("index"), event.get("delta", {})
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            assert index == len(message["content"]) - 1
        elif event["type"] == "content_block_delta":
            kind = delta["type"].removesuffix("_delta")
            if kind == "input_json":
                texts[index] = texts.get(index, "") + delta["partial_json"]
            else:
                message["content"][index][kind] += delta[kind]
        elif event["type"] == "message_delta":
            message |= delta | {"usage": event["usage"]}
    for index, text in texts.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def prompt_of(router: ScriptedRouter) -> str:
    return router.tokenizer.decode(router.opened[-1].tokens[: router.opened[-1].prompt_tokens])


async def test_text_reasoning_and_calls_are_blocks_whole_and_streamed(
    raw: aiohttp.ClientSession, router: ScriptedRouter
) -> None:
    router.answer = f"<think>Look first.</think>I will look.{CALL}"
    async with raw.post(PATH, json=ASK | {"tools": [WEATHER]}, headers={"x-request-id": "mine"}) as response:
        status, whole = response.status, await response.json()
    assert response.headers["request-id"] == "mine" and whole["id"].startswith("msg_mine.")
    assert status == 200 and [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    thinking, text, call = whole["content"]
    assert (thinking["thinking"], text["text"], whole["stop_reason"]) == ("Look first.", "I will look.", "tool_use")
    assert (call["name"], call["input"]) == ("weather", {"city": "Rome"})
    record = router.opened[-1]
    usage = {"input_tokens": record.prompt_tokens - 3, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 0}
    assert whole["usage"] == usage | {"output_tokens": len(record.generated)}
    router.per_round = 1
    events = await events_of(raw, tools=[WEATHER])
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    streamed = gathered(events)
    for message in (whole, streamed):
        message.pop("id"), message["content"][2].pop("id")
    assert streamed == whole


async def test_a_conversation_with_results_reaches_the_template(
    raw: aiohttp.ClientSession, router: ScriptedRouter
) -> None:
    text: Any = {"type": "text", "cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text | {"text": "Sunny."}]}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": [text | {"text": "I will look."}, call]},
        {"role": "user", "content": [result, text | {"text": "And Oslo?"}]},
    ]
    fields = {"messages": messages, "tools": [WEATHER], "metadata": {"user_id": "u"}, "context_management": {}}
    system = [text | {"text": "Be "}, text | {"text": "brief."}]
    status, answer = await ask(raw, **fields, system=system, stop_sequences=["glad"])
    assert (status, answer["stop_reason"], answer["stop_sequence"]) == (200, "stop_sequence", "glad")
    prompt = prompt_of(router)
    assert '"name": "weather"' in prompt and "system: Be brief.user: Is" in prompt
    assert "assistant: I will look.<tool_call>" in prompt and "tool: Sunny.user: And Oslo?assistant:" in prompt
    status, count = await ask(raw, f"{PATH}/count_tokens", **fields, system=system)
    assert (status, count) == (200, {"input_tokens": router.opened[-1].prompt_tokens})


async def test_what_claude_code_sends_is_answered(raw: aiohttp.ClientSession, router: ScriptedRouter) -> None:
    """Its fields as version 2.1.197 sends them: a message of the system within the conversation, and more betas."""
    router.answer = CALL
    fields: Any = {
        "messages": [*ASK["messages"], {"role": "system", "content": "Agents: none."}],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [WEATHER],
        "metadata": {"user_id": '{"device_id": "a", "account_uuid": "", "session_id": "b"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    headers = {"Authorization": "Bearer none", "anthropic-version": "2023-06-01", "anthropic-beta": "effort-2025-11-24"}
    async with raw.head("/") as response:
        assert response.status in (200, 307)
    async with raw.post(f"{PATH}?beta=true", json=ASK | fields, headers=headers) as response:
        text = await response.text()
    assert response.status == 200 and '"name": "weather"' in text and '"stop_reason": "tool_use"' in text
    assert "system: Agents: none." in prompt_of(router)


async def test_the_answer_goes_on_with_what_the_last_message_began(
    raw: aiohttp.ClientSession, router: ScriptedRouter
) -> None:
    """max_tokens may be more than the context has room for; what ends an answer there has its own name."""
    messages = [*ASK["messages"], {"role": "assistant", "content": "It is"}]
    status, answer = await ask(raw, messages=messages, max_tokens=10**6)
    assert (status, answer["stop_reason"]) == (200, "end_turn") and prompt_of(router).endswith("assistant: It is")
    assert router.opened[-1].asked.max_tokens == LIMITS.max_context - router.opened[-1].prompt_tokens
    _, answer = await ask(raw, max_tokens=3)
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 3)
    router.answer = "sea " * LIMITS.max_context
    _, answer = await ask(raw, max_tokens=10**6)
    assert answer["stop_reason"] == "model_context_window_exceeded"


async def test_a_call_can_be_asked_for_and_one_that_is_cut_off_has_what_came(
    raw: aiohttp.ClientSession, router: ScriptedRouter
) -> None:
    router.answer = CALL
    status, answer = await ask(raw, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})
    assert status == 200 and router.opened[-1].asked.grammar
    size = len(router.opened[-1].generated)
    _, answer = await ask(raw, tools=[WEATHER], max_tokens=size - 8)
    assert (answer["stop_reason"], answer["content"][0]["name"]) == ("max_tokens", "weather")
    assert answer["content"][0]["input"].get("city", "") in "Rome"


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"model": "gpt-5"}, 404, "not_found_error", "does not exist"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"n": 2}, 400, "invalid_request_error", "n: "),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "search"}]}, 400, "invalid_request_error", "client runs"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error",
         "reads text alone"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"messages": [{"role": "user", "content": "sea " * 9000}]}, 400, "invalid_request_error", "is too long"),
    ],
)  # fmt: skip
async def test_errors_are_in_anthropics_form(
    raw: aiohttp.ClientSession, fields: Any, status: int, kind: str, words: str
) -> None:
    found, body = await ask(raw, **fields)
    assert (found, body["type"], body["error"]["type"]) == (status, "error", kind) and words in body["error"]["message"]


async def test_a_key_comes_in_anthropics_header(router: ScriptedRouter) -> None:
    callers = Callers([Key("ann", digest_of("sk-1"))])
    async with (
        running_gateway(router, reply_format=FORMAT, callers=callers) as address,
        aiohttp.ClientSession(address) as raw,
    ):
        for key, status in (("sk-1", 200), ("sk-2", 401)):
            async with raw.post(PATH, json=ASK, headers={"x-api-key": key}) as response:
                assert response.status == status
                if status == 401:
                    assert (await response.json())["error"]["type"] == "authentication_error"
