"""Fields that the server does not know: they change nothing, or the request is refused and the field is named."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from orchestrator.requests.chat_request import ChatRequest
from orchestrator.requests.messages_request import MessagesRequest
from orchestrator.requests.requests import _NOT_BUILT, CompletionRequest
from orchestrator.requests.responses_request import ResponsesRequest
from tests.unit.gateway import router_of_chats, running_gateway

MESSAGES: Any = [{"role": "user", "content": "Tell me of the sea."}]
PATHS: Any = {
    "/v1/completions": ({"prompt": "The sea"}, CompletionRequest),
    "/v1/chat/completions": ({"messages": MESSAGES}, ChatRequest),
    "/v1/responses": ({"input": "Tell me of the sea."}, ResponsesRequest),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 16}, MessagesRequest),
}
# What clients send and no answer of ours depends on, and what nobody has heard of.
HARMLESS: Any = {
    **{"user": "ann", "metadata": {"user_id": "ann"}, "safety_identifier": "a", "service_tier": "auto", "store": False},
    **{"prompt_cache_key": "a", "prompt_cache_retention": "24h", "cache_control": {"type": "ephemeral"}, "priority": 1},
    **{"cache_salt": "a", "kv_transfer_params": {}, "vllm_xargs": {}, "mm_processor_kwargs": {}, "options": {},
       "prediction": {"type": "content", "content": "The sea"}, "context_management": {"edits": []}, "betas": ["a"],
       "max_tool_calls": 3, "inference_geo": "us", "include": [], "nonesuch": {"deep": [1, {"er": None}]}},
}  # fmt: skip
# The same within parts of a request.
PARTS: Any = [
    ("/v1/chat/completions", {"messages": [{**MESSAGES[0], "annotations": [], "audio": None, "nonesuch": 1}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": MESSAGES[0]["content"], "cache_control": {"type": "ephemeral"}, "nonesuch": 1}]}]}),
    ("/v1/chat/completions", {"reasoning": {"effort": "low", "nonesuch": 1}, "response_format": {"type": "text"}}),
    ("/v1/responses", {"text": {"format": {"type": "text", "nonesuch": 1}, "verbosity": "medium", "nonesuch": 1},
                       "reasoning": {"summary": "auto", "nonesuch": 1}, "truncation": "disabled"}),
    ("/v1/responses", {"input": [{"type": "message", "role": "user", "id": "a", "status": "completed", "content": [
        {"type": "input_text", "text": MESSAGES[0]["content"], "nonesuch": 1}]}]}),
    ("/v1/messages", {"thinking": {"type": "disabled", "display": "omitted"}, "output_config": {"task_budget": {}},
                      "tool_choice": {"type": "auto", "nonesuch": 1}}),
]  # fmt: skip
IDS = {"id", "created", "created_at", "metadata"}  # what differs from one answer to the next, and what comes back


@pytest.fixture
async def raw(tokenizer: Any) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        running_gateway(router_of_chats(tokenizer)) as address,
        aiohttp.ClientSession(address, timeout=aiohttp.ClientTimeout(20)) as session,
    ):
        yield session


async def ask(raw: aiohttp.ClientSession, path: str, fields: Any) -> tuple[int, Any]:
    async with raw.post(path, json=PATHS[path][0] | fields) as response:
        return response.status, await response.json()


def text_of(answer: Any) -> Any:
    """Return the answer without names and times."""
    if isinstance(answer, dict):
        return {key: text_of(value) for key, value in answer.items() if key not in IDS}
    return [text_of(value) for value in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize(("path", "fields"), [*((path, HARMLESS) for path in PATHS), *PARTS])
async def test_a_field_that_changes_nothing_is_accepted(raw: aiohttp.ClientSession, path: str, fields: Any) -> None:
    plain, answered = await ask(raw, path, {}), await ask(raw, path, fields)
    assert answered[0] == 200, answered[1]
    told = ("text", "reasoning", "store")  # Responses repeats these
    for each in (plain[1], answered[1]):
        each.update({name: None for name in told if name in each})
    assert text_of(answered[1]) == text_of(plain[1])


@pytest.mark.parametrize("path", PATHS)
async def test_a_field_that_would_change_the_answer_is_refused_by_its_name(
    raw: aiohttp.ClientSession, path: str
) -> None:
    for name, neutral in _NOT_BUILT.items():
        if name in PATHS[path][1].model_fields:
            continue
        status, answer = await ask(raw, path, {name: {"some": "thing"}})
        assert status == 400 and f"{name}: " in answer["error"]["message"], (name, answer)
        assert path == "/v1/messages" or (answer["error"]["param"], answer["error"]["code"]) == (
            name,
            "unsupported_parameter",
        )
        for value in itertools.chain((None,), neutral):
            status, answer = await ask(raw, path, {name: value})
            assert status == 200, (name, value, answer)
