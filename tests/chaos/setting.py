"""What the parts of a chaos run have alike: prompts with expected tokens, what a process holds, how faults come."""

import random
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.loading.tokenizer import load_tokenizer
from models import TARGET
from tests.books import read_books
from tests.chaos.traffic import Case, Traffic
from tests.client import generate, metric, service_state, wait_for, wait_until_idle
from tests.stack import Stack

NEW_TOKENS, LENGTHS = 150, (20, 200, 700, 1500)
RECOVERY_SECONDS = 120


def make_cases(stack: Stack) -> list[Case]:
    """Return a prompt from each book with the tokens that the undisturbed stack gives one after the other."""
    tokenizer, stub = load_tokenizer(str(TARGET)), stack.stub()
    prompts = [tokenizer.encode(b[9000:29_000])[:n] for b, n in zip(read_books(), LENGTHS, strict=True)]
    return [Case(p, generate(stub, p, max_tokens=NEW_TOKENS, ignore_eos=True).tokens) for p in prompts]


def is_whole(http: str) -> bool:
    """Return whether the target serves and has its draft."""
    try:
        with urllib.request.urlopen(f"{http}/health", timeout=5):
            return metric(http, "service_attached", service="target") == 1
    except OSError:
        return False


def pid_of(http: str, side: str) -> int:
    """Return the process of a service; 0 if it does not answer."""
    try:
        return int(service_state(http, side, "pid"))
    except OSError:
        return 0


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    megabytes: float
    files: int
    threads: int

    @staticmethod
    def by(pid: int) -> "Held":
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return Held(int(status["VmRSS"].split()[0]) / 1024, files, int(status["Threads"]))

    def excess(self, before: "Held") -> str:
        """Return what is more than before by more than what varies; empty if nothing is."""
        limits = {"megabytes": before.megabytes * 1.2 + 64, "files": before.files + 20, "threads": before.threads + 20}
        return ", ".join(
            f"{n} {getattr(before, n):.0f} -> {getattr(self, n):.0f}" for n in limits if getattr(self, n) > limits[n]
        )


def break_things(
    faults: Mapping[str, Callable[[], None]], http: Callable[[], str], seconds: float, seed: int
) -> Counter[str]:
    """Let faults come at random for so long, each mostly after the last is mended. Returns how many there were of each.

    Raises AssertionError if the services do not find each other again within RECOVERY_SECONDS.
    """
    rng, count = random.Random(seed), Counter[str]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(rng.uniform(0.5, 6))
        name = rng.choice(list(faults))
        faults[name]()
        count[name] += 1
        print(f"{seconds - (end - time.monotonic()):5.0f} s: {name}", flush=True)
        if rng.random() < 0.8:
            wait_for(lambda: is_whole(http()), RECOVERY_SECONDS, f"all is whole again after {name}")
    wait_for(lambda: is_whole(http()), RECOVERY_SECONDS, "all is whole again at the end")
    return count


def conclude(part: str, traffic: Traffic, faults: Counter[str], http: str, before: Held, pid: int) -> list[str]:
    """Stop the traffic, print what came of it, and return what must not be. pid: of a process that outlived all."""
    traffic.stop()
    violations = [f"{part}: {violation}" for violation in traffic.violations]
    try:
        wait_until_idle(http, 60)
    except AssertionError as error:
        violations.append(f"{part}: sessions or pages are left: {error}")
    if metric(http, "num_requests_running"):
        violations.append(f"{part}: a request is still running")
    after = Held.by(pid)
    if excess := after.excess(before):
        violations.append(f"{part}: process {pid} holds more than at the beginning: {excess}")
    print(f"{part}: {sum(faults.values())} faults: {dict(faults)}")
    for outcome, times in sorted(traffic.outcomes.items()):
        print(f"  {outcome}: {times}")
    print(f"  the process that outlived all held {before} and holds {after}", flush=True)
    return violations
