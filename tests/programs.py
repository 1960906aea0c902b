"""Python programs that run in a process of their own, where what is imported or cached in this one does not count."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_program(
    program: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a program from the project's root. environment: None: that of this process."""
    command = [sys.executable, "-c", program, *arguments]
    given = os.environ if environment is None else environment
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False, timeout=120)


def printed_by(program: str, environment: Mapping[str, str] | None = None) -> str:
    """Return what a program prints, which must not fail."""
    done = run_program(program, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
