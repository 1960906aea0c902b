"""Prometheus metrics. Those that vLLM has too are there under both names, so that its dashboards work unchanged."""

from collections.abc import Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from orchestrator.cluster.directory import side_of
from orchestrator.cluster.service_status import Statuses, gauges_of_targets
from orchestrator.sessions.ledger import Record
from orchestrator.sessions.router import TargetState
from specahead.wire.messages import Commit

OURS, VLLM = "specahead:", "vllm:"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LENGTHS = (1, 10, 100, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)

_GAUGES = {
    "num_requests_running": "Requests that the target runs",
    "num_requests_waiting": "Requests that wait for room on the target",
    "kv_cache_usage_perc": "Share of the target's KV room that is held, 1: all of it",
}
_COUNTERS = {
    "spec_decode_num_drafts": "Rounds with a proposal",
    "spec_decode_num_draft_tokens": "Tokens proposed",
    "spec_decode_num_accepted_tokens": "Proposed tokens accepted",
    "spec_decode_num_stale_rounds": "Proposals dropped as stale",
    "spec_decode_announced_bytes": "Bytes of block announcements",
    "kv_tokens_read": "KV read by verification, in (layer, KV head, token) triples",
    "kv_tokens_dense": "KV that dense verification would have read",
    "audited_tokens": "Tokens whose distributions by sparse and by dense verification were compared",
    "audited_total_variation": "Total variation between these distributions, summed over the tokens",
    "audited_kl_divergence": "Divergence of the sparse ones from the dense ones in nats, summed over the tokens",
    "audited_same_greedy": "Of these tokens, those with the same likeliest token",
    "prompt_tokens": "Prompt tokens of requests that got a token",
    "prefix_cache_queries": "Prompt tokens that were looked up in the KV",
    "prefix_cache_hits": "Of these, found there",
    "num_preemptions": "Times that a request gave its KV room to older ones",
    "generation_tokens": "Tokens committed",
}
_COUNTERS_BY_LABEL = {
    "spec_decode_num_accepted_tokens_per_pos": ("Proposed tokens accepted, by place in the proposal", "position"),
    "request_success": ("Requests that came to their end, by finish reason", "finished_reason"),
    "request_failed": ("Requests that broke off after their first token", "reason"),
    "request_refused": ("Requests that got no token, by the error", "reason"),
}
_DURATIONS = {
    "time_to_first_token_seconds": "From request to first committed token",
    "inter_token_latency_seconds": "From one token to the next",
    "e2e_request_latency_seconds": "From request to its end",
    "request_queue_time_seconds": "Until the target had room for the first time",
    "request_prefill_time_seconds": "Steps that ran the prompt",
    "request_decode_time_seconds": "From the first token to the last",
    "request_time_per_output_token_seconds": "A request's mean from token to token",
}
_TOKEN_COUNTS = {
    "request_prompt_tokens": "Tokens of prompts",
    "request_generation_tokens": "Tokens of answers",
    "request_max_num_generation_tokens": "Tokens of answers",  # the same here, since each choice counts as a request
}
_OURS_ALONE = {
    *("spec_decode_num_stale_rounds", "spec_decode_announced_bytes", "kv_tokens_read", "kv_tokens_dense"),
    *("audited_tokens", "audited_total_variation", "audited_kl_divergence", "audited_same_greedy"),
    *("request_failed", "request_refused"),
}
# Metrics of the same meaning in vLLM, by the name without prefix.
_AS_VLLM = {*_GAUGES, *_COUNTERS, *_COUNTERS_BY_LABEL, *_DURATIONS, *_TOKEN_COUNTS} - _OURS_ALONE


