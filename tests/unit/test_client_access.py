"""The HTTP endpoints with keys: who gets in, what limits say, what is counted, and what the log tells."""

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from orchestrator.requests.callers import Callers
from orchestrator.requests.keys import Key, digest_of
from tests.unit.gateway import MODEL, ScriptedRouter, running_gateway

ASK = {"model": MODEL, "prompt": "The secret of the sea", "max_tokens": 8}


def callers(**limits: int) -> Callers:
    return Callers([Key("alice", digest_of("alice's key"), **limits), Key("bob", digest_of("bob's key"))])


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}'s key"}


class Client:
    """Asks a gateway; what it answers is read to its end."""

    def __init__(self, url: str, name: str = "") -> None:
        self._url, self._headers = url, bearer(name) if name else {}

    async def get(self, path: str, headers: dict[str, str] | None = None) -> "Answer":
        return await self._ask("GET", path, headers)

    async def post(self, path: str, headers: dict[str, str] | None = None, **content: Any) -> "Answer":
        return await self._ask("POST", path, headers, **content)

    async def _ask(self, method: str, path: str, headers: dict[str, str] | None, **content: Any) -> "Answer":
        async with (
            aiohttp.ClientSession(headers=self._headers) as session,
            session.request(method, self._url + path, headers=headers, **content) as response,
        ):
            return Answer(response.status, dict(response.headers), await response.text())


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


@pytest.fixture
def router(tokenizer: Any) -> ScriptedRouter:
    return ScriptedRouter(tokenizer)


async def test_all_but_probes_need_a_key(router: ScriptedRouter) -> None:
    async with running_gateway(router, callers=callers()) as url:
        client = Client(url)
        for path in ("/v1/models", "/metrics", "/docs", "/no/such/path"):
            assert (await client.get(path)).status == 401, path
            assert (await client.get(path, headers=bearer("eve"))).status == 401, path
            assert (await client.get(path, headers=bearer("alice"))).status != 401, path
        assert (await client.get("/health")).status == 200
        for headers, words in (({}, "no API key"), (bearer("eve"), "not allowed here")):
            refused = await client.post("/v1/completions", json=ASK, headers=headers)
            error = refused.json()["error"]
            assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            assert words in error["message"]
        assert router.opened == []
        assert (await client.post("/v1/completions", json=ASK, headers=bearer("bob"))).status == 200


async def test_requests_at_once_are_counted_until_their_stream_ends(router: ScriptedRouter) -> None:
    gate = asyncio.Event()
    stream_at_once = router.stream

    async def stream(record: Any) -> Any:
        async for item in stream_at_once(record):
            yield item
            await gate.wait()

    router.stream = stream
    async with running_gateway(router, callers=callers(requests=1)) as url:
        client = Client(url, "alice")
        async with aiohttp.ClientSession(url, headers=bearer("alice")) as session:
            first = await session.post("/v1/completions", json=ASK | {"stream": True})
            refused = await client.post("/v1/completions", json=ASK)
            assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert (await client.get("/v1/models")).status == 200
            gate.set()
            assert "[DONE]" in await first.text()
        assert (await client.post("/v1/completions", json=ASK)).status == 200
        assert (await client.post("/v1/completions", json=ASK, headers=bearer("bob"))).status == 200


async def test_tokens_a_minute_count_prompt_and_answer(router: ScriptedRouter) -> None:
    async with running_gateway(router, callers=callers(tokens_per_minute=10)) as url:
        client = Client(url, "alice")
        usage = (await client.post("/v1/completions", json=ASK)).json()["usage"]
        refused = await client.post("/v1/completions", json=ASK)
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) == pytest.approx((usage["total_tokens"] - 10 + 1) * 6, abs=2)


async def test_the_log_tells_who_and_why_and_never_what(
    router: ScriptedRouter, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "orchestrator"):
        async with running_gateway(router, callers=callers()) as url:
            client = Client(url, "alice")
            await client.post("/v1/completions", json=ASK)
            bad = ASK | {"stop": ["secret word"] * 99}
            await client.post("/v1/completions", json=bad, headers={"x-request-id": "mine"})
            await client.post("/v1/completions", json=ASK, headers=bearer("eve"))
    done, wrong, strange = (
        vars(record) for record in caplog.records if record.name == "orchestrator.sessions.observer"
    )
    assert (done["msg"], done["key"], done["outcome"], done["tokens"]) == ("request done", "alice", "length", 8)
    assert done["seconds"] >= done["first_token_seconds"] > 0
    assert (done["queue_seconds"], done["preemptions"]) == (0, 1)
    assert (wrong["msg"], wrong["key"], wrong["status"]) == ("request refused", "alice", 400)
    assert wrong["request"] == "mine"
    assert (strange["status"], strange["code"]) == (401, "invalid_api_key")
    said = json.dumps([vars(record) for record in caplog.records], default=str)
    assert "secret" not in said and "calm" not in said and "key\\u0027s" not in said


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST.", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("models.example", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("192.168.0.1", 421),
        ("[::1", 421),
        ("", 421),
    ],
)
async def test_on_loopback_another_host_is_refused(router: ScriptedRouter, host: str, status: int) -> None:
    """Otherwise a page whose name was made to lead here (DNS rebinding) could use the server."""
    async with running_gateway(router, allowed_hosts="Models.example") as url, aiohttp.ClientSession(url) as session:
        for path in ("/dashboard", "/v1/models"):
            async with session.get(path, headers={"Host": host}) as answer:
                assert answer.status == status
                if status == 421:
                    error = (await answer.json())["error"]
                    assert error["code"] == "misdirected_request" and "allowed_hosts" in error["message"]
