"""Dashboard, alerts and collector are valid, and of metrics that a running server has."""

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from specahead.models import DRAFT, PLAN, TARGET
from tests.client import generate
from tests.deploy.tools import DEPLOY, run_tool
from tests.stack import Services, start_gateway, start_service

MONITORING = DEPLOY / "monitoring"
SETTINGS = ("--plan", str(PLAN), "--port", "0", "--max-model-len", "2048")
IN_TIERS = ("--kv-tokens", "800", "--host-kv-memory", "0.1", "--max-sessions", "8", "--prefill-chunk", "128")


@pytest.fixture(scope="module")
def live() -> dict[str, list[dict[str, str]]]:
    """The labels of each sample in the /metrics of the bundled pair with KV in tiers, families without one included."""
    target, target_address = start_service("-m", "target_service", "--model", str(TARGET), *SETTINGS, *IN_TIERS)
    draft, address = start_service("-m", "draft_service", "--model", str(DRAFT), "--target", target_address, *SETTINGS)
    services = Services(target_address, address, [target, draft])
    try:
        stack = start_gateway(services, "--max-model-len", "2048")
        generate(stack.stub(), "The old man", max_tokens=16)
        with urllib.request.urlopen(f"{stack.http}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        stack.stop()
    finally:
        services.stop()
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        if family.type == "counter":
            found[family.name + "_total"] = []
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def dashboard() -> dict[str, Any]:
    return json.loads((MONITORING / "dashboard.json").read_text())


def expressions() -> list[str]:
    """All PromQL of dashboard and alerts."""
    drawn = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return drawn + [rule["expr"] for group in groups for rule in group["rules"]]


def named(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Each metric of an expression, with the labels that must have one value."""
    for metric, labels in re.findall(r"(specahead:\w+)(?:\{([^}]*)\})?", expression):
        yield metric, dict(re.findall(r'(\w+)="([^"]*)"', labels))


def test_rules_and_their_tests() -> None:
    run_tool("promtool", "check", "rules", MONITORING / "alerts.yaml")
    run_tool("promtool", "check", "config", MONITORING / "prometheus.yaml")
    run_tool("promtool", "test", "rules", MONITORING / "alerts_test.yaml")


def test_every_alert_is_tested_where_it_fires_and_where_it_does_not() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    cases = [
        case
        for test in yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    names = {rule["alert"] for rule in rules}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


def test_every_metric_exists_in_a_running_server(live: dict[str, list[dict[str, str]]]) -> None:
    used = [item for expression in expressions() for item in named(expression)]
    assert len(used) > 50
    for metric, labels in used:
        assert metric in live, metric
        if metric.startswith("specahead:service_"):
            fitting = [sample for sample in live[metric] if labels.items() <= sample.items()]
            assert fitting, f"{metric} has no sample with {labels}"


def test_every_expression_of_the_dashboard_is_promql(tmp_path: Any) -> None:
    """As rules, since promtool checks these; Grafana's variables get values."""
    rules = [
        {"record": f"panel:{number}", "expr": text.replace("$__rate_interval", "5m").replace("$model", ".*")}
        for number, text in enumerate(expressions())
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run_tool("promtool", "check", "rules", file)


def test_panels_do_not_overlap() -> None:
    taken = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def test_the_collector_s_pipelines_are_made_of_what_it_has() -> None:
    collector = yaml.safe_load((MONITORING / "collector.yaml").read_text())
    for pipeline in collector["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= collector[kind].keys()
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    assert set(re.findall(r"\$\{env:(\w+)\}", str(collector))) == compose["collector"]["environment"].keys()
    port = collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"].split(":")[1]
    assert compose["orchestrator"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://collector:{port}"
