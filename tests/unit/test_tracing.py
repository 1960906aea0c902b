"""OpenTelemetry traces, gathered in memory: which requests have spans, whose children they are, what they say."""

from typing import Any

import aiohttp
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orchestrator.requests.callers import Callers
from orchestrator.requests.keys import Key, digest_of
from orchestrator.sessions.tracing import tracing
from tests.programs import run_program
from tests.unit.gateway import MODEL, ScriptedRouter, running_gateway

ASK = {"model": MODEL, "prompt": "The secret of the sea", "max_tokens": 8}
TRACE = "0af7651916cd43dd8448eb211c80319c"
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
    """As part of its caller's trace, though no other request is sampled."""
    router = ScriptedRouter(tokenizer)
    request, *rounds = await spans_of(router, 1e-9, traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
    assert request.name == "request" and request.attributes is not None and request.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    assert request.attributes["specahead.key"] == "alice"
    assert request.attributes["gen_ai.usage.output_tokens"] == 8
    assert [span.name for span in rounds] == ["round"] * 4
    for span in rounds:
        assert span.parent is not None and span.parent.span_id == request.context.span_id
        assert (span.attributes["specahead.drafted"], span.attributes["specahead.accepted"]) == (4, 1)
    assert "secret" not in str([span.attributes for span in (request, *rounds)])


def test_a_launch_without_what_traces_need_says_so_before_it_starts_anything() -> None:
    program = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\nfrom specahead.cli.main import main\nmain(sys.argv[1:])"
    )
    done = run_program(program, "serve", "--port", "0", "--grpc-port", "0", "--logging", '{"trace_share": 0.1}')
    assert done.returncode == 1 and "starting Ray" not in done.stderr
    assert done.stderr.endswith(": pip install 'specahead[otel]'\n") and "error: traces need" in done.stderr
