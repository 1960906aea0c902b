"""What is published: the source archive and the wheel, whose version is a tag of git, and the SBOM. `make dist`."""

import json
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.deploy.tools import DEPLOY, run_tool
from tests.sources import copy_sources
from tests.stack import ROOT


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def version_of(folder: Path) -> str:
    """Return the version that a build of these sources would have."""
    return run_tool("setuptools-scm", cwd=folder).split()[-1]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources in a fresh repository with one commit."""
    folder = copy_sources(tmp_path_factory.mktemp("sources") / "specahead")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all")
    return folder


def test_a_tag_is_the_version(repository: Path) -> None:
    assert version_of(repository).startswith("0.1.0.dev1+g")  # without a tag, as on a clean and shallow checkout
    git(repository, "tag", "v1.2.0")
    assert version_of(repository) == "1.2.0"
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "later")
    assert version_of(repository).startswith("1.2.1.dev1+g")
    git(repository, "tag", "--delete", "v1.2.0")


def test_without_git_there_is_a_version(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert version_of(tmp_path) == "0.1.0.dev0"


def test_the_archive_and_the_wheel_can_be_published(repository: Path, tmp_path: Path) -> None:
    run_tool("pyproject-build", "--no-isolation", "--outdir", tmp_path, repository)
    files = sorted(tmp_path.iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    assert run_tool("twine", "check", "--strict", *files).count("PASSED") == 2
    names = zipfile.ZipFile(files[0]).namelist()  # built from the archive
    assert {"specahead/kernels/rejection/race.py", "specahead/py.typed", "specahead/models/tiny-plan.json"} < {*names}
    assert not [name for name in names if name.endswith(".npz")]
    with tarfile.open(files[1]) as archive:
        kept = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "specahead/lab/benchmarks/traces/reads.npz"} < kept


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_the_sbom_names_what_the_product_consists_of(variant: str, tmp_path: Path) -> None:
    file = tmp_path / "sbom.json"
    options = ["--pyproject", ROOT / "pyproject.toml", "--output-file", file]
    run_tool("cyclonedx-py", "requirements", *options, DEPLOY / "image" / f"requirements-{variant}.txt")
    content = json.loads(file.read_text())
    assert content["bomFormat"] == "CycloneDX" and content["metadata"]["component"]["name"] == "specahead"
    parts = {part["name"]: part for part in content["components"]}
    assert {"torch", "ray", "grpcio", "transformers"} < {*parts} and "matplotlib" not in parts
    assert ("nvidia-cublas" in parts) == (variant == "cuda")
    assert parts["ray"]["purl"].startswith("pkg:pypi/ray@")
