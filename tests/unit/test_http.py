"""The HTTP gateway over a target whose text the test writes: what it takes, what it answers, in OpenAI's words."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from orchestrator.api import event_stream
from orchestrator.api.completion_answer import CompletionAnswer
from orchestrator.requests.callers import Callers
from orchestrator.requests.keys import Key, digest_of
from orchestrator.requests.requests import CompletionRequest
from orchestrator.sessions.generation import Chunk
from orchestrator.text.replies import ReplyFormat, find_format
from specahead.engine.sampling.distributions import Sampling
from specahead.wire.errors import ResourceExhausted, Unavailable
from tests.unit.gateway import LIMITS, MODEL, ScriptedRouter, router_of_chats, running_gateway

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "Tell me of the sea."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def router(tokenizer: Any) -> ScriptedRouter:
    return router_of_chats(tokenizer)


@pytest.fixture
async def address(router: ScriptedRouter) -> AsyncIterator[str]:
    async with running_gateway(router, reply_format=ReplyFormat("hermes", "qwen3")) as found:
        yield found


@pytest.fixture
async def client(address: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
async def raw(address: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(address, timeout=aiohttp.ClientTimeout(20)) as session:
        yield session


async def chat(client: AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(**({"model": MODEL, "messages": MESSAGES} | fields))


async def complete(client: AsyncOpenAI, **fields: Any) -> Any:
    return await client.completions.create(**({"model": MODEL, "prompt": "The sea", "max_tokens": 100} | fields))


async def chunks_of(answer: Any, stream: bool) -> list[Any]:
    return [chunk async for chunk in answer] if stream else [answer]


# Completions.


async def test_several_prompts_and_choices(client: AsyncOpenAI, router: ScriptedRouter) -> None:
    """Prompt by prompt; a prompt's tokens count once, and a seed gives each choice of a prompt its own."""
    router.answer = ["one", "two", "three", "four"]
    answer = await complete(client, prompt=["The sea", "The old man"], n=2, seed=5)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "one"), (1, "two"), (2, "three"), (3, "four")]
    lengths = [len(router.tokenizer.encode(prompt)) for prompt in ("The sea", "The old man")]
    assert answer.usage.prompt_tokens == sum(lengths)
    assert answer.usage.completion_tokens == sum(len(record.generated) for record in router.opened)
    assert [record.asked.sampling.seed for record in router.opened] == [5, 6, 5, 6]


@pytest.mark.parametrize("form", ["ids", "lists of ids", "list of texts"])
async def test_forms_of_a_prompt(client: AsyncOpenAI, router: ScriptedRouter, form: str) -> None:
    ids = router.tokenizer.encode("The sea")
    prompt: Any = {"ids": ids, "lists of ids": [ids, ids], "list of texts": ["The sea"]}[form]
    answer = await complete(client, prompt=prompt)
    assert len(answer.choices) == (2 if form == "lists of ids" else 1)
    assert all(record.tokens[: record.prompt_tokens] == ids for record in router.opened)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_begins_with_the_prompt(client: AsyncOpenAI, router: ScriptedRouter, stream: bool) -> None:
    router.answer = " is calm."
    answer = await complete(client, prompt=router.tokenizer.encode("The sea"), echo=True, n=2, stream=stream)
    chunks = await chunks_of(answer, stream)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    for index in (0, 1):
        assert "".join(choice.text for choice in choices if choice.index == index) == "The sea is calm."


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_completion(client: AsyncOpenAI, router: ScriptedRouter, stream: bool) -> None:
    """As vLLM words them: for each token its text, where it begins, and the likely tokens, itself included."""
    router.answer = " is calm"
    answer = await complete(client, prompt="The sea", logprobs=2, echo=True, max_tokens=2, stream=stream)
    chunks = await chunks_of(answer, stream)
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    names = ("tokens", "token_logprobs", "text_offset", "top_logprobs")
    told = {name: [item for part in parts for item in getattr(part, name)] for name in names}
    decode = router.tokenizer.decode
    texts = [decode([token]) for text in ("The sea", " is calm") for token in router.tokenizer.encode(text)][: 2 + 2]
    assert told["tokens"] == texts
    assert told["text_offset"] == [len("".join(texts[:i])) for i in range(len(texts))]
    assert told["token_logprobs"] == [None, *[-1.0] * (len(texts) - 1)]
    assert told["top_logprobs"][0] is None
    for text, likely in zip(texts[1:], told["top_logprobs"][1:], strict=True):
        assert list(likely.items()) == list(({text: -1.0} | {decode([5]): -0.25, decode([6]): -2.75}).items())


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_chat(client: AsyncOpenAI, router: ScriptedRouter, stream: bool) -> None:
    router.answer = "The sea"
    answer = await chat(client, logprobs=True, top_logprobs=2, stream=stream)
    chunks = await chunks_of(answer, stream)
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    entries = [entry for part in parts for entry in part.content]
    texts = [router.tokenizer.decode([token]) for token in router.opened[0].generated]
    assert [entry.token for entry in entries] == texts
    assert [entry.logprob for entry in entries] == [-1.0] * len(texts)
    assert [bytes(entry.bytes).decode() for entry in entries] == texts
    assert [[likely.logprob for likely in entry.top_logprobs] for entry in entries] == [[-0.25, -2.75]] * len(texts)


