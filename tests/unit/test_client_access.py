"""The HTTP endpoints with keys: who gets in, what limits say, what is counted, and what the log tells."""

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from orchestrator.api.http_requests import hosts_of
from orchestrator.requests.callers import Callers
from orchestrator.requests.keys import Key, digest_of
from specahead.wire.errors import ResourceExhausted
from tests.unit.gateway import MODEL, ScriptedRouter, running_gateway

ASK = {"model": MODEL, "prompt": "The secret of the sea", "max_tokens": 8}


def callers(**limits: int) -> Callers:
    return Callers([Key("alice", digest_of("alice's key"), **limits), Key("bob", digest_of("bob's key"))])


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}'s key"}


def samples(text: str) -> dict[str, float]:
    """The samples of an exposition by name with labels."""
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


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

    router.stream = stream  # type: ignore[method-assign]
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


# What the dashboards in vLLM's sources draw, but for iteration_tokens_total: a gateway sees no steps.
_HISTOGRAMS = (
    *("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    "request_time_per_output_token_seconds",
)
DRAWN = (
    *("generation_tokens_total", "prompt_tokens_total", "request_success_total"),
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *(f"{name}_{part}" for name in _HISTOGRAMS for part in ("bucket", "sum", "count")),
)


async def test_what_vllms_dashboards_draw_is_there(router: ScriptedRouter) -> None:
    async with running_gateway(router, callers=callers()) as url:
        client = Client(url, "bob")
        await client.post("/v1/completions", json=ASK)
        found = samples((await client.get("/metrics")).text)
    for name in DRAWN:
        assert any(sample.startswith(f"vllm:{name}{{") for sample in found), name
    pace = found[f'vllm:request_time_per_output_token_seconds_count{{model_name="{MODEL}"}}']
    assert pace == found[f'vllm:request_max_num_generation_tokens_count{{model_name="{MODEL}"}}'] == 1


async def test_refused_requests_are_counted_apart(router: ScriptedRouter) -> None:
    async with running_gateway(router, callers=callers()) as url:
        client = Client(url, "bob")
        await client.post("/v1/completions", json=ASK)
        await client.post("/v1/completions", json=ASK, headers=bearer("eve"))
        await client.post("/v1/completions", json=ASK | {"temperature": 9})
        await client.post("/v1/completions", data="no json", headers={"content-type": "application/json"})
        router.refusal = ResourceExhausted("no place is free")
        full = await client.post("/v1/completions", json=ASK)
        assert (full.status, full.headers["Retry-After"]) == (429, "1")
        text = (await client.get("/metrics")).text
    found = samples(text)
    label = f'model_name="{MODEL}"'
    for prefix in ("specahead", "vllm"):
        assert found[f'{prefix}:request_success_total{{finished_reason="length",{label}}}'] == 1
        assert found[f"{prefix}:generation_tokens_total{{{label}}}"] == 8
        assert found[f"{prefix}:inter_token_latency_seconds_count{{{label}}}"] == 6
        assert found[f"{prefix}:time_to_first_token_seconds_count{{{label}}}"] == 1
        assert found[f"{prefix}:e2e_request_latency_seconds_count{{{label}}}"] == 1
        assert found[f"{prefix}:request_queue_time_seconds_count{{{label}}}"] == 1
        assert found[f"{prefix}:num_requests_waiting{{{label}}}"] == 0
        assert found[f"{prefix}:num_preemptions_total{{{label}}}"] == 1
        assert "# TYPE " + prefix + ":generation_tokens_total counter" in text
    assert found[f'specahead:request_refused_total{{{label},reason="invalid_api_key"}}'] == 1
    assert found[f'specahead:request_refused_total{{{label},reason="rate_limit_exceeded"}}'] == 1
    refusals = [value for name, value in found.items() if name.startswith("specahead:request_refused_total")]
    assert sum(refusals) == 4


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


async def test_the_text_is_logged_where_that_is_asked_for(
    router: ScriptedRouter, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "orchestrator"):
        async with running_gateway(router, log_text=True) as url:
            client = Client(url)
            await client.post("/v1/completions", json=ASK)
    taken, done = (vars(record) for record in caplog.records if record.name == "orchestrator.sessions.observer")
    assert taken["prompt"].endswith(ASK["prompt"])
    assert done["text"].startswith("The sea")


async def test_refusals_are_at_most_a_line_a_second_and_reason(
    router: ScriptedRouter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest one of each second is written, with the number of those that were left out; none is uncounted."""
    monkeypatch.setattr("specahead.config.logs._FREQUENT_SECONDS", 0.3)
    async with running_gateway(router) as url, aiohttp.ClientSession(url) as session:
        began = time.monotonic()
        for number in range(100):
            await session.post("/v1/completions", json=ASK | {"temperature": 9}, headers={"x-request-id": f"r{number}"})
            await session.post("/v1/completions", json=ASK | {"model": "other"})
        seconds = time.monotonic() - began
        await asyncio.sleep(0.7)
    refused = [vars(record) for record in caplog.records if record.getMessage() == "request refused"]
    for code in ("invalid_value", "model_not_found"):
        lines = [record for record in refused if record["code"] == code]
        assert 2 <= len(lines) <= seconds / 0.3 + 2
        assert len(lines) + sum(line.get("left_out") or 0 for line in lines) == 100
    assert [line["request"] for line in refused if line["code"] == "invalid_value"][-1] == "r99"


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
    """Else a page whose name was made to lead here (DNS rebinding) could use the server."""
    async with running_gateway(router, allowed_hosts="Models.example") as url, aiohttp.ClientSession(url) as session:
        for path in ("/dashboard", "/v1/models"):
            async with session.get(path, headers={"Host": host}) as answer:
                assert answer.status == status
                if status == 421:
                    error = (await answer.json())["error"]
                    assert error["code"] == "misdirected_request" and "allowed_hosts" in error["message"]


def test_hosts_are_looked_at_on_loopback_alone() -> None:
    assert hosts_of("127.0.0.1", "a.example, B.example") == ("a.example", "b.example")
    assert hosts_of("localhost", "*") is hosts_of("0.0.0.0", "") is hosts_of("models.example", "") is None


async def test_requests_are_their_keys_else_their_addresses(router: ScriptedRouter) -> None:
    """By this a target shares its places; a trusted proxy says which address it is."""
    said = {"X-Forwarded-For": "203.0.113.7"}
    async with running_gateway(router, callers=callers(), trusted_proxies="127.0.0.1") as url:
        await Client(url, "alice").post("/v1/completions", json=ASK, headers=bearer("alice") | said)
    for proxies in ("127.0.0.1", ""):
        async with running_gateway(router, trusted_proxies=proxies) as url:
            await Client(url).post("/v1/completions", json=ASK, headers=said)
    assert [record.asked.client for record in router.opened] == ["key alice", "203.0.113.7", "127.0.0.1"]
    assert router.opened[1].to_open().client == "203.0.113.7"
