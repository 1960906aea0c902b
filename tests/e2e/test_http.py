"""OpenAI-style HTTP, through the real `openai` package and through raw requests that no package would send."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from openai import OpenAI

from tests.client import metric, service_state, wait_for_sessions
from tests.stack import Stack

MODEL = "tiny-target"
PROMPT = "The old man looked at the sea and"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me of the sea."}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS: dict[str, Any] = {"max_tokens": 20_000, "extra_body": {"ignore_eos": True}}


@pytest.fixture
async def raw(stack: Stack) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(stack.http, headers=headers) as session:
        yield session


def complete(client: OpenAI, **fields: Any) -> Any:
    return client.completions.create(
        **({"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0} | fields)
    )


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**({"model": MODEL, "messages": MESSAGES, "temperature": 0} | fields))


# What is served.


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}])
def test_streamed_text_equals_plain_text(client: OpenAI, sampling: dict[str, Any]) -> None:
    """The text comes in pieces, the reason in the last; a chunk with usage and no choices follows on request."""
    plain = complete(client, **sampling)
    *chunks, last = complete(client, **sampling, stream=True, stream_options={"include_usage": True})
    assert len(chunks) > 3
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.total_tokens == plain.usage.total_tokens
    assert len({chunk.id for chunk in [*chunks, last]}) == 1

    chunks = list(complete(client, **sampling, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_a_seed_makes_sampling_reproducible(client: OpenAI) -> None:
    texts = [complete(client, temperature=1, seed=seed).choices[0].text for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_approximate(client: OpenAI) -> None:
    prompt = PROMPT * 100
    fields = [{"exactness": name, "return_speculation": True} for name in ("exact", "approximate")]
    exact, approximate = (complete(client, prompt=prompt, extra_body=each) for each in fields)
    assert approximate.usage.total_tokens == exact.usage.total_tokens
    assert approximate.usage.prompt_tokens_details.cached_tokens > 700  # the first request left their KV
    assert exact.speculation["kv_read_fraction"] == 1
    assert approximate.speculation["kv_read_fraction"] < 0.7
    assert approximate.speculation["announced_bytes"] > 0


def test_chat(client: OpenAI, tokenizer: Any) -> None:
    """The answer is the completion of the rendered template. In a stream the role comes first, and once."""
    plain = chat(client, max_completion_tokens=20)
    (choice,) = plain.choices
    assert (plain.object, choice.message.role, choice.finish_reason) == ("chat.completion", "assistant", "length")
    assert plain.usage.completion_tokens == 20
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert complete(client, prompt=rendered, max_tokens=20).choices[0].text == choice.message.content

    *chunks, last = chat(client, max_tokens=20, stream=True, stream_options={"include_usage": True})
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert (last.choices, last.usage.total_tokens) == ([], plain.usage.total_tokens)


# What is refused.


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 2} | fields).encode()


# tests/fuzz gives the application many more.
BAD_BODIES = {
    "cut off": (b'{"prompt": "a"', "JSON"),
    "not an object": (b'["prompt"]', "object"),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe"}', "JSON"),
    "lone surrogate": (b'{"prompt": "a\\ud800"}', "JSON"),
    "nested too deeply": (b'{"prompt": ' + b"[" * 100_000, "recursion"),
    "nested too deeply, ignored field": (body(user=0).replace(b"0", b"[" * 3000 + b"]" * 3000), "recursion"),
    "over-long token prompt": (body(prompt=[5] * 40_000), "context"),
    "over-long prompt": (body(prompt="a " * 100_000), "context"),
    "far over-long prompt": (body(prompt="a " * 1_060_000), "characters"),
    "NaN temperature": (b'{"prompt": "a", "temperature": NaN}', "temperature"),
}
BAD_CHATS = {
    "message text": ({"messages": ["hello"]}, "messages[0]"),
    "over-long": ({"messages": [{"role": "user", "content": "a " * 100_000}]}, "context"),
    "far over-long": ({"messages": [{"role": "user", "content": "a " * 1_060_000}]}, "characters"),
}


async def assert_refused(response: aiohttp.ClientResponse, reason: str) -> None:
    """The body is OpenAI's error object, and its message has the reason."""
    assert response.status == 400
    error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert reason in error["message"]
    assert error["type"] == "invalid_request_error"


# What it leaves behind.


