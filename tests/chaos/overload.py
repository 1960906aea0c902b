"""Ten times the requests that a launch can take: some are answered as soon as ever, the others refused at once.

What is taken is compared with requests of as many clients as there are places, one after the other: as many sessions
run beside each other then, and none is refused. How soon a request is answered that is alone is printed, too.
"""

import json
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from tests.chaos.setting import Held
from tests.stack import Stack, start_stack

SESSIONS, QUEUED, TOKENS = 4, 0, 32
PROMPT = "The old man looked at the sea, and the sea looked at him."
REFUSAL_SECONDS, SLOWER, TIMES = 0.1, 1.2, 10
FULL_SECONDS = 10


@dataclass(frozen=True)
class Answer:
    """first: seconds to the first token's text, or to the refusal."""

    status: int
    first: float


def run(seconds: float) -> list[str]:
    """Return what must not be. First tokens and refusals that come later than the goal are printed alone."""
    stack = start_stack("--max-sessions", str(SESSIONS), "--max-queued", str(QUEUED), "--target-kv-tokens", "20000")
    try:
        for _ in range(3):
            _ask(stack)
        alone = [_ask(stack).first for _ in range(20)]
        full = [answer.first for answer in _fill(stack) if answer.status == 200]
        rate = max(1.0, len(full) / FULL_SECONDS)
        before = Held.by(stack.process.pid)
        answers = _offer(stack, TIMES * rate, seconds)
        after = Held.by(stack.process.pid)
    finally:
        stack.stop()
    taken = [answer.first for answer in answers if answer.status == 200]
    refused = [answer.first for answer in answers if answer.status == 429]
    print(
        f"overload: {rate:.1f} requests a second fill it; {TIMES * rate:.0f} a second were offered for {seconds:.0f} s"
    )
    print(f"  first token of a request alone: p99 {1000 * _p99(alone):.0f} ms")
    _compare(f"{len(taken)} taken, first token", taken, f"{SLOWER} x as many without the others", SLOWER * _p99(full))
    _compare(f"{len(refused)} refused", refused, "goal", REFUSAL_SECONDS)
    print(f"  the gateway held {before} and holds {after}", flush=True)
    violations = [f"overload: HTTP {a.status} after {a.first:.1f} s" for a in answers if a.status not in (200, 429)]
    if not refused or not taken:
        violations.append(f"overload: {len(taken)} taken and {len(refused)} refused")
    if excess := after.excess(before):
        violations.append(f"overload: the gateway holds more than before: {excess}")
    return violations


def _compare(what: str, seconds: list[float], goal: str, limit: float) -> None:
    found = _p99(seconds)
    print(f"  {what}: p99 {1000 * found:.0f} ms, {goal}: {1000 * limit:.0f} ms{'' if found <= limit else ': MISSED'}")


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else float("nan")


def _ask(stack: Stack, wait: float = 60) -> Answer:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request: Any = urllib.request.Request(f"{stack.http}/v1/completions", json.dumps(body).encode(), headers)
    start = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=wait) as response:
            for line in response:
                if line.startswith(b"data: {"):  # before it there may be comments
                    break
            first = time.monotonic() - start
            response.read()
            return Answer(200, first)
    except urllib.error.HTTPError as error:
        error.read()
        return Answer(error.code, time.monotonic() - start)
    except OSError:
        return Answer(0, time.monotonic() - start)


def _fill(stack: Stack) -> list[Answer]:
    """Return what as many clients as there are places get, each asking again as soon as it is answered."""
    answers: list[Answer] = []
    end = time.monotonic() + FULL_SECONDS

    def work() -> None:
        while time.monotonic() < end:
            answers.append(_ask(stack))
            if answers[-1].status == 429:  # its place is not known to be free yet
                time.sleep(0.05)

    threads = [threading.Thread(target=work) for _ in range(SESSIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _offer(stack: Stack, rate: float, seconds: float) -> list[Answer]:
    """Send so many requests a second, whatever becomes of those before."""
    answers: list[Answer] = []
    threads, start = [], time.monotonic()
    for number in range(round(rate * seconds)):
        time.sleep(max(0.0, start + number / rate - time.monotonic()))
        thread = threading.Thread(target=lambda: answers.append(_ask(stack)), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(120)
    return answers
