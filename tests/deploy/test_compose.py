"""Compose: valid by its schema, as podman-compose merges it, and by the product's own reading of its settings."""

from typing import Any

import pytest
import yaml

from specahead.config.launch import ClientSettings
from tests.deploy.tools import DEPLOY, run_tool, settings_of

COMPOSE = DEPLOY / "compose"
SERVICES = ("target", "draft", "orchestrator")


def merged(*files: str) -> dict[str, Any]:
    """What the files give together, all profiles included. No podman is asked; `echo` stands in for it."""
    flags = [part for file in files for part in ("-f", file)]
    text = run_tool(
        "podman-compose", "--podman-path", "/bin/echo", *flags, "--profile", "monitoring", "config", cwd=COMPOSE
    )
    return yaml.safe_load(text)


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, Any]:
    return merged("compose.yaml")


def test_the_files_are_valid() -> None:
    run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *sorted(COMPOSE.glob("*.yaml")))


def test_the_product_takes_the_settings(on_cpu: dict[str, Any]) -> None:
    fixed = dict(line.split("=", 1) for line in (COMPOSE / "settings.env").read_text().splitlines() if line[0] != "#")
    settings = {
        name: settings_of(service["command"], fixed | service["environment"])
        for name, service in on_cpu["services"].items()
        if name in SERVICES
    }
    assert settings["target"]["service_host"] == settings["orchestrator"]["host"] == "0.0.0.0"
    for name in ("target", "draft"):
        port = settings[name]["base_port"]
        assert settings["orchestrator"][f"{name}_address"] == f"{name}:{port}"
        assert on_cpu["services"][name]["healthcheck"]["test"][1:] == ["specahead", "health", f"127.0.0.1:{port}"]
    assert f"--target=target:{settings['target']['base_port']}" in on_cpu["services"]["draft"]["command"]


def test_the_settings_that_are_commented_out_are_settings() -> None:
    lines = [line.removeprefix("# ") for line in (COMPOSE / "settings.env").read_text().splitlines()]
    offered = dict(line.split("=", 1) for line in lines if line.startswith("SPECAHEAD_"))
    assert len(offered) > 5
    assert settings_of(["python", "-m", "orchestrator.launch"], offered)["host_kv_memory"] == 104


def test_services_have_no_rights_and_only_clients_ports_are_published(on_cpu: dict[str, Any]) -> None:
    for name, service in on_cpu["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        if name in SERVICES:
            assert service["read_only"] and service["security_opt"] == ["no-new-privileges:true"]
            assert ("ports" in service) == (name == "orchestrator")
    clients = ClientSettings()
    published = [f"127.0.0.1:{port}:{port}" for port in (clients.port, clients.grpc_port)]
    assert on_cpu["services"]["orchestrator"]["ports"] == published


def test_what_is_mounted_is_there(on_cpu: dict[str, Any]) -> None:
    for name, service in on_cpu["services"].items():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (COMPOSE / source).is_file() if source.startswith(".") else source in on_cpu["volumes"], (
                name,
                mount,
            )


def test_gpus_are_reserved_by_the_override_alone(on_cpu: dict[str, Any]) -> None:
    on_gpu = merged("compose.yaml", "gpu.yaml")
    ids = {}
    for name in SERVICES:
        assert "deploy" not in on_cpu["services"][name]
        service = on_gpu["services"][name]
        assert service["image"] == "specahead:cuda"
        assert (service["build"]["target"], service["build"]["args"]) == ("cuda", ["VARIANT=cuda"])
        if name != "orchestrator":
            (device,) = service["deploy"]["resources"]["reservations"]["devices"]
            ids[name] = device["device_ids"]
    assert ids == {"target": ["0"], "draft": ["1"]}
    target = on_gpu["services"]["target"]
    assert target["shm_size"] == "1gb" and target["ulimits"] == {"memlock": -1}