class Metrics:
    """The metrics of one model: those of its requests, and at the time of reading those of its services."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._gauge = {name: self._make(Gauge, name, text).labels(model_name) for name, text in _GAUGES.items()}
        self._counter = {name: self._make(Counter, name, text).labels(model_name) for name, text in _COUNTERS.items()}
        self._by_label = {
            name: self._make(Counter, name, text, label) for name, (text, label) in _COUNTERS_BY_LABEL.items()
        }
        accepted_at = self._by_label["spec_decode_num_accepted_tokens_per_pos"]
        self._accepted_at = cache(lambda position: accepted_at.labels(model_name, position))
        self._histogram = {
            name: self._make(Histogram, name, text, buckets=buckets).labels(model_name)
            for names, buckets in ((_DURATIONS, _SECONDS), (_TOKEN_COUNTS, _LENGTHS))
            for name, text in names.items()
        }

    def _make(self, kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
        return kind(OURS + name, text, ["model_name", *labels], registry=self.registry, **options)

    def committed(self, record: Record, commit: Commit, first: bool, seconds: float) -> None:
        """Count a round. first: whether it is the request's first. seconds: since the last one, or the request."""
        tokens, count = len(commit.tokens), self._counter
        if first:
            self._histogram["time_to_first_token_seconds"].observe(seconds)
            self._histogram["request_queue_time_seconds"].observe(commit.figures.queue_seconds)
            count["prompt_tokens"].inc(record.prompt_tokens)
            count["prefix_cache_queries"].inc(record.prompt_tokens)
            count["prefix_cache_hits"].inc(record.cached_tokens)
        else:
            for _ in range(tokens):
                self._histogram["inter_token_latency_seconds"].observe(seconds / tokens)
        count["generation_tokens"].inc(tokens)
        count["num_preemptions"].inc(commit.figures.preemptions)
        for drafted, accepted in commit.rounds:
            count["spec_decode_num_drafts"].inc(drafted > 0)
            count["spec_decode_num_draft_tokens"].inc(drafted)
            count["spec_decode_num_accepted_tokens"].inc(accepted)
            for position in range(accepted):
                self._accepted_at(position).inc()

    def finished(self, record: Record, outcome: str, seconds: float, decode_seconds: float) -> None:
        """Count a request that ended after `seconds`, with `decode_seconds` from its first token to its last."""
        self._by_label["request_success"].labels(self._model, outcome).inc()
        observed, tokens = self._histogram, len(record.generated)
        observed["e2e_request_latency_seconds"].observe(seconds)
        observed["request_decode_time_seconds"].observe(decode_seconds)
        observed["request_prefill_time_seconds"].observe(record.totals.figures.prefill_seconds)
        observed["request_prompt_tokens"].observe(record.prompt_tokens)
        observed["request_generation_tokens"].observe(tokens)
        observed["request_max_num_generation_tokens"].observe(tokens)
        if tokens > 1:
            observed["request_time_per_output_token_seconds"].observe(decode_seconds / (tokens - 1))

    def ended(self, record: Record) -> None:
        """Count the rounds of a request, however it ended."""
        figures, counter = record.totals.figures, self._counter
        counter["spec_decode_num_stale_rounds"].inc(figures.stale_rounds)
        counter["spec_decode_announced_bytes"].inc(figures.announced_bytes)
        counter["kv_tokens_read"].inc(figures.kv_tokens_read)
        counter["kv_tokens_dense"].inc(figures.kv_tokens_total)
        counter["audited_tokens"].inc(figures.audited_tokens)
        counter["audited_total_variation"].inc(figures.total_variation)
        counter["audited_kl_divergence"].inc(figures.kl_divergence)
        counter["audited_same_greedy"].inc(figures.same_greedy)

    def unfinished(self, reason: str, began: bool) -> None:
        """Count a request that came to no end. began: whether it broke off after its first token; else it got none."""
        self._by_label["request_failed" if began else "request_refused"].labels(self._model, reason).inc()

    def exposition(
        self, requests: int, services: Statuses, addresses: Mapping[str, str], targets: Mapping[str, TargetState]
    ) -> bytes:
        """Return the text that Prometheus reads.

        requests: how many are open. services: their statuses now, by name (None: no answer). addresses: of the
        services, by name. targets: the use of each, by name.
        """
        gauges = gauges_of_targets(services)
        waiting = min(requests, int(gauges.get("queued_sessions", 0)))
        self._gauge["num_requests_waiting"].set(waiting)
        self._gauge["num_requests_running"].set(requests - waiting)
        self._gauge["kv_cache_usage_perc"].set(gauges.get("kv_pages_held", 0) / max(1, gauges.get("kv_pages", 0)))
        families = [*self.registry.collect(), *_service_families(self._model, services, addresses)]
        families += _target_families(self._model, targets)
        named_twice = (family for family in families if family.name.removeprefix(OURS) in _AS_VLLM)
        found = [*families, *map(_as_vllm, named_twice)]
        return generate_latest(SimpleNamespace(collect=lambda: found))  # type: ignore[arg-type]  # it asks for no more


def _as_vllm(family: Metric) -> Metric:
    """Return the same family with vLLM's name."""
    other = Metric(family.name.replace(OURS, VLLM, 1), family.documentation, family.type)
    other.samples = [sample._replace(name=sample.name.replace(OURS, VLLM, 1)) for sample in family.samples]
    return other


def _service_families(model: str, services: Statuses, addresses: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the metrics of the services; counters restart with their service."""
    labels = ["model_name", "service", "side"]
    info = GaugeMetricFamily(f"{OURS}service_info", "Where a service is", labels=[*labels, "address", "version"])
    up = GaugeMetricFamily(f"{OURS}service_up", "Whether a service answers", labels=labels)
    attached = GaugeMetricFamily(f"{OURS}service_attached", "Peers on its Speculate streams", labels=labels)
    states = GaugeMetricFamily(f"{OURS}service_state", "Gauges of the services", labels=[*labels, "name"])
    events = CounterMetricFamily(f"{OURS}service_events", "Counters of the services", labels=[*labels, "name"])
    for name, status in services.items():
        values = [model, name, side_of(name)]
        info.add_metric([*values, addresses.get(name, ""), status.version if status else ""], 1)
        up.add_metric(values, float(status is not None))
        attached.add_metric(values, len(status.attached) if status else 0)
        _add_all(states, values, status.gauges if status else {})
        _add_all(events, values, status.counters if status else {})
    yield from (info, up, attached, states, events)


def _target_families(model: str, targets: Mapping[str, TargetState]) -> Iterator[Metric]:
    """Yield the router's metrics of each target."""
    labels = ["model_name", "target"]
    serving = GaugeMetricFamily(f"{OURS}target_serving", "Whether a target takes new requests", labels=labels)
    sessions = GaugeMetricFamily(f"{OURS}target_sessions", "Requests that are open on a target", labels=labels)
    routed = CounterMetricFamily(f"{OURS}routed_requests", "Times that requests were sent to a target", labels=labels)
    for name, state in targets.items():
        serving.add_metric([model, name], float(state.serving))
        sessions.add_metric([model, name], state.sessions)
        routed.add_metric([model, name], state.routed)
    yield from (serving, sessions, routed)


def _add_all(family: Any, labels: list[str], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        family.add_metric([*labels, name], value)
