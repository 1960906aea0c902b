"""What one HTTP client can take from the others: connections, time and memory, all of it bounded."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from orchestrator.api.http_server import Connections
from orchestrator.requests.access import Proxies
from orchestrator.text.special_tokens import TextEncoder
from orchestrator.text.text_pieces import PieceEncoder
from tests.unit.gateway import LIMITS, MODEL, ScriptedRouter, running_gateway

COMPLETIONS = "/v1/completions"
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
)
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked")


@contextlib.asynccontextmanager
async def connected(address: str, data: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which so much was sent."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        await writer.drain()
        yield reader
    finally:
        writer.close()


async def is_closed(reader: asyncio.StreamReader, seconds: float = 20) -> bool:
    """Whether the server ends a connection within this time, which is long enough for a busy machine."""
    try:
        async with asyncio.timeout(seconds):
            return await reader.read(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


async def ask(address: str, **fields: Any) -> int:
    async with aiohttp.ClientSession(address) as session:
        answer = await session.post(COMPLETIONS, json={"prompt": "The sea", "max_tokens": 4} | fields)
        return answer.status


@pytest.mark.parametrize("proxies", ["", "127.0.0.1"])
async def test_connections_of_an_address_are_limited_and_one_line_says_so(
    tokenizer: Any, proxies: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of all for an address, but for a trusted proxy's. Those without a request are closed after a while."""
    router = ScriptedRouter(tokenizer)
    router.gate.clear()
    request = HEAD.replace(b"100", b"21") + b'{"prompt": "The sea"}'
    connections = Connections(6, patience=2, proxies=Proxies(proxies))
    places = 6 if proxies else 3
    async with running_gateway(router, connections=connections) as address, contextlib.AsyncExitStack() as opened:
        readers = [await opened.enter_async_context(connected(address, request)) for _ in range(places - 1)]
        silent = await opened.enter_async_context(connected(address))
        for _ in range(2):
            assert await is_closed(await opened.enter_async_context(connected(address, request)))
        assert len([r for r in caplog.records if "too many HTTP connections" in r.getMessage()]) == 1
        assert await is_closed(silent)
        router.gate.set()
        assert [(await reader.readline()).split()[1] for reader in readers] == [b"200"] * (places - 1)
        assert await ask(address) == 200
    assert not connections.by_address


async def test_answers_that_are_not_read_keep_nobody_out(tokenizer: Any) -> None:
    router = ScriptedRouter(tokenizer)
    router.answer = "The sea was calm. " * 400
    connections = Connections(6, patience=0.5)
    fields = b'{"prompt": "The sea", "max_tokens": 1900, "n": 32, "stream": true, "return_token_ids": false}'
    request = HEAD.replace(b"100", str(len(fields)).encode()) + fields
    async with running_gateway(router, connections=connections) as address, contextlib.AsyncExitStack() as opened:
        host, port = address.removeprefix("http://").split(":")
        for _ in range(3):
            line = opened.enter_context(socket.socket())
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            line.connect((host, int(port)))
            line.sendall(request)
        async with asyncio.timeout(60):
            while len(router.opened) < 3 * 32 or connections.by_address.total():
                await asyncio.sleep(0.05)
        assert await ask(address) == 200


@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", HEAD, HEAD + b'{"prompt": '])
async def test_a_request_that_does_not_come_is_not_waited_for(
    tokenizer: Any, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    connections = Connections(100, patience=1)
    async with running_gateway(ScriptedRouter(tokenizer), connections=connections) as address:
        async with connected(address, data) as reader:
            assert not await is_closed(reader, 0.1)
            assert await is_closed(reader)
        assert await ask(address) == 200
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("data", [b"GET /", GET + b"A: ", CHUNKED + b"9;a=", CHUNKED + b"0\r\nA: "])
async def test_a_head_without_an_end_is_not_gathered(tokenizer: Any, data: bytes) -> None:
    async with running_gateway(ScriptedRouter(tokenizer), connections=Connections(100)) as address:
        async with connected(address, data + b"1" * 60_000) as reader:
            assert not await is_closed(reader, 0.1)
        async with connected(address, data + b"1" * 1_000_000) as reader:
            assert await is_closed(reader)
        assert await ask(address) == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        GET + b"A b: c\r\n\r\n",
        HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\n",
        HEAD.replace(b"100", b"-1"),
        CHUNKED + b"g\r\n",
    ],
)
async def test_what_is_no_http_is_refused(tokenizer: Any, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with running_gateway(ScriptedRouter(tokenizer)) as address, connected(address, data) as reader:
        assert (await reader.readline()).split()[1] == b"400"
        assert await ask(address) == 200
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_request_that_takes_long_to_answer_is_waited_for(tokenizer: Any) -> None:
    router = ScriptedRouter(tokenizer)
    router.gate.clear()
    async with running_gateway(router, connections=Connections(100, patience=0.2)) as address:
        asking = asyncio.create_task(ask(address))
        await asyncio.sleep(0.6)
        router.gate.set()
        assert await asking == 200


async def test_a_body_beyond_the_context_is_refused_unread(tokenizer: Any) -> None:
    async with running_gateway(ScriptedRouter(tokenizer)) as address:
        started = time.monotonic()
        assert await ask(address, prompt=[1] * 2_000_000) == 413
        assert time.monotonic() - started < 10
        assert await ask(address, prompt=[1] * LIMITS.max_context) == 400
        assert await ask(address, prompt=[1] * (LIMITS.max_context - 4)) == 200


async def test_the_refusal_of_a_long_body_waits_for_none_of_it(tokenizer: Any) -> None:
    head = HEAD.replace(b"Content-Length: 100", b"Content-Length: 100000000")
    async with running_gateway(ScriptedRouter(tokenizer)) as address, connected(address, head) as reader:
        async with asyncio.timeout(20):
            assert (await reader.readline()).split()[1] == b"413"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_the_refusal_of_a_long_body_has_the_form_of_its_api(tokenizer: Any, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "a" * 300_000}], "max_tokens": 5}
    async with (
        running_gateway(ScriptedRouter(tokenizer)) as address,
        aiohttp.ClientSession(address) as session,
        session.post(path, json=body) as response,
    ):
        error = (await response.json())["error"]
    assert response.status == 413 and "the most for this model's context is" in error["message"]
    assert error["type"] == ("request_too_large" if path == "/v1/messages" else "invalid_request_error")


