"""The tools that check deploy/, which `make check-deploy` installs, and what several tests read with them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.stack import ROOT

DEPLOY = ROOT / "deploy"
_TOOLS = [str(ROOT / ".deploy" / environment / "bin") for environment in ("tools", "dist")]
_PROGRAMS = {
    "target": ["-m", "target_service"],
    "draft": ["-m", "draft_service"],
    "orchestrator": ["-m", "orchestrator.launch"],
}
Object = dict[str, Any]


def run_tool(name: str, *arguments: str | Path, cwd: Path = ROOT, fails: bool = False) -> str:
    """Return what a tool says; the test fails if it ends with an error, or, where that is expected, without."""
    found = shutil.which(name, path=os.pathsep.join([*_TOOLS, os.environ.get("PATH", "")]))
    if found is None:
        pytest.fail(f"{name} is not installed: run `make check-deploy`")
    done = subprocess.run([found, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, said
    return said if fails else done.stdout


def run_checkov(framework: str, *files: Path) -> None:
    """Fail with what checkov finds. What is left out on purpose stands in deploy/checkov.yaml."""
    options = ["--config-file", str(DEPLOY / "checkov.yaml"), "--framework", framework]
    run_tool("checkov", *options, *(part for file in files for part in ("--file", str(file))))


def render_chart(*values: Path) -> list[Object]:
    """The objects of the chart with these files of values."""
    return documents(run_tool("python", DEPLOY / "render_chart.py", *values))


def kustomize(folder: Path) -> list[Object]:
    """The objects that a folder gives."""
    return documents(run_tool("kubectl", "kustomize", folder))


def documents(text: str) -> list[Object]:
    return [item for item in yaml.safe_load_all(text) if item]


def validate(objects: list[Object], folder: Path) -> None:
    """Check objects against Kubernetes' own schemas, unknown fields included."""
    file = folder / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    said = run_tool("kubernetes-validate", "--strict", file)
    assert said.count(" passed ") == len(objects), said


def of_kind(objects: list[Object], kind: str) -> Iterator[Object]:
    return (item for item in objects if item["kind"] == kind)


def container_of(workload: Object) -> Object:
    """The one container of a Deployment."""
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container


def settings_of(command: list[str], environment: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a container's command results in, by the product's own reading of flags and environment."""
    program = command[command.index("-m") - 1 :]
    assert program[:1] == ["python"], command
    assert program[1:3] in _PROGRAMS.values(), command
    given = {name: str(value) for name, value in environment.items()}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECAHEAD_")}
    done = subprocess.run(
        [sys.executable, *program[1:], "--dry-run"],
        cwd=ROOT,
        env=kept | given,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)
