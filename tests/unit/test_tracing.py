"""OpenTelemetry traces, gathered in memory: which requests have spans, whose children they are, what they say."""

import sys
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from config import SettingsError
from engine.sampling import Sampling
from orchestrator.callers import Callers
from orchestrator.keys import Key, digest_of
from orchestrator.ledger import Record
from orchestrator.tracing import RequestTrace, tracing
from tests.unit.gateway import MODEL, ScriptedRouter, running_gateway
from wire.errors import Unavailable
from wire.messages import At, Commit, Exactness

ASK = {"model": MODEL, "prompt": "The secret of the sea", "max_tokens": 8}
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLERS = Callers([Key("alice", digest_of("k"))])


async def spans_of(tokenizer: Any, share: float, **headers: str) -> list[ReadableSpan]:
    """The spans of one completion, in the order in which they began."""
    exporter = InMemorySpanExporter()
    with tracing(share, exporter) as tracer:
        async with (
            running_gateway(ScriptedRouter(tokenizer), callers=CALLERS, tracer=tracer) as url,
            aiohttp.ClientSession(url, headers={"Authorization": "Bearer k"} | headers) as client,
            client.post("/v1/completions", json=ASK) as response,
        ):
            assert response.status == 200
            await response.read()
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


async def test_a_request_is_followed_round_by_round(tokenizer: Any) -> None:
    """As part of its caller's trace, though no other request is sampled."""
    request, *rounds = await spans_of(tokenizer, 1e-9, traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
    assert request.name == "request" and request.attributes is not None and request.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    assert request.attributes["specahead.key"] == "alice"
    assert request.attributes["gen_ai.usage.output_tokens"] == 8
    assert [span.name for span in rounds] == ["round"] * 4
    for span in rounds:
        assert span.parent is not None and span.parent.span_id == request.context.span_id
        assert span.attributes is not None
        assert (span.attributes["specahead.drafted"], span.attributes["specahead.accepted"]) == (4, 1)
    assert "secret" not in str([span.attributes for span in (request, *rounds)])


async def test_what_is_not_sampled_has_no_spans(tokenizer: Any) -> None:
    assert await spans_of(tokenizer, 0) == []
    assert await spans_of(tokenizer, 1, traceparent=f"00-{TRACE}-b7ad6b7169203331-00") == []
    assert len(await spans_of(tokenizer, 1)) == 5


def record() -> Record:
    return Record("s", [1, 2], 2, 4, [], Sampling(0.0), Exactness.EXACT)


def test_the_parts_of_a_round_lie_in_their_order_within_it() -> None:
    exporter = InMemorySpanExporter()
    with tracing(1, exporter) as tracer:
        trace = RequestTrace(tracer, record(), "")
        seconds = {"queue_seconds": 2.0, "prefill_seconds": 1.0, "wait_seconds": 2.0, "draft_seconds": 3.0}
        commit = Commit(At("s", 0, 0, 2), [5], verify_seconds=4.0, **seconds)  # type: ignore[arg-type]
        trace.round(commit, 10)
        trace.end(record(), "length")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    end = spans["round"].end_time
    assert end is not None
    times = {
        name: ((span.start_time or 0) - end, (span.end_time or 0) - end)
        for name, span in spans.items()
        if name != "request"
    }
    assert {name: (round(a / 1e9), round(b / 1e9)) for name, (a, b) in times.items()} == {
        "round": (-10, 0),
        "target.verify": (-4, 0),
        "target.wait": (-6, -4),
        "draft.round": (-7, -4),
        "target.prefill": (-7, -6),
        "target.queue": (-9, -7),
    }


def test_a_request_that_breaks_off_is_marked() -> None:
    exporter = InMemorySpanExporter()
    with tracing(1, exporter) as tracer:
        RequestTrace(tracer, record(), "").end(record(), Unavailable("the target was lost"))
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "service_unavailable")


def test_without_opentelemetry_the_setting_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"specahead\[otel\]"), tracing(0.5):
        pass
