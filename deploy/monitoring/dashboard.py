"""The Grafana dashboard, as code: `python deploy/monitoring/dashboard.py` writes dashboard.json beside this file.

Each orchestrator tells the figures of the services behind it; of these the largest counts, and requests are summed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("dashboard.json")
_OF = 'model_name=~"$model"'
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One graph: what is drawn by its legend, as PromQL. unit: Grafana's name of it."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    text: str = ""


def _rate(counter: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate(specahead:{counter}_total{{{_OF}}}[$__rate_interval]))"


def _quantiles(histogram: str) -> dict[str, str]:
    buckets = f"sum by (le) (rate(specahead:{histogram}_bucket{{{_OF}}}[$__rate_interval]))"
    return {f"p{percent}": f"histogram_quantile({percent / 100}, {buckets})" for percent in (50, 95, 99)}


def _event(name: str, side: str = "target") -> str:
    labels = f'{_OF}, side="{side}", name="{name}"'
    return f"sum(max by (service) (rate(specahead:service_events_total{{{labels}}}[$__rate_interval])))"


def _state(name: str) -> str:
    return f'sum(max by (service) (specahead:service_state{{{_OF}, side="target", name="{name}"}}))'


ROWS: dict[str, list[Panel]] = {
    "Clients": [
        Panel(
            "Requests",
            {
                "running": f"sum(specahead:num_requests_running{{{_OF}}})",
                "waiting": f"sum(specahead:num_requests_waiting{{{_OF}}})",
            },
            text="Waiting: for room on the target.",
        ),
        Panel(
            "Tokens a second", {"generated": _rate("generation_tokens"), "prompts": _rate("prompt_tokens")}, text="Sum."
        ),
        Panel(
            "Ends of requests, a second",
            {
                "{{finished_reason}}": _rate("request_success", "finished_reason"),
                "failed: {{reason}}": _rate("request_failed", "reason"),
                "refused: {{reason}}": _rate("request_refused", "reason"),
            },
        ),
        Panel("Time to first token", _quantiles("time_to_first_token_seconds"), "s", "Queue, prompt, first round."),
        Panel("Time between tokens", _quantiles("inter_token_latency_seconds"), "s"),
        Panel("Time of whole requests", _quantiles("e2e_request_latency_seconds"), "s"),
        Panel(
            "Wait for room", _quantiles("request_queue_time_seconds"), "s", "Long: KV room or max_sessions is short."
        ),
        Panel(
            "Prompts' time", _quantiles("request_prefill_time_seconds"), "s", "Long: prompts are, or few are cached."
        ),
        Panel(
            "Prompt tokens found in the KV",
            {"share": f"{_rate('prefix_cache_hits')} / {_rate('prefix_cache_queries')}"},
            "percentunit",
        ),
    ],
    "Speculation": [
        Panel(
            "Tokens a round",
            {"committed": f"1 + {_rate('spec_decode_num_accepted_tokens')} / {_rate('spec_decode_num_drafts')}"},
            text="One is the target's own. Near one, the draft is of no use.",
        ),
        Panel(
            "Drafted tokens that are accepted",
            {
                "all": f"{_rate('spec_decode_num_accepted_tokens')} / {_rate('spec_decode_num_draft_tokens')}",
                "at {{position}}": f"{_rate('spec_decode_num_accepted_tokens_per_pos', 'position')}"
                f" / ignoring(position) group_left {_rate('spec_decode_num_drafts')}",
            },
            "percentunit",
        ),
        Panel(
            "KV that verification reads",
            {"share": f"{_rate('kv_tokens_read')} / {_rate('kv_tokens_dense')}"},
            "percentunit",
            "Of what exact would read. 100 %: nobody asks for approximate.",
        ),
        Panel(
            "Bytes announced a round",
            {"bytes": f"{_rate('spec_decode_announced_bytes')} / {_rate('spec_decode_num_drafts')}"},
            "bytes",
        ),
        Panel(
            "Rounds a second",
            {
                "drafted": _event("rounds"),
                "plain": _event("plain_rounds"),
                "foreseen": _event("foreseen_rounds"),
                "stale": _rate("spec_decode_num_stale_rounds"),
            },
            text="Foreseen: the draft was ahead. Plain: no proposal was there.",
        ),
        Panel(
            "Trouble of drafts, a second",
            {
                "late": _event("draft_timeouts"),
                "paused as useless": _event("drafting_pauses"),
                "lost the thread": _event("resyncs", "draft"),
                "no room": _event("declined_sessions", "draft"),
            },
        ),
    ],
    "Target": [
        Panel("KV held", {"share": f"max(specahead:kv_cache_usage_perc{{{_OF}}})"}, "percentunit"),
        Panel(
            "Sessions",
            {
                "open": _state("sessions"),
                "queued": _state("queued_sessions"),
                "drafted": _state("drafted_sessions"),
                "drafting paused": _state("paused_sessions"),
            },
        ),
        Panel(
            "Services",
            {
                "{{service}} answers": f"max by (service) (specahead:service_up{{{_OF}}})",
                "peers of {{service}}": f"max by (service) (specahead:service_attached{{{_OF}}})",
                "failed steps of {{service}}": "max by (service) (increase("
                f'specahead:service_events_total{{{_OF}, name="failed_steps"}}[$__rate_interval]))',
            },
        ),
    ],
    "KV in host memory": [
        Panel(
            "Pages that steps list, a second",
            {
                "on the GPU": _event("kv_hit_pages"),
                "fetched": _event("kv_fetched_pages"),
                "overflown": _event("kv_overflow_pages"),
                "staged": _event("kv_staged_pages"),
            },
            text="Overflown: the step ran again in halves. Staged: a whole layer came over.",
        ),
        Panel("Link to the host", {"to the GPU": _event("kv_bytes_fetched"), "back": _event("kv_bytes_stored")}, "Bps"),
        Panel("GPU pages", {"there are": _state("kv_gpu_pages"), "given": _state("kv_gpu_pages_given")}),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}, "panels": []})
        top += 1
        for index, panel in enumerate(row):
            line, column = divmod(index, _COLUMNS)
            panels.append(_graph(panel, column * _WIDTH, top + line * _HEIGHT))
        top += -(-len(row) // _COLUMNS) * _HEIGHT
    for number, item in enumerate(panels, start=1):
        item["id"] = number
    return {
        "uid": "specahead",
        "title": "specahead",
        "tags": ["specahead"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _VARIABLES},
        "panels": panels,
    }


_VARIABLES = [
    {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
    {
        "name": "model",
        "type": "query",
        "label": "Model",
        "datasource": _DATASOURCE,
        "query": {"query": "label_values(specahead:num_requests_running, model_name)", "refId": "model"},
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    },
]


def _graph(panel: Panel, left: int, top: int) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "gridPos": {"x": left, "y": top, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _DATASOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def as_json() -> str:
    """Return the text of dashboard.json."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(as_json())