def test_metrics_count_speculation(client: OpenAI, stack: Stack) -> None:
    """The counters grow by the figures that the answer itself reports."""
    names = ("drafts", "draft_tokens", "accepted_tokens")

    def read() -> tuple[list[float], list[float]]:
        sums = [metric(stack.http, f"spec_decode_num_{name}_total") for name in names]
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        return sums, [metric(stack.http, name, position=str(i)) for i in range(4)]

    (before, before_at) = read()
    summary = complete(client, max_tokens=60, extra_body={"return_speculation": True}).speculation
    (after, after_at) = read()
    grown = [b - a for a, b in zip(before, after, strict=True)]
    assert grown == [summary["rounds"], summary["drafted"], summary["accepted"]]
    assert all(value > 0 for value in grown)
    assert [b - a for a, b in zip(before_at, after_at, strict=True)] == summary["accepted_per_position"]


def test_a_client_that_leaves_its_stream_ends_the_request(client: OpenAI, stack: Stack) -> None:
    stream = complete(client, stream=True, **ENDLESS)
    next(iter(stream))
    wait_for_sessions(stack.http, 1)
    assert metric(stack.http, "num_requests_running") == 1
    stream.close()
    wait_for_sessions(stack.http, 0)


async def test_clients_that_leave_without_an_answer_end_their_requests(stack: Stack) -> None:
    """One closes its connection, one resets it."""
    host, port = stack.http.removeprefix("http://").split(":")
    data = body(max_tokens=20_000, ignore_eos=True)
    writers = []
    for _ in range(2):
        _, writer = await asyncio.open_connection(host, int(port))
        head = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
        writer.write(head.format(COMPLETIONS, len(data)).encode())
        writer.write(data)
        writers.append(writer)
    await asyncio.to_thread(wait_for_sessions, stack.http, 2)
    linger = bytes([1, 0, 0, 0, 0, 0, 0, 0])  # on, 0 s: closing resets
    writers[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    for writer in writers:
        writer.close()
    await asyncio.to_thread(wait_for_sessions, stack.http, 0)


async def test_bad_requests_do_no_harm_to_others(client: OpenAI, raw: aiohttp.ClientSession, stack: Stack) -> None:
    """A request gets its text while all bad bodies above are refused with the reason, and the strangest valid ones
    arrive."""
    fields: dict[str, Any] = {"max_tokens": 300, "extra_body": {"ignore_eos": True}}
    expected = (await asyncio.to_thread(complete, client, **fields)).choices[0].text
    names = [("target", "pid"), ("draft", "pid")]
    before = [service_state(stack.http, *name) for name in names]
    said = len(stack.output.read_text())

    running = asyncio.create_task(asyncio.to_thread(complete, client, **fields))
    chats = [(CHAT, json.dumps(fields).encode(), reason) for fields, reason in BAD_CHATS.values()]
    for path, data, reason in [*((COMPLETIONS, *each) for each in BAD_BODIES.values()), *chats]:
        async with raw.post(path, data=data) as response:
            await assert_refused(response, reason)
    for strange in (
        # Too small for the float32 in which it travels to the target.
        body(top_p=1e-300),
        body(temperature=1e-300),
        body(seed=2**64 - 1),
        body(prompt="\0"),
        body(prompt="\U0010ffff"),
    ):
        async with raw.post(COMPLETIONS, data=strange) as response:
            assert response.status == 200, await response.text()
    assert (await running).choices[0].text == expected
    assert [service_state(stack.http, *name) for name in names] == before
    lines = stack.output.read_text()[said:].splitlines()
    others = [line for line in lines if " orchestrator.sessions.observer: request " not in line]
    assert not others, "the log has only the lines of the requests"


async def test_the_dashboard_tells_of_a_session_while_it_runs(raw: aiohttp.ClientSession) -> None:
    """The dashboard shows the rounds of the session, and that they read a part of the KV."""
    ask = {"model": MODEL, "prompt": PROMPT * 60, "max_tokens": 150, "exactness": "approximate", "ignore_eos": True}
    watched = asyncio.Event()
    read = total = 0

    async def ended(events: aiohttp.ClientResponse) -> int:
        """Follow the session that comes; return how many tokens its rounds gave."""
        nonlocal read, total
        async for line in events.content:
            event = json.loads(line[6:]) if line.startswith(b"data: ") else {"type": ""}
            if event["type"] == "snapshot":  # the present state; every later event follows
                watched.set()
            if event["type"] == "rounds":
                for ended in event["ended"]:
                    read, total = ended["kv_read"], ended["kv_total"]
                    return int(ended["tokens"])
        raise AssertionError("the stream has ended")

    async with asyncio.timeout(120), raw.get("/dashboard/events") as events:
        following = asyncio.create_task(ended(events))
        await watched.wait()
        async with raw.post(COMPLETIONS, json=ask) as answer:
            assert answer.status == 200
        assert await following == 150
    assert 0 < read < total
