"""OpenTelemetry traces: a span for each request that is sampled, one for each of its rounds, and in these its parts.

What target and draft did in a round comes with the round's commit, as seconds. Its spans are laid out from the end of
the round backwards: verification last, before it the wait for the draft, and the draft's own round up to there. Nothing
is sent to the services for it. Where spans go is told by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT).
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from config import SettingsError
from orchestrator.ledger import Record
from wire.errors import ServiceError
from wire.messages import Commit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

_NANO = 1_000_000_000


@contextlib.contextmanager
def tracing(share: float, exporter: "SpanExporter | None" = None) -> "Iterator[Tracer | None]":
    """Trace this share of the requests, and those whose callers trace them, while the context lasts; 0: none at all.

    exporter: where spans go if not to an OTLP collector. Raises SettingsError if OpenTelemetry is not installed.
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
        raise SettingsError(f"trace_share needs OpenTelemetry ({error}): pip install 'specahead[otel]'") from None
    resource = Resource.create({"service.name": "specahead"})
    provider = TracerProvider(resource=resource, sampler=ParentBasedTraceIdRatio(share))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider.get_tracer("specahead")
    finally:
        provider.shutdown()


def follow(headers: Mapping[str, Any]) -> None:
    """Make the spans of this task part of the trace that a caller's headers name (W3C traceparent), if there is one."""
    from opentelemetry import context, propagate

    context.attach(propagate.extract({name.lower(): str(value) for name, value in headers.items()}))


class RequestTrace:
    """One request's spans; none if it is not sampled."""

    def __init__(self, tracer: "Tracer", record: Record, key: str) -> None:
        attributes = {
            "specahead.request": record.session,
            "specahead.key": key,
            "specahead.exactness": record.exactness.name.lower(),
            "gen_ai.usage.input_tokens": record.prompt_tokens,
        }
        self._tracer = tracer
        self._span = tracer.start_span("request", attributes=attributes)

    def round(self, commit: Commit, seconds: float) -> None:
        """Add a round that is over now and began so many seconds ago."""
        if not self._span.is_recording():
            return
        end = time.time_ns()
        drafted = {"specahead.drafted": commit.drafted, "specahead.accepted": commit.accepted}
        bytes_and_reads = {
            "specahead.announced_bytes": commit.announced_bytes,
            "specahead.kv_tokens_read": commit.kv_tokens_read,
            "specahead.kv_tokens_total": commit.kv_tokens_total,
        }
        span = self._add("round", self._span, end, seconds, drafted | bytes_and_reads)
        verified = end - int(commit.verify_seconds * _NANO)
        waited = verified - int(commit.wait_seconds * _NANO)
        self._add("target.verify", span, end, commit.verify_seconds)
        self._add("target.wait", span, verified, commit.wait_seconds)
        self._add("draft.round", span, verified, commit.draft_seconds)
        self._add("target.prefill", span, waited, commit.prefill_seconds)
        filled = waited - int(commit.prefill_seconds * _NANO)
        self._add("target.queue", span, filled, commit.queue_seconds)

    def _add(
        self, name: str, parent: "Span", end: int, seconds: float, attributes: Mapping[str, int] | None = None
    ) -> "Span":
        """Add a span that ended at `end`, in nanoseconds since 1970. A part that took no time is left out."""
        from opentelemetry.trace import set_span_in_context

        if not seconds:
            return parent
        start = end - int(seconds * _NANO)
        inside = set_span_in_context(parent)
        span = self._tracer.start_span(name, context=inside, start_time=start, attributes=dict(attributes or {}))
        span.end(end)
        return span

    def end(self, record: Record, outcome: str | ServiceError) -> None:
        """End the request's span: by the name of its finish reason, or by what broke it off."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("gen_ai.usage.output_tokens", len(record.generated))
        if isinstance(outcome, ServiceError):
            self._span.set_status(StatusCode.ERROR, outcome.code)
        else:
            self._span.set_attribute("gen_ai.response.finish_reasons", [outcome])
        self._span.end()
