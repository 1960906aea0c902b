"""A launch whose services are not there yet. Its start and end where they are: test_failures.py."""

import subprocess
import sys
import time
import urllib.error
import urllib.request

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


def _status_of(url: str) -> int:
    """Return the status that an address answers with, 0 if nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
