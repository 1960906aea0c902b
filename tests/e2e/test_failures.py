"""A draft or target that is killed or hangs, and a Ray that dies: noticed in 10 s, replaced in 30, no token wrong or
repeated, and speculation comes back.

All tests share one launch on a Ray of its own: its start, the faults that it survives, and its end. The launch is an
orphan: under nohup, systemd and in a container its parent is process 1, which Ray's client takes for a dead raylet.
"""

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.client import generate, make_request, metric, service_state, status_of, wait_for, wait_until_idle
from tests.stack import Stack, start_stack

# Seconds on a quiet machine; `Stack.patience` scales them to this one.
NEXT_TOKEN, NOTICED, REPLACED, PLACED_ANEW = 2, 10, 30, 60
TOKENS = 400
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """The launch's temporary folder. Its name is short because it holds sockets."""
    folder = Path(tempfile.mkdtemp(prefix="t-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def mortal(folder: Path) -> Iterator[Stack]:
    """A launch with a Ray of its own. The tests kill and stop its processes."""
    flags = ("--ray-address", "auto", "--timeouts", '{"shutdown": 6, "resume": 120}')
    stack = start_stack(*flags, environment={"RAY_ADDRESS": "", "TMPDIR": str(folder)}, orphaned=True)
    yield stack
    stack.stop()


@pytest.fixture(scope="module")
def prompt(books: list[str], tokenizer: Any) -> list[int]:
    return list(tokenizer.encode(books[0][:6000])[:500])


@pytest.fixture(scope="module")
def expected(mortal: Stack, prompt: list[int]) -> list[int]:
    """The tokens that every request here must get."""
    return generate(mortal.stub(), prompt, max_tokens=TOKENS, ignore_eos=True).tokens


class Request:
    """A greedy request that has its first token and continues in a thread."""

    def __init__(self, stack: Stack, prompt: list[int]) -> None:
        self.tokens: list[int] = []
        responses = stack.stub().Generate(make_request(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True))
        self._responses = iter(responses)
        self.tokens += next(self._responses).token_ids
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for response in self._responses:
            self.tokens += response.token_ids

    def result(self) -> list[int]:
        self._thread.join(120)
        return self.tokens


def is_healthy(stack: Stack) -> bool:
    return status_of(f"{stack.http}/health") == 200


def pid_of(stack: Stack, service: str) -> int:
    """Return the process id of a service, 0 if it does not answer."""
    return int(service_state(stack.http, service, "pid"))


def is_attached(stack: Stack) -> bool:
    return metric(stack.http, "service_attached", service="target") == 1


def wait_for_another(stack: Stack, service: str, pid: int, seconds: float) -> None:
    wait_for(lambda: pid_of(stack, service) not in (0, pid), stack.patience(seconds), f"another {service}")


def test_everything_binds_to_loopback(mortal: Stack) -> None:
    """No Ray runs, so the launch starts one. Its processes listen on loopback only as well."""
    assert "started one" in mortal.output.read_text()
    processes = _below(mortal.process.pid)
    assert {mortal.target_pid, mortal.draft_pid} <= set(processes)
    nice = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (mortal.process.pid, mortal.target_pid, mortal.draft_pid)]
    assert len(set(nice)) == 1, nice  # Ray by default gives its processes a low priority
    sockets: dict[str, str] = {}
    for pid in processes:
        sockets |= _listening(pid)
    assert len(sockets) >= 4
    assert set(sockets.values()) <= LOOPBACK


def test_draft_killed(mortal: Stack, prompt: list[int], expected: list[int]) -> None:
    """Its sessions are decoded plainly. The next draft takes up a session that outlives it in mid-stream."""
    lasting = mortal.stub().Generate(make_request("The old man", temperature=0, max_tokens=20_000, ignore_eos=True))
    next(lasting)
    pid = pid_of(mortal, "draft")
    tokens, pause = _stream(mortal, prompt, 40, pid)
    assert tokens == expected
    assert pause < mortal.patience(NEXT_TOKEN), "plain decoding takes over"
    wait_for_another(mortal, "draft", pid, REPLACED)
    drafts = metric(mortal.http, "spec_decode_num_drafts_total")
    wait_for(lambda: is_attached(mortal), 60, "the target takes it")

    def drafted_again() -> bool:
        next(lasting)
        return service_state(mortal.http, "target", "drafted_sessions") == 1

    wait_for(drafted_again, 60, "the running session is drafted again")
    lasting.cancel()
    again = generate(mortal.stub(), prompt, max_tokens=TOKENS, ignore_eos=True)
    assert again.tokens == expected
    assert again.speculation.accepted > 0
    assert metric(mortal.http, "spec_decode_num_drafts_total") > drafts
    wait_until_idle(mortal.http)


def test_target_killed(mortal: Stack, prompt: list[int], expected: list[int]) -> None:
    """The stream resumes from the ledger on the restarted target."""
    assert _stream(mortal, prompt, 40, pid_of(mortal, "target"))[0] == expected
    wait_until_idle(mortal.http)


def test_a_target_and_a_draft_that_hang_are_noticed_and_replaced(
    mortal: Stack, prompt: list[int], expected: list[int]
) -> None:
    wait_for(lambda: is_attached(mortal), 60, "the draft is attached")
    target, draft = pid_of(mortal, "target"), pid_of(mortal, "draft")
    request = Request(mortal, prompt)
    for pid in (target, draft):
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: not is_healthy(mortal), mortal.patience(NOTICED), "/health tells that the target hangs")
    wait_for(lambda: is_healthy(mortal), mortal.patience(REPLACED - NOTICED), "another target serves")
    assert pid_of(mortal, "target") not in (0, target)
    wait_for_another(mortal, "draft", draft, REPLACED)
    assert request.result() == expected


