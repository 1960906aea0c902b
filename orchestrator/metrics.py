"""Prometheus metrics. Suffixes follow vLLM's, so that its dashboards need only another prefix."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from orchestrator.ledger import Record
from wire.messages import ServiceStatus

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds with a proposal")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens proposed")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Proposed tokens accepted")
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Proposed tokens accepted, by place in the proposal", "position"
        )
        self._stale = self._counter("spec_decode_num_stale_rounds", "Proposals dropped as stale")
        self._announced = self._counter("spec_decode_announced_bytes", "Bytes of block announcements")
        self._kv_read = self._counter("kv_tokens_read", "KV read by verification, in (layer, KV head, token) triples")
        self._kv_dense = self._counter("kv_tokens_dense", "KV that dense verification would have read")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests taken")
        self._generated = self._counter("generation_tokens", "Tokens committed")
        self._requests = self._counter("request_success", "Requests ended, by reason", "finished_reason")
        self._running = self._gauge("num_requests_running", "Requests open")
        self._first = self._histogram("time_to_first_token_seconds", "From request to first committed token")
        self._latency = self._histogram("e2e_request_latency_seconds", "From request to its end")
        self._up = self._gauge("service_up", "Whether a service answers", "service")
        self._attached = self._gauge("service_attached", "Peers on a service's Speculate streams", "service")
        self._service_gauge = self._gauge("service_state", "Gauges of the services", "service", "name")
        self._service_count = self._gauge(
            "service_events", "Counters of the services since they started", "service", "name"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"specahead:{name}", text, ["model_name", *labels], registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"specahead:{name}", text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"specahead:{name}", text, ["model_name"], registry=self.registry, buckets=_SECONDS)

    def started(self, record: Record) -> None:
        self._prompt.labels(self._model).inc(record.prompt_tokens)
        self._running.labels(self._model).inc()

    def committed(self, record: Record, tokens: int, seconds: float) -> None:
        if len(record.generated) == tokens:
            self._first.labels(self._model).observe(seconds)
        self._generated.labels(self._model).inc(tokens)
        commit = record.commits[-1]
        if commit.drafted:
            self._drafts.labels(self._model).inc()
            self._draft_tokens.labels(self._model).inc(commit.drafted)
            self._accepted.labels(self._model).inc(commit.accepted)
            for position in range(commit.accepted):
                self._accepted_at.labels(self._model, position).inc()

    def finished(self, record: Record, outcome: str, seconds: float) -> None:
        totals = record.totals
        self._stale.labels(self._model).inc(totals.stale_rounds)
        self._announced.labels(self._model).inc(totals.announced_bytes)
        self._kv_read.labels(self._model).inc(totals.kv_tokens_read)
        self._kv_dense.labels(self._model).inc(totals.kv_tokens_total)
        self._running.labels(self._model).dec()
        self._requests.labels(self._model, outcome).inc()
        self._latency.labels(self._model).observe(seconds)

    def render(self, services: Mapping[str, ServiceStatus | None]) -> bytes:
        """The exposition text, with each service's status as it is now (None: it does not answer)."""
        self._service_gauge.clear()
        self._service_count.clear()
        for name, status in services.items():
            self._up.labels(self._model, name).set(status is not None)
            self._attached.labels(self._model, name).set(len(status.attached) if status else 0)
            if status:
                for key, value in status.gauges.items():
                    self._service_gauge.labels(self._model, name, key).set(value)
                for key, value in status.counters.items():
                    self._service_count.labels(self._model, name, key).set(value)
        return generate_latest(self.registry)
