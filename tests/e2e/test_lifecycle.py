"""A launch from its start to its end, on a Ray of its own."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc

from tests.client import generate, make_request
from tests.stack import ROOT, START_SECONDS, Stack, free_port, start_stack

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def _children(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += _children(int(child))
    return found


def _listening(pid: int) -> dict[str, str]:
    """Local address (hex) of each listening socket of a process, by inode."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = os.readlink(entry)
        except OSError:
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    sockets = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                sockets[fields[9]] = fields[1].split(":")[0]
    return sockets


def test_everything_binds_to_loopback_and_stops_cleanly() -> None:
    """No Ray runs: launch starts one. At SIGTERM a short request finishes, a long one is told why it ends."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))  # short: sockets lie in it
    environment = {"RAY_ADDRESS": "", "TMPDIR": str(folder)}
    stack: Stack = start_stack("--ray-address", "auto", "--shutdown-grace", "6", environment=environment)
    assert "started one" in stack.output.read_text()
    processes = _children(stack.process.pid)
    assert {stack.target_pid, stack.draft_pid} <= set(processes)
    nice = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (stack.process.pid, stack.target_pid, stack.draft_pid)]
    assert len(set(nice)) == 1, nice  # Ray's own choice is to let everything else go first
    sockets: dict[str, str] = {}
    for pid in processes:
        sockets |= _listening(pid)
    assert len(sockets) >= 4
    assert set(sockets.values()) <= LOOPBACK

    stub = stack.stub()
    outcome: dict[str, Any] = {}

    def run_short() -> None:
        outcome["short"] = generate(stub, "The old man", max_tokens=30, ignore_eos=True).tokens

    def run_long() -> None:
        try:
            list(stub.Generate(make_request("The old man", max_tokens=30_000, ignore_eos=True)))
        except grpc.RpcError as error:
            outcome["long"] = error

    threads = [threading.Thread(target=run) for run in (run_short, run_long)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    stack.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(30)
    assert len(outcome["short"]) == 30
    assert outcome["long"].code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in outcome["long"].details()
    assert stack.process.wait(30) == 0
    assert "stopping" in stack.output.read_text()
    deadline = time.monotonic() + 15
    while left := [pid for pid in processes if Path(f"/proc/{pid}/cmdline").exists() and _alive(pid)]:
        assert time.monotonic() < deadline, f"processes {left} outlive the launch"
        time.sleep(0.2)
    left_files = [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")]
    assert not left_files, "nothing but torch's cache is left in the temporary folder"
    shutil.rmtree(folder)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


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
        assert process.wait(10) == 0
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