async def test_the_bytes_of_log_probabilities_are_those_of_the_text(
    client: AsyncOpenAI, router: ScriptedRouter
) -> None:
    """Also where a character is split over tokens, none of which has a text of its own."""
    router.answer = "naïve 日本 🙂"
    entries = (await chat(client, logprobs=True, max_tokens=len(router.tokenizer.encode(router.answer)))).choices[0]
    told = entries.logprobs.content
    assert any(entry.token == "\ufffd" for entry in told)
    assert b"".join(bytes(entry.bytes) for entry in told).decode() == router.answer
    response = await client.responses.create(model=MODEL, input="Hello", include=["message.output_text.logprobs"])
    told = response.output[0].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in told).decode().startswith(router.answer)


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_told_if_asked_for(client: AsyncOpenAI, router: ScriptedRouter, stream: bool) -> None:
    """As vLLM names them: of each choice, and of the prompt once; log probabilities may name tokens so, too."""
    router.answer = f"It is so.{CALL}"
    fields = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    for ask, more in (complete, {"logprobs": 1, "echo": True}), (chat, {"logprobs": True, "tools": [WEATHER]}):
        answer = await ask(client, n=2, stream=stream, extra_body=fields, **more)
        chunks = await chunks_of(answer, stream)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        holders = choices if ask is complete else chunks
        prompts = [found for each in holders if (found := getattr(each, "prompt_token_ids", None))]
        records = router.opened[-2:]
        assert prompts == [records[0].tokens[: records[0].prompt_tokens]] * (2 if ask is complete else 1)
        for index, record in enumerate(records):
            mine = [choice for choice in choices if choice.index == index]
            assert [i for choice in mine for i in getattr(choice, "token_ids", [])] == record.generated
            told = [choice.logprobs for choice in mine if choice.logprobs is not None]
            named = [each for part in told for each in (part.tokens if ask is complete else part.content)]
            names = [each if isinstance(each, str) else each.token for each in named]
            tokens = record.tokens if ask is complete else record.generated
            assert names == [f"token_id:{token}" for token in tokens]
    answer = await complete(client)
    assert not hasattr(answer.choices[0], "token_ids") and answer.choices[0].logprobs is None


@pytest.mark.parametrize(("stream", "per_round"), [(False, 3), (True, 1), (True, 3), (True, 99)])
@pytest.mark.parametrize("kind", ["completion", "chat"])
async def test_a_stop_string_cuts_what_is_told_of_tokens(
    client: AsyncOpenAI, router: ScriptedRouter, kind: str, stream: bool, per_round: int
) -> None:
    """However many tokens a round has."""
    router.per_round = per_round
    ask: Any = (complete, {"logprobs": 1}) if kind == "completion" else (chat, {"logprobs": True})
    fields = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await ask[0](
        client, stop=[" calm"], stream=stream, extra_body={"return_token_ids": True}, **ask[1], **fields
    )
    chunks = await chunks_of(answer, stream)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    tokens = [token for choice in choices for token in choice.model_extra.get("token_ids") or []]
    assert router.tokenizer.decode(tokens) == "The sea was calm" == router.tokenizer.decode(router.opened[0].generated)
    told = [choice.logprobs for choice in choices if choice.logprobs is not None]
    entries = [entry for each in told for entry in (each.tokens if kind == "completion" else each.content)]
    assert len(entries) == len(tokens) == chunks[-1].usage.completion_tokens
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]