def test_services_are_placed_anew_when_ray_dies(mortal: Stack, prompt: list[int], expected: list[int]) -> None:
    pid = pid_of(mortal, "target")
    request = Request(mortal, prompt)
    os.kill(_raylet_of(mortal), signal.SIGKILL)
    wait_for(lambda: not _is_alive(pid), mortal.patience(NOTICED), "the target ends itself")
    assert len(request.tokens) < TOKENS, "the request was served before anything was lost"
    wait_for_another(mortal, "target", pid, PLACED_ANEW)
    assert "Ray is lost" in mortal.output.read_text()
    assert request.result() == expected
    wait_for(lambda: is_attached(mortal), 60, "the draft is attached")
    wait_until_idle(mortal.http)


def test_sigterm_ends_all_and_leaves_nothing(mortal: Stack, folder: Path) -> None:
    """A short request finishes, and a long one ends with the reason. No process is left, except two agents of the Ray
    that was started again, which end by themselves within a minute.

    Ray's helpers get SIGTERM before the launch does, as from systemd or a process group; nothing is said of that.
    """
    processes = {pid for pid in _below(mortal.process.pid) if not _name_of(pid).endswith("Agent")}
    assert {mortal.process.pid, pid_of(mortal, "target"), pid_of(mortal, "draft")} <= processes
    stub = mortal.stub()
    long = stub.Generate(make_request("The old man", max_tokens=30_000, ignore_eos=True))
    next(long)
    short = stub.Generate(make_request("The old man", max_tokens=30, ignore_eos=True))
    tokens = list(next(short).token_ids)
    said = len(mortal.output.read_text())
    for helper in psutil.Process(mortal.process.pid).children():
        if helper.name() not in ("raylet", "gcs_server"):
            helper.terminate()
    mortal.process.send_signal(signal.SIGTERM)
    for response in short:
        tokens += response.token_ids
    assert len(tokens) == 30
    with pytest.raises(grpc.RpcError) as told:
        list(long)
    assert told.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in told.value.details()
    mortal.process.wait(60)
    ending = mortal.output.read_text()[said:]
    assert "stopping" in ending and "autoscaler" not in ending and "Traceback" not in ending, ending
    wait_for(lambda: not any(map(_is_alive, processes)), 60, "no process outlives the launch")
    left_files = [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")]
    assert not left_files, "nothing but torch's cache is left in the temporary folder"


def _stream(stack: Stack, prompt: list[int], kill_after: int, pid: int) -> tuple[list[int], float]:
    """Return the tokens of a greedy stream during which `pid` is killed, and the longest pause between later
    messages."""
    tokens: list[int] = []
    pause, killed, last = 0.0, False, time.monotonic()
    request = make_request(prompt, temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for response in stack.stub().Generate(request):
        now = time.monotonic()
        if killed:
            pause = max(pause, now - last)
        last = now
        tokens += response.token_ids
        if not killed and len(tokens) >= kill_after:
            os.kill(pid, signal.SIGKILL)
            killed, last = True, time.monotonic()
    return tokens, pause


def _raylet_of(stack: Stack) -> int:
    (raylet,) = [child.pid for child in psutil.Process(stack.process.pid).children() if child.name() == "raylet"]
    return int(raylet)


def _below(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += _below(int(child))
    return found


def _name_of(pid: int) -> str:
    """Return the name that a process gave itself."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0].strip()


def _listening(pid: int) -> dict[str, str]:
    """Return the local address (hex) of each listening socket of a process, by inode."""
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


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
