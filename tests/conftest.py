"""Fixtures that several test files share."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.loading import load_tokenizer
from models import TARGET
from tests.stack import ROOT, Stack, start_stack

CORPUS = ROOT.parent / "shared" / "corpus"


@pytest.fixture(scope="session")
def books() -> list[str]:
    """The held-out books, in a fixed order."""
    files = sorted(CORPUS.glob("*.txt"))
    if not files:
        pytest.skip(f"the held-out books are not at {CORPUS}")
    return [file.read_text(encoding="utf-8") for file in files]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer(str(TARGET))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray on loopback for all launches of the test run, started as a user would."""
    ray = Path(sys.executable).with_name("ray")
    environment = os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    start = [ray, "start", "--head", "--node-ip-address=127.0.0.1", "--port=0", "--include-dashboard=false"]
    subprocess.run([*start, "--num-cpus=4"], check=True, env=environment, capture_output=True)
    yield
    subprocess.run([ray, "stop"], check=False, env=environment, capture_output=True)


@pytest.fixture(scope="session")
def stack(ray_cluster: None) -> Iterator[Stack]:
    """The bundled pair behind a launch with default settings, shared by tests that leave it as they found it."""
    running = start_stack("--namespace", "shared")
    yield running
    running.stop()
