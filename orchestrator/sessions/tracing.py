"""OpenTelemetry traces: a span for each request that is sampled and one for each of its rounds.

A round's span has the seconds that target and draft took for it as attributes. Spans go where OpenTelemetry's own
variables say (OTEL_EXPORTER_OTLP_ENDPOINT). Without traces OpenTelemetry is not imported.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.sessions.ledger import Record
from specahead.config import SettingsError
from specahead.wire.errors import ServiceError
from specahead.wire.messages import Commit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

NANO = 1_000_000_000

# The figures of a commit that are attributes of a round's span.
_FIGURES = (
    *("announced_bytes", "kv_tokens_read", "kv_tokens_total", "kv_tokens_fetched"),
    *("prefill_seconds", "wait_seconds", "draft_seconds", "verify_seconds"),
)


@contextlib.contextmanager
def tracing(share: float, exporter: "SpanExporter | None" = None) -> "Iterator[Tracer | None]":
    """Trace requests while the context lasts: this share of them, and those with a trace of their caller; 0: none.

    exporter: receives the spans, None for an OTLP collector. Raises SettingsError if OpenTelemetry is not installed.
    """
    if not share:
        yield None
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
    except ImportError as error:
        raise SettingsError(f"traces need OpenTelemetry ({error}): pip install 'specahead[otel]'") from None
    resource = Resource.create({"service.name": "specahead-orchestrator"})
    provider = TracerProvider(resource=resource, sampler=ParentBasedTraceIdRatio(share))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider.get_tracer("specahead")
    finally:
        provider.shutdown()


def follow(headers: Mapping[str, Any]) -> None:
    """Make the spans of this task part of the trace in a request's headers (W3C traceparent), if there is one."""
    from opentelemetry import context, propagate

    context.attach(propagate.extract({name.lower(): str(value) for name, value in headers.items()}))


class RequestTrace:
    """The spans of one request, if it is sampled."""

    def __init__(self, tracer: "Tracer", record: Record, key: str) -> None:
        attributes = {
            "specahead.request": record.session,
            "specahead.key": key,
            "specahead.exactness": record.asked.exactness.name.lower(),
            "gen_ai.usage.input_tokens": record.prompt_tokens,
        }
        self._tracer = tracer
        self._span = tracer.start_span("request", attributes=attributes)

    def round(self, commit: Commit, seconds: float) -> None:
        """Add the span of a round that ends now and took `seconds`."""
        if not self._span.is_recording():
            return
        from opentelemetry.trace import set_span_in_context

        end = time.time_ns()
        attributes = {f"specahead.{name}": getattr(commit.figures, name) for name in _FIGURES}
        attributes |= {"specahead.drafted": commit.drafted, "specahead.accepted": commit.accepted}
        attributes |= {"specahead.round": commit.at.round, "specahead.tokens": len(commit.tokens)}
        inside, start = set_span_in_context(self._span), end - int(seconds * NANO)
        self._tracer.start_span("round", context=inside, start_time=start, attributes=attributes).end(end)

    def end(self, record: Record, outcome: str | ServiceError) -> None:
        """End the request's span with the name of the finish reason, or with the error that broke it off."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("gen_ai.usage.output_tokens", len(record.generated))
        if isinstance(outcome, ServiceError):
            self._span.set_status(StatusCode.ERROR, outcome.code)
        else:
            self._span.set_attribute("gen_ai.response.finish_reasons", [outcome])
        self._span.end()
