"""OpenTelemetry traces, gathered in memory: which requests have spans, whose children they are, what they say."""

import sys
from collections import defaultdict
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orchestrator.requests.callers import Callers
from orchestrator.requests.keys import Key, digest_of
from orchestrator.sessions.ledger import Record
from orchestrator.sessions.tracing import tracing
from specahead.config import SettingsError
from specahead.engine.sampling.distributions import Sampling
from specahead.wire.messages import Exactness, Open
from specahead.wire.tracing import service_spans
from tests.unit.clock import Clock
from tests.unit.gateway import MODEL, ScriptedRouter, running_gateway
from tests.unit.world import World

ASK = {"model": MODEL, "prompt": "The secret of the sea", "max_tokens": 8}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARTS = {"target.queue", "target.prefill", "target.verify", "draft.prefill", "draft.round"}
CALLERS = Callers([Key("alice", digest_of("k"))])


async def spans_of(router: ScriptedRouter, share: float, **headers: str) -> list[ReadableSpan]:
    """The gateway's spans of one completion, in the order in which they began."""
    exporter = InMemorySpanExporter()
    with tracing(share, exporter) as tracer:
        async with (
            running_gateway(router, callers=CALLERS, tracer=tracer) as url,
            aiohttp.ClientSession(url, headers={"Authorization": "Bearer k"} | headers) as client,
            client.post("/v1/completions", json=ASK) as response,
        ):
            assert response.status == 200
            await response.read()
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


async def test_a_request_is_followed_round_by_round(tokenizer: Any) -> None:
    """As part of its caller's trace, though no other request is sampled; and the session carries it to the target."""
    router = ScriptedRouter(tokenizer)
    request, *rounds = await spans_of(router, 1e-9, traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
    assert request.name == "request" and request.attributes is not None and request.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    assert request.attributes["specahead.key"] == "alice"
    (record,) = router.opened
    assert record.to_open().traceparent == f"00-{TRACE}-{request.context.span_id:016x}-01"
    assert request.attributes["gen_ai.usage.output_tokens"] == 8
    assert [span.name for span in rounds] == ["round"] * 4
    for span in rounds:
        assert span.parent is not None and span.parent.span_id == request.context.span_id
        assert span.attributes is not None
        assert (span.attributes["specahead.drafted"], span.attributes["specahead.accepted"]) == (4, 1)
    assert "secret" not in str([span.attributes for span in (request, *rounds)])


def record() -> Record:
    return Record(Open("s", [1, 2], 2, 4, [], Sampling(0.0), Exactness.EXACT))


def test_target_and_draft_add_their_spans_to_the_trace_that_a_session_carries(clock: Clock) -> None:
    """A prompt in several parts on both sides, each drafted and each verified round; of another session nothing."""
    exporter, parent = InMemorySpanExporter(), "b7ad6b7169203331"
    with service_spans("services", True, exporter) as spans:
        world = World(clock, spans=spans)
        world.attach()
        traced = world.open([3] * 60, 20, traceparent=f"00-{TRACE}-{parent}-01")
        world.open([5] * 60, 20)
        world.run()
    found: dict[str, list[ReadableSpan]] = defaultdict(list)
    for span in exporter.get_finished_spans():
        assert span.parent is not None and span.attributes is not None
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, parent)
        found[span.name].append(span)
    assert set(found) - {"target.wait"} == PARTS
    read = {name: sum(attribute(span, "tokens") for span in found[name]) for name in PARTS if "prefill" in name}
    assert read == {"target.prefill": 59, "draft.prefill": 59}
    verified = [
        tuple(attribute(span, of) for of in ("round", "drafted", "accepted")) for span in found["target.verify"]
    ]
    assert verified == [(c.at.round, c.drafted, c.accepted) for c in world.commits[traced]]
    drafted = {attribute(span, "round") for span in found["draft.round"]}
    assert drafted >= {commit.at.round for commit in world.commits[traced] if commit.drafted}


def attribute(span: ReadableSpan, name: str) -> Any:
    assert span.attributes is not None
    return span.attributes[f"specahead.{name}"]


def test_without_opentelemetry_the_setting_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"specahead\[otel\]"), tracing(0.5):
        pass
