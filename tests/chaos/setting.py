"""What a chaos run needs: prompts with expected tokens, what a process holds, and the loop of faults."""

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.cluster.directory import name_services
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.models import TARGET
from tests.books import read_books
from tests.chaos.traffic import Case, Traffic
from tests.client import generate, metric, service_state, status_of, wait_for, wait_until_idle
from tests.stack import Stack

NEW_TOKENS, LENGTHS = 150, (20, 200, 700, 1500)
EACH = 2  # number of targets, and of drafts
TARGETS, DRAFTS = name_services("target", EACH), name_services("draft", EACH)


@dataclass(frozen=True)
class Pace:
    """The times of a run, in seconds."""

    seconds: float
    """How long faults come."""
    pause: float
    """The longest time between two faults."""
    recovery: float
    """The time within which everything must work again."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: its violations, and how many faults of each kind happened."""

    violations: list[str]
    faults: Counter[str] = field(default_factory=Counter)


def make_cases(stack: Stack) -> list[Case]:
    """Return a prompt from each book, with the tokens that the undisturbed stack gives."""
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
    return status_of(f"{http}/ready") == 200


def pid_of(http: str, service: str) -> int:
    """Return the process id of a service, 0 if it does not answer."""
    try:
        return int(service_state(http, service, "pid"))
    except OSError:
        return 0


@dataclass(frozen=True)
class Held:
    """The memory, files and threads of a process."""

    megabytes: float
    files: int
    threads: int

    @staticmethod
    def by(pid: int) -> "Held":
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return Held(int(status["VmRSS"].split()[0]) / 1024, files, int(status["Threads"]))

    def excess(self, before: "Held") -> str:
        """Return what grew beyond the usual variation, or an empty text."""
        limits = {"megabytes": before.megabytes * 1.2 + 64, "files": before.files + 20, "threads": before.threads + 20}
        return ", ".join(
            f"{n} {getattr(before, n):.0f} -> {getattr(self, n):.0f}" for n in limits if getattr(self, n) > limits[n]
        )


def break_things(
    faults: Mapping[str, Callable[[], bool]], traffic: Traffic, stack: Stack, pace: Pace, seed: int
) -> Outcome:
    """Let faults come under traffic until the time is over, then stop the traffic and return the outcome.

    faults: by name; each returns whether it could happen.
    """
    try:
        count = _let_faults_come(faults, stack.http, pace, seed)
    except AssertionError as error:
        return Outcome([f"{error}\n{stack.output.read_text()[-3000:]}", *traffic.violations])
    return _conclude(traffic, count, stack.http)


def _let_faults_come(faults: Mapping[str, Callable[[], bool]], http: str, pace: Pace, seed: int) -> Counter[str]:
    """Let faults come at random, some before the last is mended, and return how many of each happened.

    Raises AssertionError if no request is taken, or the services do not find each other again, within pace.recovery.
    """
    rng, count, start = random.Random(seed), Counter[str](), time.monotonic()
    while (at := time.monotonic() - start) < pace.seconds:
        time.sleep(rng.uniform(0.1, 1) * pace.pause)
        name, mended = rng.choice(list(faults)), rng.choice((is_whole, is_ready))
        happened = faults[name]()
        count[name] += happened
        print(f"{at:5.0f} s: {name}{'' if happened else ': its process is gone'}", flush=True)
        wait_for(lambda mended=mended: mended(http), pace.recovery, f"{mended.__name__} after {name}")
    wait_for(lambda: is_whole(http), pace.recovery, "everything works again at the end")
    return count


def _conclude(traffic: Traffic, faults: Counter[str], http: str) -> Outcome:
    """Stop the traffic, print its outcomes, and return the violations."""
    traffic.stop()
    violations = list(traffic.violations)
    try:
        wait_until_idle(http, 60, [*TARGETS, *DRAFTS])
    except AssertionError as error:
        violations.append(f"sessions or pages are left: {error}")
    if metric(http, "num_requests_running"):
        violations.append("a request is still running")
    print(f"{faults.total()} faults: {dict(faults)}")
    for outcome, times in sorted(traffic.outcomes.items()):
        print(f"  {outcome}: {times}")
    return Outcome(violations, faults)


def grown(before: Held, pid: int) -> list[str]:
    """Print what a process that outlived all faults holds, and return violations for what it holds too much."""
    after = Held.by(pid)
    print(f"  process {pid} held {before} and holds {after}", flush=True)
    excess = after.excess(before)
    return [f"process {pid} holds more than at the beginning: {excess}"] if excess else []
