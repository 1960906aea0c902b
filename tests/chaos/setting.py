"""What the parts of a chaos run have alike: prompts with expected tokens, what a process holds, how faults come."""

import random
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.cluster.directory import name_services
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.models import TARGET
from tests.books import read_books
from tests.chaos.traffic import Case, Traffic
from tests.client import generate, metric, service_state, wait_for, wait_until_idle
from tests.stack import Stack

NEW_TOKENS, LENGTHS = 150, (20, 200, 700, 1500)
EACH = 2  # targets, and drafts
TARGETS, DRAFTS = name_services("target", EACH), name_services("draft", EACH)


@dataclass(frozen=True)
class Pace:
    """How long faults come, how long there is none at most, and after how long all must be whole again: in seconds."""

    seconds: float
    pause: float
    recovery: float


@dataclass(frozen=True)
class Outcome:
    """What came of a part: what must not be, and how many faults there were of each kind."""

    violations: list[str]
    faults: Counter[str] = field(default_factory=Counter)


def make_cases(stack: Stack) -> list[Case]:
    """Return a prompt from each book with the tokens that the undisturbed stack gives one after the other."""
    tokenizer, stub = load_tokenizer(str(TARGET)), stack.stub()
    prompts = [tokenizer.encode(b[9000:29_000])[:n] for b, n in zip(read_books(), LENGTHS, strict=True)]
    return [Case(p, generate(stub, p, max_tokens=NEW_TOKENS, ignore_eos=True).tokens) for p in prompts]


def is_whole(http: str) -> bool:
    """Return whether each target serves and has all drafts."""
    try:
        return all(metric(http, "service_attached", service=target) == EACH for target in TARGETS)
    except OSError:
        return False


def is_ready(http: str) -> bool:
    """Return whether the gateway takes requests."""
    try:
        with urllib.request.urlopen(f"{http}/ready", timeout=5):
            return True
    except OSError:
        return False


def pid_of(http: str, service: str) -> int:
    """Return the process of a service; 0 if it does not answer."""
    try:
        return int(service_state(http, service, "pid"))
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
    faults: Mapping[str, Callable[[], bool]], http: Callable[[], str], pace: Pace, seed: int
) -> Counter[str]:
    """Let faults come at random, some before the last is mended. Returns how many there were of each.

    faults: by name, each returns whether it could happen. Raises AssertionError if no request is taken, or the services
    do not find each other again, within pace.recovery.
    """
    rng, count, start = random.Random(seed), Counter[str](), time.monotonic()
    while (at := time.monotonic() - start) < pace.seconds:
        time.sleep(rng.uniform(0.1, 1) * pace.pause)
        name, mended = rng.choice(list(faults)), rng.choice((is_whole, is_ready))
        happened = faults[name]()
        count[name] += happened
        print(f"{at:5.0f} s: {name}{'' if happened else ': it is gone'}", flush=True)
        wait_for(lambda mended=mended: mended(http()), pace.recovery, f"{mended.__name__} after {name}")
    wait_for(lambda: is_whole(http()), pace.recovery, "all is whole again at the end")
    return count


def conclude(part: str, traffic: Traffic, faults: Counter[str], http: str) -> Outcome:
    """Stop the traffic, print what came of it, and return what must not be."""
    traffic.stop()
    violations = [f"{part}: {violation}" for violation in traffic.violations]
    try:
        wait_until_idle(http, 60, [*TARGETS, *DRAFTS])
    except AssertionError as error:
        violations.append(f"{part}: sessions or pages are left: {error}")
    if metric(http, "num_requests_running"):
        violations.append(f"{part}: a request is still running")
    print(f"{part}: {faults.total()} faults: {dict(faults)}")
    for outcome, times in sorted(traffic.outcomes.items()):
        print(f"  {outcome}: {times}")
    return Outcome(violations, faults)


def grown(part: str, before: Held, pid: int) -> list[str]:
    """Print what a process that outlived all holds, and return what it holds too much."""
    after = Held.by(pid)
    print(f"  {part}: process {pid} held {before} and holds {after}", flush=True)
    excess = after.excess(before)
    return [f"{part}: process {pid} holds more than at the beginning: {excess}"] if excess else []
