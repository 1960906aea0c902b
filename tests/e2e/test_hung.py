"""Processes that hang instead of dying, and a Ray that dies: noticed in 10 s, replaced in 30, and no wrong token."""

import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client import generate, metric, service_state, wait_for, wait_until_idle
from tests.stack import Stack, start_stack

NOTICED, REPLACED = 10, 30  # seconds
TOKENS = 1000
PROMPT = "The old man looked at the sea"


@pytest.fixture(scope="module")
def mortal() -> Iterator[Stack]:
    """A launch with a Ray of its own."""
    stack = start_stack("--ray-address", "auto", environment={"RAY_ADDRESS": ""})
    yield stack
    assert stack.stop() == 0, "also after Ray was started again, SIGTERM is the launch's own affair"


@pytest.fixture(scope="module")
def expected(mortal: Stack) -> list[int]:
    return generate(mortal.stub(), PROMPT, max_tokens=TOKENS, ignore_eos=True).tokens


class Request:
    """A greedy request that runs in a thread of its own, from its first token on."""

    def __init__(self, stack: Stack) -> None:
        self.tokens: list[int] = []
        self._stack = stack
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_for(lambda: metric(stack.http, "num_requests_running") == 1, 10, "the request runs")

    def _run(self) -> None:
        self.tokens = generate(self._stack.stub(), PROMPT, max_tokens=TOKENS, ignore_eos=True).tokens

    def result(self) -> list[int]:
        self._thread.join(60)
        return self.tokens


def is_healthy(stack: Stack) -> bool:
    try:
        with urllib.request.urlopen(f"{stack.http}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


def pid_of(stack: Stack, service: str) -> int:
    return int(service_state(stack.http, service, "pid"))


def test_a_stopped_target_is_noticed_and_replaced(mortal: Stack, expected: list[int]) -> None:
    pid = pid_of(mortal, "target")
    request = Request(mortal)
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    wait_for(lambda: not is_healthy(mortal), NOTICED, "/health tells that the target hangs")
    wait_for(lambda: is_healthy(mortal), stopped + REPLACED - time.monotonic(), "another target serves")
    assert pid_of(mortal, "target") not in (0, pid)
    assert request.result() == expected


def test_a_stopped_draft_is_noticed_and_replaced(mortal: Stack, expected: list[int]) -> None:
    wait_for(lambda: metric(mortal.http, "service_attached", service="target") == 1, 30, "the draft is attached")
    pid = pid_of(mortal, "draft")
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    wait_for(lambda: metric(mortal.http, "service_attached", service="target") == 0, NOTICED, "the target lets it go")
    wait_for(lambda: pid_of(mortal, "draft") not in (0, pid), stopped + REPLACED - time.monotonic(), "another draft")
    assert generate(mortal.stub(), PROMPT, max_tokens=TOKENS, ignore_eos=True).tokens == expected


def test_services_are_placed_anew_when_ray_dies(mortal: Stack, expected: list[int]) -> None:
    pid = pid_of(mortal, "target")
    request = Request(mortal)
    os.kill(_raylet_of(mortal), signal.SIGKILL)
    wait_for(lambda: pid_of(mortal, "target") not in (0, pid), 60, "the target is placed anew")
    assert "Ray is lost" in mortal.output.read_text()
    assert request.result() == expected
    wait_for(lambda: metric(mortal.http, "service_attached", service="target") == 1, 30, "the draft is attached")
    wait_until_idle(mortal.http)


def _raylet_of(stack: Stack) -> int:
    children = Path(f"/proc/{stack.process.pid}/task/{stack.process.pid}/children").read_text().split()
    (raylet,) = [pid for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"]
    return int(raylet)
