"""The Kustomize base and overlays: valid, the same as the chart, true to the product's ports, paths and settings."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api.http_requests import OPEN
from specahead.config.speculation import WITHOUT_DRAFT
from tests.deploy.tools import (
    DEPLOY,
    Object,
    container_of,
    kustomize,
    of_kind,
    render_chart,
    run_checkov,
    run_tool,
    settings_of,
    validate,
)

KUBERNETES = DEPLOY / "kubernetes"
CHART = DEPLOY / "chart"
# Each overlay, and the values that give the same by the chart.
OVERLAYS: dict[str, list[Path]] = {
    "cpu": [],
    "gpu": [CHART / "values-gpu.yaml"],
    "offload": [CHART / "values-gpu.yaml", CHART / "values-offload.yaml"],
}


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> tuple[str, list[Object]]:
    return request.param, kustomize(KUBERNETES / "overlays" / request.param)


def comparable(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """Objects by kind and name, with the one name of the settings' ConfigMap and without the settings' checksum."""
    found = {}
    for item in copy.deepcopy(objects):
        if item["kind"] == "ConfigMap":
            item["metadata"] = {"name": "specahead-settings"}
        if item["kind"] == "Deployment":
            (source,) = container_of(item)["envFrom"]
            source["configMapRef"]["name"] = "specahead-settings"
            annotations = item["spec"]["template"]["metadata"].get("annotations", {})
            annotations.pop("checksum/settings", None)
            if not annotations:
                item["spec"]["template"]["metadata"].pop("annotations", None)
            by_name: Callable[[Object], str] = lambda part: part["name"]  # noqa: E731
            item["spec"]["template"]["spec"]["volumes"].sort(key=by_name)
            container_of(item)["volumeMounts"].sort(key=by_name)
        found[item["kind"], item["metadata"]["name"]] = item
    assert len(found) == len(objects)
    return found


def test_the_base_is_what_the_chart_gives(tmp_path: Path) -> None:
    """`make deploy-files` was run after the chart was changed."""
    run_tool("python", DEPLOY / "render_chart.py", "--base", tmp_path)
    for name in ("specahead.yaml", "settings.env"):
        assert (KUBERNETES / "base" / name).read_text() == (tmp_path / name).read_text(), name


def test_an_overlay_is_what_the_chart_gives(overlay: tuple[str, list[Object]]) -> None:
    name, objects = overlay
    ours, charts = comparable(objects), comparable(render_chart(*OVERLAYS[name]))
    assert ours.keys() == charts.keys()
    for key in ours:
        assert ours[key] == charts[key], key


def test_an_overlay_is_valid(overlay: tuple[str, list[Object]], tmp_path: Path) -> None:
    validate(overlay[1], tmp_path)


@pytest.mark.parametrize("settings", [*(f"draft: {name}" for name in WITHOUT_DRAFT), "placement: together"])
def test_the_chart_deploys_no_draft_where_the_target_needs_none(settings: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(f"settings: {{{settings}}}")
    assert set(deployments(render_chart(values))) == {"target", "orchestrator"}


def test_checkov(tmp_path: Path) -> None:
    files = []
    for name in OVERLAYS:
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(run_tool("kubectl", "kustomize", KUBERNETES / "overlays" / name))
    run_checkov("kubernetes", *files)


def test_the_product_takes_the_settings(overlay: tuple[str, list[Object]]) -> None:
    check_product(overlay[1])


def test_the_product_takes_the_settings_with_tls(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        "tls: {services: s, clients: c}\ntracing: {endpoint: 'http://collector:4318'}\n"
        "settings: {logging: {trace_share: 0.01}, max_queued: 1000000}"
    )
    objects = render_chart(values)
    validate(objects, tmp_path)
    check_product(objects)
    for side in ("target", "draft"):
        command = container_of(deployments(objects)[side])["livenessProbe"]["exec"]["command"]
        assert command[:2] == ["specahead", "health"]
        check_health_command(command[1:])
    orchestrator = container_of(deployments(objects)["orchestrator"])
    assert orchestrator["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert orchestrator["env"] == [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"}]


def deployments(objects: list[Object]) -> dict[str, Object]:
    return {item["metadata"]["labels"]["app.kubernetes.io/component"]: item for item in of_kind(objects, "Deployment")}


def check_health_command(arguments: list[str]) -> None:
    """`specahead health` takes these; argparse exits on what it does not know."""
    import argparse

    from specahead.cli.flags import add_health_flags

    parser = argparse.ArgumentParser()
    add_health_flags(parser)
    parser.parse_args(arguments[1:])


def check_product(objects: list[Object]) -> None:
    """Commands and settings are the product's; ports, probes, services and policies name what listens there."""
    (config,) = of_kind(objects, "ConfigMap")
    services = {item["metadata"]["name"]: item["spec"] for item in of_kind(objects, "Service")}
    mounted = {
        side: {mount["mountPath"] for mount in container_of(item)["volumeMounts"]}
        for side, item in deployments(objects).items()
    }
    for side, item in deployments(objects).items():
        container = container_of(item)
        assert item["spec"]["template"]["spec"]["enableServiceLinks"] is False
        settings = settings_of(container["args"], config["data"])
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        flat = settings | settings.get("tls", {}) | settings["service_tls"]
        for name, value in flat.items():  # the files that are named lie in what is mounted
            if isinstance(value, str) and value.startswith("/etc/specahead/"):
                assert value.rsplit("/", 1)[0] in mounted[side], name
        if side == "orchestrator":
            assert ports == {"http": settings["port"], "grpc": settings["grpc_port"]}
            assert settings["host"] == "0.0.0.0" and settings["timeouts"]["connect"] == 0
            for kind in ("target", "draft"):
                host, port = settings[f"{kind}_address"].split(":")
                assert int(port) == services[host]["ports"][0]["port"]
            grace = item["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
            assert grace >= settings["timeouts"]["shutdown"] + container["lifecycle"]["preStop"]["sleep"]["seconds"]
        else:
            assert ports == {"grpc": settings["base_port"]} and settings["service_host"] == "0.0.0.0"
        check_probes(container, ports)
    target = services["specahead-target"]["ports"][0]["port"]
    assert f"--target=specahead-target:{target}" in container_of(deployments(objects)["draft"])["args"]
    check_selectors(objects)


def check_probes(container: Object, ports: dict[str, int]) -> None:
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]
        if "httpGet" in probe:
            assert probe["httpGet"]["path"] in OPEN and probe["httpGet"]["port"] in ports
        elif "grpc" in probe:
            assert probe["grpc"]["port"] in ports.values()
        else:
            assert probe["exec"]["command"][2].endswith(f":{ports['grpc']}")
    if "httpGet" in container["livenessProbe"]:
        assert container["livenessProbe"]["httpGet"]["path"] == "/live"
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 300


def check_selectors(objects: list[Object]) -> None:
    """Each Service and NetworkPolicy chooses pods that there are, by ports that they name."""
    pods = {side: item["spec"]["template"] for side, item in deployments(objects).items()}

    def chosen(selector: dict[str, Any]) -> list[str]:
        return [side for side, pod in pods.items() if selector.items() <= pod["metadata"]["labels"].items()]

    for service in of_kind(objects, "Service"):
        (side,) = chosen(service["spec"]["selector"])
        named = {port["name"] for port in container_of(deployments(objects)[side])["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} == named
    callers = {}
    for policy in of_kind(objects, "NetworkPolicy"):
        (side,) = chosen(policy["spec"]["podSelector"]["matchLabels"])
        (rule,) = policy["spec"]["ingress"]
        callers[side] = {
            caller for peer in rule.get("from", []) for caller in chosen(peer["podSelector"]["matchLabels"])
        }
    assert callers == {"target": {"draft", "orchestrator"}, "draft": {"orchestrator"}, "orchestrator": set()}
