"""A launch whose services cannot start yet. test_failures.py has the start and end of a whole one."""

import os
import subprocess
import sys
import time

import pytest

from tests.client import status_of
from tests.conftest import RAY_ENVIRONMENT
from tests.stack import ROOT, START_SECONDS, free_port


def test_a_start_that_waits_for_its_services_answers_probes_and_stops_when_told() -> None:
    """In a cluster a target may load for minutes. The launch is alive, not ready, and ends at once at SIGTERM."""
    port = free_port()
    flags = ["--target-address", f"127.0.0.1:{free_port()}", "--timeouts", '{"connect": 0}', "--port", str(port)]
    command = [sys.executable, "-m", "orchestrator.launch", "--grpc-port", "0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while status_of(f"http://127.0.0.1:{port}/live") != 200:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        assert status_of(f"http://127.0.0.1:{port}/ready") == 503
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        _, said = process.communicate()
    assert "Traceback" not in said


@pytest.mark.long
def test_a_start_that_waits_for_room_in_a_joined_ray_stops_when_told(ray_address: str) -> None:
    """A node with a GPU may join later. Until then SIGTERM ends the launch without a traceback of Ray's."""
    process = _launch_on_gpu(*("--namespace", "waiting"), **RAY_ENVIRONMENT, RAY_ADDRESS=ray_address)
    said = ""
    try:
        while "waiting until Ray has room for target and draft" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        said += process.communicate()[1]
    assert "***" not in said and "Traceback" not in said, said


def _launch_on_gpu(*flags: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orchestrator.launch", "--device", "cuda", "--grpc-port", "0", "--port", "0"]
    pipe = subprocess.PIPE
    variables = os.environ | environment
    return subprocess.Popen([*command, *flags], cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=variables)
