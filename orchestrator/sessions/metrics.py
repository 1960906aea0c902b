"""Prometheus metrics. What vLLM counts too is there under both names, so that its dashboards draw it unchanged."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from orchestrator.cluster.directory import side_of
from orchestrator.cluster.service_status import gauges_of_targets
from orchestrator.sessions.ledger import Record
from orchestrator.sessions.router import TargetState
from specahead.wire.messages import Commit, ServiceStatus

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LENGTHS = (1, 10, 100, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)

OURS, VLLM = "specahead:", "vllm:"
# What has the same meaning in vLLM, by the name without prefix.
_AS_VLLM = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prompt_tokens", "generation_tokens", "request_success", "request_prompt_tokens", "request_generation_tokens"),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_time_per_output_token_seconds", "request_max_num_generation_tokens"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    "spec_decode_num_accepted_tokens_per_pos",
}


class Metrics:
    """The figures of the client endpoints, and at the time of reading those of the services."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._running = self._gauge("num_requests_running", "Requests that the target runs")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for room on the target")
        self._usage = self._gauge("kv_cache_usage_perc", "Share of the target's KV room that is held, 1: all of it")
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds with a proposal")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens proposed")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Proposed tokens accepted")
        accepted_at = self._by(
            "spec_decode_num_accepted_tokens_per_pos", "Proposed tokens accepted, by place in the proposal", "position"
        )
        self._accepted_at = cache(lambda position: accepted_at.labels(model_name, position))
        self._stale = self._counter("spec_decode_num_stale_rounds", "Proposals dropped as stale")
        self._announced = self._counter("spec_decode_announced_bytes", "Bytes of block announcements")
        self._kv_read = self._counter("kv_tokens_read", "KV read by verification, in (layer, KV head, token) triples")
        self._kv_dense = self._counter("kv_tokens_dense", "KV that dense verification would have read")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that got a token")
        self._looked_up = self._counter("prefix_cache_queries", "Prompt tokens that were looked up in the KV")
        self._found = self._counter("prefix_cache_hits", "Of these, found there")
        self._preemptions = self._counter("num_preemptions", "Times that a request gave its KV room to older ones")
        self._generated = self._counter("generation_tokens", "Tokens committed")
        self._finished = self._by("request_success", "Requests that came to their end, by how", "finished_reason")
        self._failed = self._by("request_failed", "Requests that broke off after their first token", "reason")
        self._refused = self._by("request_refused", "Requests that got no token, by what was wrong", "reason")
        self._first = self._histogram("time_to_first_token_seconds", "From request to first committed token")
        self._between = self._histogram("inter_token_latency_seconds", "From one token to the next")
        self._latency = self._histogram("e2e_request_latency_seconds", "From request to its end")
        self._queued = self._histogram("request_queue_time_seconds", "Until the target had room for the first time")
        self._prefill = self._histogram("request_prefill_time_seconds", "Steps that ran the prompt")
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last")
        self._pace = self._histogram("request_time_per_output_token_seconds", "A request's mean from token to token")
        self._prompt_lengths = self._histogram("request_prompt_tokens", "Tokens of prompts", _LENGTHS)
        self._lengths = self._histogram("request_generation_tokens", "Tokens of answers", _LENGTHS)
        # Each choice counts as a request here, so that these are the same.
        self._longest = self._histogram("request_max_num_generation_tokens", "Tokens of answers", _LENGTHS)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(OURS + name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _by(self, name: str, text: str, label: str) -> Counter:
        return Counter(OURS + name, text, ["model_name", label], registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(OURS + name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Iterable[float] = _SECONDS) -> Histogram:
        histogram = Histogram(OURS + name, text, ["model_name"], registry=self.registry, buckets=tuple(buckets))
        return histogram.labels(self._model)

    def committed(self, record: Record, commit: Commit, first: bool, seconds: float) -> None:
        """Count a round. first: whether it is the request's first; seconds: since its last, or since it came."""
        tokens = len(commit.tokens)
        if first:
            self._first.observe(seconds)
            self._prompt.inc(record.prompt_tokens)
            self._looked_up.inc(record.prompt_tokens)
            self._found.inc(record.cached_tokens)
            self._queued.observe(commit.queue_seconds)
        else:
            for _ in range(tokens):
                self._between.observe(seconds / tokens)
        self._generated.inc(tokens)
        self._preemptions.inc(commit.preemptions)
        for drafted, accepted in commit.rounds:
            self._drafts.inc(drafted > 0)
            self._draft_tokens.inc(drafted)
            self._accepted.inc(accepted)
            for position in range(accepted):
                self._accepted_at(position).inc()

    def finished(self, record: Record, outcome: str, seconds: float, decode_seconds: float) -> None:
        """Count a request that came to its end `seconds` after it came, its last token so long after its first."""
        self._finished.labels(self._model, outcome).inc()
        self._latency.observe(seconds)
        self._decode.observe(decode_seconds)
        self._prefill.observe(record.totals.prefill_seconds)
        self._prompt_lengths.observe(record.prompt_tokens)
        self._lengths.observe(len(record.generated))
        self._longest.observe(len(record.generated))
        if len(record.generated) > 1:
            self._pace.observe(decode_seconds / (len(record.generated) - 1))

    def ended(self, record: Record) -> None:
        """Count what the rounds of a request took, whichever way it ended."""
        totals = record.totals
        self._stale.inc(totals.stale_rounds)
        self._announced.inc(totals.announced_bytes)
        self._kv_read.inc(totals.kv_tokens_read)
        self._kv_dense.inc(totals.kv_tokens_total)

    def failed(self, reason: str) -> None:
        """Count a request that broke off after its first token."""
        self._failed.labels(self._model, reason).inc()

    def refused(self, reason: str) -> None:
        """Count a request that got no token."""
        self._refused.labels(self._model, reason).inc()

    def families(
        self,
        requests: int,
        services: Mapping[str, ServiceStatus | None],
        addresses: Mapping[str, str],
        targets: Mapping[str, TargetState],
    ) -> list[Metric]:
        """Return all figures of the model.

        requests: how many are open. services: their statuses now, by name (None: no answer). addresses: where they are.
        targets: how each is used.
        """
        gauges = gauges_of_targets(services)
        waiting = min(requests, int(gauges.get("queued_sessions", 0)))
        self._waiting.set(waiting)
        self._running.set(requests - waiting)
        self._usage.set(gauges.get("kv_pages_held", 0) / max(1, gauges.get("kv_pages", 0)))
        families = [*self.registry.collect(), *_service_families(self._model, services, addresses)]
        families += _target_families(self._model, targets)
        named_twice = (family for family in families if family.name.removeprefix(OURS) in _AS_VLLM)
        return [*families, *map(_as_vllm, named_twice)]


def exposition(families: Iterable[Metric]) -> bytes:
    """Return the text that Prometheus reads; families of the same name, of several models, become one."""
    merged: dict[str, Metric] = {}
    for family in families:
        known = merged.setdefault(family.name, family)
        if known is not family:
            known.samples.extend(family.samples)
    return generate_latest(_Families(list(merged.values())))


class _Families:
    """What stands in for a registry: families that were collected already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _as_vllm(family: Metric) -> Metric:
    """The same family by vLLM's name."""
    other = Metric(family.name.replace(OURS, VLLM, 1), family.documentation, family.type)
    other.samples = [sample._replace(name=sample.name.replace(OURS, VLLM, 1)) for sample in family.samples]
    return other


def _service_families(
    model: str, services: Mapping[str, ServiceStatus | None], addresses: Mapping[str, str]
) -> Iterator[Metric]:
    """What the services say of themselves; counters begin anew when a service does."""
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
    """What the router says of each target."""
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
