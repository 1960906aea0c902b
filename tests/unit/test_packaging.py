"""What the installed package brings: names of its own, which neither hide a user's modules nor are hidden by them."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.sources import copy_sources

ROOT = Path(__file__).resolve().parents[2]
OURS = {"specahead", "protos", "draft_service", "target_service", "orchestrator"}
# What users call files of their own; some were names of ours once, and Hugging Face has a package `kernels`.
USERS_NAMES = ("config", "models", "engine", "cli", "wire", "sparsity", "kernels", "benchmarks", "evaluation", "tests")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy of what git tracks."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = copy_sources(folder / "copy")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_brings_no_common_names(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == OURS
    assert "specahead/kernels/rejection/race.py" in names and "specahead/models/tiny-target/model.safetensors" in names


def test_a_wheel_brings_nothing_that_serving_does_not_need(wheel: Path) -> None:
    """It brings neither matplotlib, which the extra `lab` has, nor the recordings of benchmarks."""
    content = zipfile.ZipFile(wheel)
    assert [name for name in content.namelist() if name.endswith(".npz")] == []
    (metadata,) = (name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
    needed = [line for line in content.read(metadata).decode().splitlines() if line.startswith("Requires-Dist")]
    assert [line for line in needed if "matplotlib" in line] == ['Requires-Dist: matplotlib>=3.8; extra == "lab"']


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["bench", "agents", "--plot", "x.png"], "which is not installed: pip install 'specahead[lab]'"),
        (["bench", "codec"], "announced.npz is not there: an installed specahead comes without recordings"),
    ],
)
def test_what_an_installed_wheel_leaves_out_is_named(
    wheel: Path, tmp_path: Path, command: list[str], said: str
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        f"import sys; sys.path[1:1] = [{str(tmp_path)!r}]; sys.modules['matplotlib'] = None\n"
        f"from specahead.cli.main import main; main({command})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode and said in done.stderr.splitlines()[-1], done.stderr


def test_an_installed_wheel_runs_beside_a_users_files_of_common_names(wheel: Path, tmp_path: Path) -> None:
    """A user's models.py lies where Python looks first; so may Hugging Face's kernels, with either removed."""
    site, here = tmp_path / "site", tmp_path / "here"
    zipfile.ZipFile(wheel).extractall(site)
    here.mkdir()
    for name in USERS_NAMES:
        (here / f"{name}.py").write_text(f"raise AssertionError('a user\\'s {name}.py was imported')\n")
    program = (
        f"import sys; sys.path[1:1] = [{str(site)!r}]\n"
        "import pathlib, orchestrator.launch, target_service.__main__, draft_service.__main__\n"
        "import specahead.kernels.rejection, specahead.lab.evaluation.command, specahead.lab.benchmarks.flags\n"
        "from specahead.cli.main import main\n"
        "print(pathlib.Path(specahead.kernels.__file__).parents[2])\n"
        "main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{site}\n") and "specahead" in done.stdout


def test_hugging_faces_kernels_and_ours_are_two_packages(tmp_path: Path) -> None:
    """With both installed each is imported by its own name, and without theirs ours stays."""
    theirs = tmp_path / "kernels"
    theirs.mkdir()
    (theirs / "__init__.py").write_text("__version__ = '0.12.1'\nget_kernel = print\n")
    program = (
        "import sys, importlib\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import kernels, specahead.kernels.rejection\n"
        "assert hasattr(kernels, 'get_kernel') and not hasattr(specahead.kernels, 'get_kernel')\n"
        "sys.path.pop(0); sys.modules.pop('kernels'); importlib.reload(specahead.kernels)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