async def test_the_answer_tells_of_speculation_by_vllms_names(client: AsyncOpenAI) -> None:
    """There are 6 rounds with 4 drafted tokens each, one of which is accepted."""
    plain = await complete(client, max_tokens=12)
    assert not {"speculation", "metrics"} & plain.model_extra.keys()
    answer = await complete(client, max_tokens=12, extra_headers={"X-Return-Speculation": "1"})
    again = await complete(client, max_tokens=12, extra_body={"return_speculation": True})
    assert answer.speculation == again.speculation and answer.speculation["rounds"] == 6
    assert answer.metrics["speculative_decoding"] == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.25,
        "acceptance_histogram": [0, 6, 0, 0, 0],
        "num_spec_steps": 6,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 24,
        "num_spec_tokens": 4,
    }
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


# Chats.


async def test_a_default_chat_asks_for_no_more_than_the_target_has_room_for(router: ScriptedRouter) -> None:
    limits = replace(LIMITS, kv_tokens=500, defaults=Sampling(0.6, 0.9))
    async with running_gateway(router, limits) as address, aiohttp.ClientSession(address) as session:
        await session.post(CHAT, json={"messages": MESSAGES})
    (record,) = router.opened
    assert record.prompt_tokens + record.asked.max_tokens == 500
    assert (record.asked.sampling.temperature, record.asked.sampling.top_p) == (0.6, 0.9)


