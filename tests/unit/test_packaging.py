"""Our package `kernels` has the import name of Hugging Face's; transformers must not take it for that."""

import tomllib
from pathlib import Path

from packaging.version import Version
from transformers.utils.import_utils import KERNELS_MIN_VERSION

import kernels
from tests.programs import printed_by

ROOT = Path(__file__).resolve().parents[2]


def test_transformers_does_not_take_our_kernels_for_hugging_faces() -> None:
    """In a fresh process, as the answer is cached in this one."""
    program = (
        "import kernels, pathlib\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "print(pathlib.Path(kernels.__file__).resolve().parent, is_kernels_available())"
    )
    assert printed_by(program).split() == [str(ROOT / "kernels"), "False"]


def test_kernels_version_is_the_projects_and_below_what_transformers_accepts() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert kernels.__version__ == project["version"]
    assert Version(kernels.__version__) < Version(KERNELS_MIN_VERSION)
