"""A skipped test fails under CI, unless a GPU is its reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack import ROOT

TESTS = """
import pytest
def test_text(): pytest.skip("no text")
@pytest.mark.skipif(True, reason="no library")
def test_library(): ...
def test_gpu(): pytest.skip("needs a GPU")
"""


@pytest.mark.parametrize(("ci", "result"), [("", "3 skipped"), ("true", "1 failed, 1 skipped, 2 errors")])
def test_a_skip_fails_under_ci_unless_a_gpu_is_the_reason(tmp_path: Path, ci: str, result: str) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    if ci:
        (tmp_path / "test_module.py").write_text('import pytest\npytest.importorskip("no_such_module")\n')
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.skips", "--continue-on-collection-errors", "."]
    environment = os.environ | {"CI": ci, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result in done.stdout, done.stdout
