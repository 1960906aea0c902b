"""What `make setup` installs on a machine without a GPU is what pyproject.toml allows."""

import re
import tomllib

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

from tests.stack import ROOT

LOCKS = ["requirements-cpu.txt", "requirements-torch-cpu.txt"]


def locked(python: str) -> dict[str, str]:
    """Return the version of each package that the lock files name for Linux and this version of Python."""
    versions = {}
    for file in LOCKS:
        for line in re.findall(r"^\w.*==.*$", (ROOT / file).read_text(), re.MULTILINE):
            name, version, marker = re.fullmatch(r"(\S+)==(\S+)(?: ; (.*?))? \\", line).groups()
            if marker is None or Marker(marker).evaluate({"python_full_version": python, "sys_platform": "linux"}):
                assert name not in versions, f"{name} has two versions for Python {python}"
                versions[name] = version
    return versions


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0"])
def test_the_lock_has_what_the_project_asks_for(python: str) -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, built_by = content["project"], content["build-system"]["requires"]
    extras = project["optional-dependencies"]
    versions = locked(python)
    for line in project["dependencies"] + extras["dev"] + extras["lab"] + extras["otel"] + built_by:
        wanted = Requirement(line)
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        assert name in versions, f"{line} is not in requirements-cpu.txt: run make lock"
        assert wanted.specifier.contains(versions[name]), f"{line}, but {versions[name]} is locked: run make lock"


def test_each_locked_version_has_a_hash() -> None:
    for file in LOCKS:
        packages = re.split(r"^(?=\w)", (ROOT / file).read_text(), flags=re.MULTILINE)[1:]
        assert packages and all("--hash=sha256:" in package for package in packages)