async def test_where_all_is_full_a_request_is_refused_before_it_is_parsed(tokenizer: Any) -> None:
    router = ScriptedRouter(tokenizer)
    router.full = 3
    async with running_gateway(router) as address, aiohttp.ClientSession(address) as session:
        headers = {"Content-Type": "application/json", "X-Request-Id": "mine"}
        for connection in ("keep-alive", "keep-alive", "close"):
            headers["Connection"] = connection
            async with session.post(COMPLETIONS, data=b"{" * 100_000, headers=headers) as answer:
                assert answer.status == 429 and "queues of all targets" in (await answer.json())["error"]["message"]
                assert (answer.headers["Retry-After"], answer.headers["X-Request-Id"]) == ("3", "mine")
        async with session.post("/tokenize", json={"prompt": "The sea"}) as answer:
            assert answer.status == 200
        async with session.get("/metrics") as answer:
            assert (
                f'request_refused_total{{model_name="{MODEL}",reason="rate_limit_exceeded"}} 3.0' in await answer.text()
            )
        router.full = 0
        async with session.post(COMPLETIONS, json={"prompt": "The sea"}) as answer:
            assert answer.status == 200


CHAT = [{"role": "user", "content": "The quick brown fox. " * 5000}]
TOO_LONG = {
    "/tokenize": {"prompt": CHAT[0]["content"]},
    "/v1/completions": {"prompt": ["short", CHAT[0]["content"]]},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": CHAT[0]["content"]},
}


@pytest.mark.parametrize("path", TOO_LONG)
async def test_a_text_beyond_the_context_is_refused(tokenizer: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is tokenized, where its length shows it."""
    async with running_gateway(ScriptedRouter(tokenizer)) as address, aiohttp.ClientSession(address) as session:

        async def refuse(fields: dict[str, Any]) -> str:
            async with session.post(path, json=fields) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["code"]) == (400, "context_length_exceeded")
                return str(error["message"])

        shorter = json.loads(json.dumps(TOO_LONG[path]).replace("The quick brown fox. " * 2000, ""))
        assert "characters" not in await refuse(shorter)
        monkeypatch.setattr(PieceEncoder, "encode", lambda self, text: pytest.fail("tokenized"))
        monkeypatch.setattr(TextEncoder, "encode", lambda self, text, _: [1] if len(text) < 99 else pytest.fail(text))
        assert "characters" in await refuse(TOO_LONG[path])
        async with session.post("/tokenize", json={"prompt": "The sea"}) as answer:
            assert answer.status == 200


async def test_long_texts_are_tokenized_one_after_the_other_and_hold_up_no_shorter_one(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = {"long": 0, "shorter": 0}
    most = dict(running)
    free = threading.Event()
    lock = threading.Lock()

    def encode(self: TextEncoder, text: str, special: bool) -> list[int]:
        if len(text) < 4096:
            return [1]
        kind = "long" if len(text) > 64 << 10 else "shorter"
        with lock:
            running[kind] += 1
            most[kind] = max(most[kind], running[kind])
        assert free.wait(60) if kind == "long" else time.sleep(0.05) is None
        with lock:
            running[kind] -= 1
        return [1, 2]

    monkeypatch.setattr(TextEncoder, "encode", encode)
    limits = replace(LIMITS, max_context=4096)
    async with running_gateway(ScriptedRouter(tokenizer), limits) as address, aiohttp.ClientSession(address) as session:

        async def tokenize(size: int) -> int:
            async with session.post("/tokenize", json={"prompt": "x" * size}) as answer:
                return int((await answer.json())["count"])

        long = [asyncio.create_task(tokenize(70_000)) for _ in range(8)]
        async with asyncio.timeout(30):
            assert await asyncio.gather(*(tokenize(5000) for _ in range(8))) == [2] * 8
            assert await tokenize(10) == 1
        assert not any(task.done() for task in long)
        free.set()
        assert await asyncio.gather(*long) == [2] * 8
    assert most == {"long": 1, "shorter": 2}