async def test_harmless_fields_are_taken(client: AsyncOpenAI) -> None:
    history = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Hello", "name": "me"},
        {"role": "assistant", "content": "Hello.", "refusal": None, "audio": None, "annotations": []},
        *MESSAGES,
    ]
    extras = {"metadata": {"a": "b"}, "user": "me", "service_tier": "auto", "prompt_cache_key": "x", "store": True}
    more = {"parallel_tool_calls": False, "seed": -1, "response_format": {"type": "text"}, "nonesuch": [1]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await chat(client, messages=history, extra_body=extras | more, stream=True, stream_options=options)
    assert [chunk async for chunk in stream][-1].usage.total_tokens > 0


async def test_a_template_gets_its_variables(client: AsyncOpenAI, router: ScriptedRouter) -> None:
    body = {"chat_template_kwargs": {"opening": " Well,"}, "add_generation_prompt": True}
    await chat(client, extra_body=body)
    await chat(
        client,
        messages=[*MESSAGES, {"role": "assistant", "content": "The sea"}],
        extra_body={"continue_final_message": True},
    )
    prompts = [router.tokenizer.decode(record.tokens[: record.prompt_tokens]) for record in router.opened]
    assert prompts[0].endswith("assistant: Well,")
    assert prompts[1].endswith("assistant: The sea")


async def test_reasoning_is_split_off(client: AsyncOpenAI, router: ScriptedRouter) -> None:
    """Where the model opens it, and where its template has opened it already."""
    thought = "<think>\nThe user asks of the sea.\n</think>\n\nIt is calm."
    for answer, options in (
        (thought, {}),
        (thought.removeprefix("<think>"), {"chat_template_kwargs": {"opening": "<think>\n"}}),
    ):
        router.answer = answer
        message = (await chat(client, extra_body=options)).choices[0].message
        assert (message.reasoning_content, message.content) == ("The user asks of the sea.", "It is calm.")
        deltas = [c.choices[0].delta async for c in await chat(client, extra_body=options, stream=True)]
        assert "".join(delta.content or "" for delta in deltas) == message.content
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content


# Tools.


async def test_a_conversation_with_tools(client: AsyncOpenAI, router: ScriptedRouter) -> None:
    """Several calls in an answer; their results go back, and the template sees tools, calls and results."""
    router.answer = f"I will look.\n{CALL}\n{CALL.replace('Rome', 'Oslo')}"
    answer = await chat(client, tools=[WEATHER], tool_choice="auto")
    (choice,) = answer.choices
    calls = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I will look.")
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
    assert len({call.id for call in calls}) == 2

    results = [{"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in calls]
    router.answer = "Sunny in both."
    answer = await chat(client, messages=[*MESSAGES, choice.message, *results], tools=[WEATHER])
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == ("Sunny in both.", None)
    prompt = router.tokenizer.decode(router.opened[-1].tokens)
    assert '"description": "Tells the weather."' in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}' in prompt
    assert prompt.count("tool: Sunny.") == 2


async def test_tool_calls_are_streamed(client: AsyncOpenAI, router: ScriptedRouter) -> None:
    router.answer = f"I will look.\n{CALL}{CALL}"
    chunks = [chunk async for chunk in await chat(client, tools=[WEATHER], stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I will look."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    arguments = ["", ""]
    for call in calls:
        arguments[call.index] += call.function.arguments
    assert arguments == ['{"city": "Rome"}'] * 2
    assert [call.function.name for call in calls if call.id] == ["weather", "weather"]
    assert len(calls) > 4, "the arguments come as they are written"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kept", "told"), [(0.9, True), (0.3, False)])
async def test_a_forced_call_that_is_cut_off_leaves_no_text(
    client: AsyncOpenAI, router: ScriptedRouter, kept: float, told: bool, stream: bool
) -> None:
    """If the name of a call has come, its arguments so far are told. The reason is the limit."""
    router.answer = CALL
    limit = int(kept * len(router.tokenizer.encode(CALL, add_special_tokens=False)))
    fields: Any = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": limit}
    if stream:
        chunks = [chunk async for chunk in await chat(client, **fields, stream=True)]
        content, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    else:
        (choice,) = (await chat(client, **fields)).choices
        content, reason, calls = choice.message.content, choice.finish_reason, choice.message.tool_calls or []
    assert not content and reason == "length"
    assert [call.function.name for call in calls if call.id] == ["weather"] * told
    arguments = "".join(call.function.arguments for call in calls)
    assert '{"city": "Rome"}'.startswith(arguments) and bool(arguments) == told


async def test_a_call_that_was_cut_off_is_taken_back(client: AsyncOpenAI, router: ScriptedRouter) -> None:
    """The template sees what there was of its arguments; what never was JSON is refused."""
    function = {"name": "weather", "arguments": '{"city": "Rome", "day'}
    answered = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    history = [*MESSAGES, answered, {"role": "tool", "tool_call_id": "1", "content": "Sunny."}]
    await chat(client, messages=history, tools=[WEATHER])
    record = router.opened[-1]
    prompt = router.tokenizer.decode(record.tokens[: record.prompt_tokens])
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in prompt
    function["arguments"] = "of Rome"
    with pytest.raises(openai.BadRequestError, match="the arguments are not valid JSON"):
        await chat(client, messages=history, tools=[WEATHER])


async def test_tools_need_a_format_that_is_known(router: ScriptedRouter) -> None:
    router.tokenizer.chat_template = "{{ messages[0].content }}"
    found = find_format(router.tokenizer, "auto", "auto")
    async with running_gateway(router, reply_format=found) as address, aiohttp.ClientSession(address) as session:
        answer = await session.post(CHAT, json={"messages": MESSAGES, "tools": [WEATHER]})
        error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, "tools") and "launch with --tool-call-parser" in error[
            "message"
        ]


# Errors, headers, and what comes while nothing comes.


async def test_a_context_that_is_too_long_is_refused_in_words_that_clients_know(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 2048 tokens") as refused:
        await chat(client, max_tokens=5000)
    assert (refused.value.code, refused.value.type) == ("context_length_exceeded", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"temperature": "hot"}, "temperature"),
        (COMPLETIONS, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logit_bias": {"4096": 1}}, "logit_bias"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"include_reasoning": False}, "include_reasoning"),
        (CHAT, {"logprobs": 2}, "logprobs"),
        (COMPLETIONS, {"prompt": {"text": "a"}}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [4096]}, "prompt"),
        (COMPLETIONS, {"stop": [""]}, "stop"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (CHAT, {"response_format": {"type": "json"}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (CHAT, {"guided_regex": "a"}, "guided_regex"),
        (CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        (COMPLETIONS, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (COMPLETIONS, {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
        (CHAT, {"tools": [WEATHER], "tool_choice": {"type": "function", "function": "weather?"}}, "tool_choice"),
        (CHAT, {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"n": 0}, "n"),
    ],
)
async def test_an_error_names_its_field(raw: aiohttp.ClientSession, path: str, fields: Any, param: str) -> None:
    body = {"prompt": "The sea", "messages": MESSAGES} | fields
    async with raw.post(path, json=body) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["code"] in ("invalid_value", "unsupported_parameter", "unsupported_value")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_of_another_type(raw: aiohttp.ClientSession, kind: str) -> None:
    skip = None if kind else ["Content-Type"]
    headers = {"Content-Type": kind} if kind else None
    async with raw.post(COMPLETIONS, data=b'{"prompt": "a"}', headers=headers, skip_auto_headers=skip) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(ResourceExhausted("full"), 429, "rate_limit_exceeded"), (Unavailable("away"), 503, "service_unavailable")],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_says_when_to_try_again(
    raw: aiohttp.ClientSession, router: ScriptedRouter, error: Any, status: int, code: str, stream: bool
) -> None:
    """With its status in a stream as well, since it comes at once."""
    router.refusal = error
    async with raw.post(CHAT, json={"messages": MESSAGES, "stream": stream}) as response:
        assert (response.status, response.headers["Retry-After"]) == (status, "1")
        assert (await response.json())["error"]["code"] == code


async def test_request_ids_go_in_and_out(raw: aiohttp.ClientSession, router: ScriptedRouter) -> None:
    """One that several requests have at once is no name of theirs, and still they can be found by it."""

    async def ask(given: str) -> tuple[str, str]:
        headers = {"X-Request-Id": given} if given else None
        async with raw.post(COMPLETIONS, json={"prompt": "The sea"}, headers=headers) as response:
            return response.headers["x-request-id"], (await response.json())["id"]

    given, named = zip(*await asyncio.gather(*(ask("mine") for _ in range(4))), strict=True)
    assert set(given) == {"mine"}
    assert len(set(named)) == 4 and all(name.startswith("cmpl-mine.") for name in named)
    made, name = await ask("")
    assert len(made) == 24 and name.startswith(f"cmpl-{made}.")
    assert (await ask("x" * 200))[0] == "x" * 100
    async with raw.get("/nonesuch") as response:
        assert response.status == 404 and response.headers["x-request-id"]


async def test_a_stream_is_kept_alive_while_nothing_comes(
    raw: aiohttp.ClientSession, router: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers and a comment at once, then comments; the answer and its end follow all the same."""
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.05)
    router.gate.clear()
    async with raw.post(CHAT, json={"messages": MESSAGES, "stream": True}) as response:
        lines = [await response.content.readuntil(b"\n\n") for _ in range(3)]
        assert all(line.startswith(b": ") for line in lines)
        router.gate.set()
        rest = (await response.read()).decode()
    assert rest.count("data: ") > 3 and rest.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_a_failure_after_the_status_line_is_told_in_the_stream(
    raw: aiohttp.ClientSession, router: ScriptedRouter, path: str
) -> None:
    router.gate.clear()
    router.refusal = Unavailable("the target was lost")
    body = {"messages": MESSAGES} if path == CHAT else {"input": "Hello"}
    async with raw.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200
        router.gate.set()
        *_, told = [line for line in (await response.text()).split("\n") if line.startswith("data: {")]
    event = json.loads(told.removeprefix("data: "))
    assert event.get("error", event)["code"] == "service_unavailable"
    assert event.get("error", event)["message"] == "the target was lost"


async def test_a_client_that_leaves_before_the_first_event_ends_its_request() -> None:
    ended = asyncio.Event()

    async def chunks() -> AsyncGenerator[Chunk]:
        try:
            await asyncio.sleep(60)
            yield Chunk("never")
        finally:
            ended.set()

    async def leave() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(60)  # nobody takes it

    request = CompletionRequest(prompt="The sea")
    stream = await event_stream.open_stream(CompletionAnswer("x", MODEL, request, [[5]], str), chunks())
    await stream({"type": "http", "asgi": {}}, leave, send)
    assert ended.is_set()


# The rest.


async def test_tokenize_and_back(raw: aiohttp.ClientSession, router: ScriptedRouter) -> None:
    async with raw.post("/tokenize", json={"prompt": "The sea", "return_token_strs": True}) as response:
        answer = await response.json()
    assert answer["tokens"] == router.tokenizer.encode("The sea")
    assert (answer["count"], answer["max_model_len"], len(answer["token_strs"])) == (2, 2048, 2)
    async with raw.post("/detokenize", json={"tokens": answer["tokens"]}) as response:
        assert await response.json() == {"prompt": "The sea"}
    async with raw.post("/tokenize", json={"messages": MESSAGES, "tools": [WEATHER]}) as response:
        text = router.tokenizer.decode((await response.json())["tokens"])
    assert text.startswith("tools: ") and text.endswith("user: Tell me of the sea.assistant:")


# Responses.


async def test_a_response_and_its_items_sent_along(client: AsyncOpenAI, router: ScriptedRouter) -> None:
    """Reasoning, text and calls are items; sent back with the calls' results, they are one turn of the assistant."""
    router.answer = f"<think>Where?</think>I will look.\n{CALL}"
    tool: Any = {"type": "function", **WEATHER["function"]}
    first = await client.responses.create(model=MODEL, instructions="Be brief.", input="Is it sunny?", tools=[tool])
    assert (first.status, first.object) == ("completed", "response")
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output_text == "I will look."
    call: Any = first.output[2]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    assert first.usage is not None and first.usage.output_tokens == len(router.opened[0].generated)
    reasoned = len(router.tokenizer.encode("<think>Where?"))
    assert abs(first.usage.output_tokens_details.reasoning_tokens - reasoned) < 3  # to the round

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    history: Any = [{"role": "user", "content": "Is it sunny?"}, *first.output, result]
    router.answer = "It is sunny."
    second = await client.responses.create(model=MODEL, input=history, tools=[tool])
    assert second.output_text == "It is sunny."
    prompt = router.tokenizer.decode(router.opened[1].tokens)
    assert f"user: Is it sunny?assistant: I will look.{CALL}tool: Sunny.assistant:" in prompt


async def test_a_response_is_streamed_as_events(client: AsyncOpenAI, router: ScriptedRouter) -> None:
    """The package builds from them what it gets in one piece."""
    router.answer = f"<think>Where?</think>I will look.\n{CALL}"
    tool: Any = {"type": "function", **WEATHER["function"]}
    events, text = [], ""
    async with client.responses.stream(model=MODEL, input="Is it sunny?", tools=[tool]) as stream:
        async for event in stream:
            events.append(event)
            text += event.delta if event.type == "response.output_text.delta" else ""
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert text == final.output_text == "I will look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.usage is not None and final.usage.total_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_response(client: AsyncOpenAI, router: ScriptedRouter, stream: bool) -> None:
    """Those of the message: tokens of reasoning and of calls have none."""
    router.answer = f"<think>Where is it?</think>I will look.\n{CALL}"
    tool: Any = {"type": "function", **WEATHER["function"]}
    fields: Any = {"input": "Is it sunny?", "tools": [tool], "top_logprobs": 2}
    include: Any = ["message.output_text.logprobs"]
    answer = await client.responses.create(model=MODEL, include=include, stream=stream, **fields)
    deltas, done = [], []
    if stream:
        async for event in answer:
            deltas += event.logprobs if event.type == "response.output_text.delta" else []
            done += event.logprobs if event.type == "response.output_text.done" else []
            answer = event.response if event.type == "response.completed" else answer
    assert answer.top_logprobs == 2
    entries = answer.output[1].content[0].logprobs
    text = "".join(entry.token for entry in entries)
    assert "I will look." in text and "Where" not in text and "weather" not in text
    assert all(entry.logprob == -1 and bytes(entry.bytes).decode() == entry.token for entry in entries)
    assert all([likely.logprob for likely in entry.top_logprobs] == [-0.25, -2.75] for entry in entries)
    if stream:
        assert [entry.token for entry in done] == [entry.token for entry in entries]
        assert [entry.token for entry in deltas] == [entry.token for entry in entries][: len(deltas)] != []
    router.answer = "The sea"
    plain = await client.responses.create(model=MODEL, input="Hello", include=include)
    record = router.opened[-1]
    told = plain.output[0].content[0].logprobs
    assert [entry.token for entry in told] == [router.tokenizer.decode([token]) for token in record.generated]
    without = await client.responses.create(model=MODEL, input="Hello", top_logprobs=2)
    assert without.output[0].content[0].logprobs == []
    assert not router.opened[-1].asked.wants_logprobs


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"input": [{"type": "item_reference"}]},
        {"n": 2},
        {"max_tokens": 5},
    ],
)
async def test_what_a_response_cannot_do_is_refused(raw: aiohttp.ClientSession, fields: Any) -> None:
    async with raw.post("/v1/responses", json={"input": "Hello"} | fields) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, next(iter(fields)))


# What is refused in words.


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content: type 'image_url' is not supported: the model reads text alone"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
         "input: type 'input_image' is not supported: the model reads text alone"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "web_search"}]},
         "tools[0]: 'web_search' is not supported: only functions are, which the client runs"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]},
         "tools[0]: 'web_search' is not supported: only functions are, which the client runs"),
        ("/v1/responses", {"input": [{"type": "web_search_call", "id": "x", "status": "completed"}]},
         "input: an item of type 'web_search_call' is not supported: messages, reasoning, function calls and "
         "their outputs are"),
    ],
)  # fmt: skip
async def test_what_is_not_text_is_refused_in_a_sentence(
    raw: aiohttp.ClientSession, path: str, fields: dict[str, Any], words: str
) -> None:
    async with raw.post(path, json=fields) as response:
        error = (await response.json())["error"]
    assert (response.status, error["message"], error["code"]) == (400, words, "unsupported_value")


