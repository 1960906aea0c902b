"""OpenTelemetry in a process, and how a trace continues in the next one.

Whether a request is sampled is decided once, where it comes in. A sampled request carries a W3C traceparent to the
target and from there to the draft; other requests carry an empty text, and no service makes a span for them. Spans go
where OpenTelemetry's own variables say (OTEL_EXPORTER_OTLP_ENDPOINT). Without traces it is not imported.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from specahead.config import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

NANO = 1_000_000_000


@contextlib.contextmanager
def open_tracer(process: str, share: float, exporter: "SpanExporter | None" = None) -> "Iterator[Tracer]":
    """Yield a tracer that samples this share of spans without a parent, and all whose parent is sampled.

    process: the name of this process at the collector. exporter: where spans go; None: to an OTLP collector. Raises
    SettingsError if OpenTelemetry is not installed.
    """
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
    resource = Resource.create({"service.name": process})
    provider = TracerProvider(resource=resource, sampler=ParentBasedTraceIdRatio(share))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider.get_tracer("specahead")
    finally:
        provider.shutdown()


class Spans:
    """Makes the spans of a service; none if it has no tracer."""

    def __init__(self, tracer: "Tracer | None" = None) -> None:
        self._tracer = tracer

    def add(
        self, traceparent: str, name: str, seconds: float, ended: float = 0.0, **attributes: float | str | bool
    ) -> None:
        """Add a span of `seconds` that ended `ended` seconds ago to the trace of a session, if it has one."""
        if not traceparent or self._tracer is None:
            return
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = time.time_ns() - int(ended * NANO)
        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        named = {f"specahead.{key}": value for key, value in attributes.items()}
        start = end - int(seconds * NANO)
        self._tracer.start_span(name, context=parent, start_time=start, attributes=named).end(end)


NO_SPANS = Spans()


@contextlib.contextmanager
def service_spans(process: str, traces: bool, exporter: "SpanExporter | None" = None) -> Iterator[Spans]:
    """Yield the maker of a service's spans while the context lasts; unless `traces` it makes none."""
    if not traces:
        yield NO_SPANS
        return
    with open_tracer(process, 0.0, exporter) as tracer:
        yield Spans(tracer)


def traceparent_of(span: "Span") -> str:
    """Return the name of a span for other processes; "" if it is not sampled."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    if span.is_recording():
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier.get("traceparent", "")
