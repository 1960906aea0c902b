"""A launch with a Ray of its own: target and draft are killed and stopped, the raylet is killed."""

import os
import signal
from pathlib import Path

from tests.chaos.setting import Held, break_things, conclude, make_cases, pid_of
from tests.chaos.traffic import Traffic
from tests.stack import Stack, start_stack


def run(seconds: float, seed: int, clients: int, keep_ray: bool) -> list[str]:
    """Return what must not be."""
    flags = ("--ray-address", "auto", "--tool-call-parser", "hermes", "--target-kv-tokens", "40000")
    stack = start_stack(*flags, environment={"RAY_ADDRESS": ""})
    try:
        cases = make_cases(stack)
        traffic = Traffic(cases, lambda: (stack.grpc, stack.http), clients, seed)
        before = Held.by(stack.process.pid)
        traffic.start()
        faults = {
            f"{name} the {side}": lambda side=side, number=number: _signal(pid_of(stack.http, side), number)
            for side in ("target", "draft")
            for name, number in (("kill", signal.SIGKILL), ("kill again", signal.SIGKILL), ("stop", signal.SIGSTOP))
        }
        if not keep_ray:
            faults["kill the raylet"] = lambda: [_signal(pid, signal.SIGKILL) for pid in _raylets(stack)]
        try:
            count = break_things(faults, lambda: stack.http, seconds, seed)
        except AssertionError as error:
            return [f"processes: {error}\n{stack.output.read_text()[-3000:]}"]
        return conclude("processes", traffic, count, stack.http, before, stack.process.pid)
    finally:
        stack.stop()


def _signal(pid: int, number: int) -> None:
    if pid:  # a service that starts has none yet
        os.kill(pid, number)


def _raylets(stack: Stack) -> list[int]:
    children = Path(f"/proc/{stack.process.pid}/task/{stack.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"]