async def test_paths_that_are_not_served_say_so(raw: aiohttp.ClientSession) -> None:
    for path, words in (
        ("/v1/embeddings", "generates text and has no embeddings"),
        ("/embeddings", "generates text and has no embeddings"),
        ("/v1/images/generations", "has no images"),
        ("/v1/audio/speech", "has no audio"),
        ("/v1/nonesuch", "there is nothing at /v1/nonesuch; /docs lists what is served"),
    ):
        async with raw.post(path, json={"input": "x"}) as response:
            assert response.status == 404 and words in (await response.json())["error"]["message"]


async def test_the_documents_of_the_api_need_no_network(raw: aiohttp.ClientSession) -> None:
    """All that the page loads is here, and nobody else learns of the schema."""
    async with raw.get("/docs") as response:
        page = await response.text()
    named = re.findall(r"""(?:src|href)="([^"]*)"|\burl: '([^']*)'""", page)
    loaded = [place for places in named for place in places if place]
    assert {place.rpartition("/")[2] for place in loaded} >= {"swagger-ui-bundle.js", "swagger-ui.css", "openapi.json"}
    for place in loaded:
        assert place.startswith("/")
        async with raw.get(place) as response:
            assert response.status == 200 and len(await response.read()) > 1000
    assert "//" not in page.replace("// ", "") and '"validatorUrl": null' in page


