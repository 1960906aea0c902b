"""A launch with a Ray of its own: targets and drafts are killed and stopped, and the raylet is killed.

The launch is an orphan, as under nohup or systemd, because Ray's client behaves differently if its parent is process 1.
"""

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable

import psutil

from tests.chaos.setting import DRAFTS, EACH, TARGETS, Held, Outcome, Pace, break_things, grown, make_cases, pid_of
from tests.chaos.traffic import Traffic
from tests.plans import sparse_plan_file
from tests.stack import Stack, start_stack


def run(pace: Pace, seed: int, clients: int, keep_ray: bool) -> Outcome:
    """Run the launch, break it and return the outcome."""
    flags = ("--ray-address", "auto", "--targets", str(EACH), "--drafts", str(EACH), "--tool-call-parser", "hermes")
    with tempfile.TemporaryDirectory(prefix="specahead-chaos-") as nowhere:  # where Ray finds no other instance
        environment = {"RAY_ADDRESS": "", "RAY_TMPDIR": nowhere}
        room = ("--kv-tokens", "40000", "--plan", sparse_plan_file())
        stack = start_stack(*flags, *room, environment=environment, patience=pace.recovery, orphaned=True)
        try:
            return _break(stack, pace, seed, clients, keep_ray)
        finally:
            stack.stop()


def _break(stack: Stack, pace: Pace, seed: int, clients: int, keep_ray: bool) -> Outcome:
    traffic = Traffic(make_cases(stack), lambda: (stack.grpc, stack.http), clients, seed)
    before = Held.by(stack.process.pid)
    traffic.start()
    faults: dict[str, Callable[[], bool]] = {
        f"{name} {service}": lambda service=service, number=number: _signal(pid_of(stack.http, service), number)
        for service in (*TARGETS, *DRAFTS)
        for name, number in (("kill", signal.SIGKILL), ("kill again", signal.SIGKILL), ("stop", signal.SIGSTOP))
    }
    if not keep_ray:
        faults["kill the raylet"] = lambda: any(_signal(pid, signal.SIGKILL) for pid in _raylets(stack))
    outcome = break_things(faults, traffic, stack, pace, seed)
    outcome.violations.extend(grown(before, stack.process.pid))
    return outcome


def _signal(pid: int, number: int) -> bool:
    """Send a signal, and return whether there was such a process. A starting service has none yet."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
    return False


def _raylets(stack: Stack) -> list[int]:
    """Return the raylets that any thread of the launch started."""
    return [child.pid for child in psutil.Process(stack.process.pid).children() if child.name() == "raylet"]
