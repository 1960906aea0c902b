"""The image's files, without building it: `make image-smoke` does that."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from specahead.config.launch import ClientSettings
from tests.deploy.tools import DEPLOY, run_checkov, run_tool
from tests.stack import ROOT

DOCKERFILE = DEPLOY / "image" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def locked(variant: str) -> dict[str, str]:
    """The versions of an image's requirements, each of which has a hash."""
    text = (DEPLOY / "image" / f"requirements-{variant}.txt").read_text().replace("\\\n", "")
    versions = {}
    for line in text.splitlines():
        name, version = re.match(r"([a-z0-9-]+)==(\S+)", line).groups()
        assert "--hash=sha256:" in line, line
        versions[name] = version
    return versions


def test_hadolint() -> None:
    run_tool("hadolint", DOCKERFILE)


def test_checkov() -> None:
    run_checkov("dockerfile", DOCKERFILE)


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_the_requirements_are_what_the_project_needs(variant: str) -> None:
    versions = locked(variant)
    project = PROJECT["project"]
    for line in project["dependencies"] + project["optional-dependencies"]["otel"]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(versions[requirement.name]), requirement
    assert ("nvidia-cublas" in versions) == (variant == "cuda")
    assert versions["torch"].endswith("+cpu") == (variant == "cpu")


def test_both_variants_have_the_same_versions() -> None:
    cpu, cuda = locked("cpu"), locked("cuda")
    differing = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert differing <= {"torch", "triton"}


def test_all_packages_reach_the_builder() -> None:
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = {name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= let_through
    assert all(list(ROOT.glob(pattern)) for pattern in let_through)


def test_labels_ports_and_health_are_the_products() -> None:
    text, clients = DOCKERFILE.read_text(), ClientSettings()
    version = PROJECT["tool"]["setuptools_scm"]["fallback_version"].removesuffix(".dev0")
    assert f"ARG VERSION={version}\n" in text
    assert f"EXPOSE {clients.port} {clients.grpc_port} 50052 50053\n" in text
    assert f'CMD ["specahead", "health", "127.0.0.1:{clients.grpc_port}"]' in text
    assert text.rindex("USER 10001:10001") > text.rindex("USER 0")
