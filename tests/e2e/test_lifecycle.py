"""A launch whose services are not there yet. Its start and end where they are: test_failures.py."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.conftest import RAY_ENVIRONMENT
from tests.stack import ROOT, START_SECONDS, free_port


def test_a_start_that_waits_for_its_services_answers_probes_and_stops_when_told() -> None:
    """As in a cluster, where a target may load for minutes: alive, not ready, and gone at once at SIGTERM."""
    port = free_port()
    flags = ["--target-address", f"127.0.0.1:{free_port()}", "--connect-timeout", "0", "--http-port", str(port)]
    command = [sys.executable, "-m", "orchestrator.launch", "--grpc-port", "0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while _status_of(f"http://127.0.0.1:{port}/live") != 200:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        assert _status_of(f"http://127.0.0.1:{port}/ready") == 503
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        _, said = process.communicate()
    assert "Traceback" not in said


def test_a_start_that_waits_for_room_in_a_joined_ray_stops_when_told(ray_address: str) -> None:
    """A GPU may come with a node that joins; until then SIGTERM ends the launch, without a stack of Ray's."""
    process = _launch_on_gpu(*("--namespace", "waiting"), **RAY_ENVIRONMENT, RAY_ADDRESS=ray_address)
    said = ""
    try:
        assert process.stderr is not None
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


def test_a_start_that_its_own_ray_can_never_serve_is_refused(tmp_path: Path) -> None:
    """It waited for ever. One GPU is as good as none for two services; Ray is made to believe that there is one."""
    own = {"RAY_ADDRESS": "", "RAY_TMPDIR": str(tmp_path), "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": 1})}
    process = _launch_on_gpu("--ray-address", "auto", **own)
    try:
        _, said = process.communicate(timeout=START_SECONDS)
    finally:
        process.kill()
    *log, message = said.splitlines()
    assert process.returncode == 1, said
    assert "error: the 2 services need 2 GPU, but the Ray that was started on this machine has 1" in message
    assert "--device auto" in message
    assert all(" INFO " in line for line in log), said


def _launch_on_gpu(*flags: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orchestrator.launch", "--device", "cuda", "--grpc-port", "0", "--http-port", "0"]
    pipe = subprocess.PIPE
    variables = os.environ | environment
    return subprocess.Popen([*command, *flags], cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=variables)


def _status_of(url: str) -> int:
    """Return the status that an address answers with, 0 if nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
