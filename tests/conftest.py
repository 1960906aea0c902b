"""Fixtures that several test files share."""

import os

# Threads of OpenMP that wait for one another sleep: several processes share the cores, and one that spins holds up all.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

if not torch.cuda.is_available():  # before any kernel is imported: Triton's run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

import itertools
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.models import TARGET
from tests import interpreter
from tests.altered import PATIENT
from tests.books import read_books
from tests.plans import sparse_plan_file
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401 (hooks)
from tests.stack import Stack, free_port, start_stack

if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.hasten()
    interpreter.round_to_nearest()

# Loopback only, and no token: a Ray that is named by RAY_ADDRESS takes one from the environment alone.
RAY_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}


@pytest.fixture(scope="session")
def books() -> list[str]:
    """The four books of tests/data, in a fixed order."""
    return read_books()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer(str(TARGET))


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray on loopback for all launches of the test run, started as a user would; leaves any other Ray alone."""
    port = free_port()
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    start += ["--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir=/tmp/ray-{port}"]
    start += ["--include-dashboard=false", "--num-cpus=8", "--disable-usage-stats"]
    process = subprocess.Popen(start, env=os.environ | RAY_ENVIRONMENT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert process.poll() is None, "ray start failed"
        assert time.monotonic() < deadline, "ray start did not listen within 60 s"
        time.sleep(0.2)
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait(30)
    shutil.rmtree(f"/tmp/ray-{port}", ignore_errors=True)


@pytest.fixture(scope="session")
def _start(ray_address: str) -> Callable[..., Stack]:
    numbers = itertools.count()

    def start(*flags: str, environment: dict[str, str] | None = None, altered: str = "") -> Stack:
        variables = RAY_ENVIRONMENT | {"RAY_ADDRESS": ray_address} | (environment or {})
        module = ("tests.altered", altered, "orchestrator.launch") if altered else ("orchestrator.launch",)
        flags = ("--namespace", f"test-{next(numbers)}", *flags)
        return start_stack(*flags, environment=variables, command=("-m", *module))

    return start


@pytest.fixture(scope="module")
def launch(_start: Callable[..., Stack]) -> Iterator[Callable[..., Stack]]:
    """Start a launch on the test run's Ray; whatever is still running at the module's end is stopped.

    altered: values of its targets for fields without a flag, as JSON (tests/altered.py).
    """
    running: list[Stack] = []

    def start(*flags: str, **how: Any) -> Stack:
        running.append(_start(*flags, **how))
        return running[-1]

    yield start
    for stack in running:
        stack.end()
    for stack in running:
        stack.wait()


@pytest.fixture(scope="session")
def stack(_start: Callable[..., Stack]) -> Iterator[Stack]:
    """The bundled pair behind a launch that is shared by tests which leave it as they found it.

    Settings are the default ones, but that a busy machine's target waits for its draft, and that short texts are read
    sparsely, too.
    """
    stack = _start("--plan", sparse_plan_file(), altered=PATIENT)
    yield stack
    stack.stop()