async def test_browsers_and_probes_are_answered(raw: aiohttp.ClientSession, router: ScriptedRouter) -> None:
    """HEAD has what GET has but the body; the root leads to the dashboard; pages of other origins get no permission."""
    async with raw.head("/v1/models") as head, raw.get("/v1/models", headers={"Origin": "https://a.example"}) as got:
        assert head.status == 200 and head.headers["Content-Length"] == got.headers["Content-Length"]
        assert await head.read() == b"" and "access-control-allow-origin" not in got.headers
    async with raw.get("/") as response:
        assert response.url.path == "/dashboard" and response.status == 200
    async with raw.options(CHAT) as response:
        assert response.status == 204 and "POST" in response.headers["Allow"]
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
           "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    async with (
        running_gateway(
            router, callers=Callers([Key("ann", digest_of("k"))]), allowed_origins="https://a.example"
        ) as address,
        aiohttp.ClientSession(address) as session,
    ):
        async with session.options(CHAT, headers=ask) as response:  # a browser sends no key with this
            assert response.status == 200 and "authorization" in response.headers["Access-Control-Allow-Headers"]
        async with session.get("/v1/models", headers=ask) as response:
            allowed = response.headers["Access-Control-Allow-Origin"]
            assert (response.status, allowed) == (401, "https://a.example")  # the page may read why
        async with session.get("/v1/models", headers=ask | {"Origin": "https://b.example"}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers
