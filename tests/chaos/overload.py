"""Ten times the requests that a launch can take: some are answered as soon as ever, the others refused at once.

What is taken is compared with requests of as many clients as there are places, one after the other: as many sessions
run beside each other then, and none is refused. How soon a request is answered that is alone is printed, too.

Clients share the machine with what they ask, so they are cheap: one event loop, HTTP written by hand, and connections
that are used again, as the pools of clients' libraries do it.
"""

import asyncio
import json
import re
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import uvloop

from tests.chaos.setting import Held
from tests.stack import Stack, start_stack

SESSIONS, QUEUED, TOKENS = 4, 0, 32
PROMPT = "The old man looked at the sea, and the sea looked at him."
REFUSAL_SECONDS, SLOWER, TIMES = 0.1, 1.2, 10
FULL_SECONDS, PATIENCE = 10, 60
BODY = json.dumps({"prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "temperature": 0, "ignore_eos": True})
REQUEST = (
    "POST /v1/completions HTTP/1.1\r\nHost: any\r\nContent-Type: application/json\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n{BODY}"
).encode()


@dataclass(frozen=True)
class Answer:
    """first: seconds to the first token's text, or to the refusal. status: 0 if there is no whole answer."""

    status: int
    first: float


def run(seconds: float) -> list[str]:
    """Return what must not be. First tokens and refusals that come later than the goal are printed alone."""
    stack = start_stack("--max-sessions", str(SESSIONS), "--max-queued", str(QUEUED), "--target-kv-tokens", "20000")
    try:
        return uvloop.run(_measure(stack, seconds))
    finally:
        stack.stop()


async def _measure(stack: Stack, seconds: float) -> list[str]:
    clients = Clients(stack.http)
    for _ in range(3):
        await clients.ask()
    alone = [(await clients.ask()).first for _ in range(20)]
    full = [answer.first for answer in await _fill(clients) if answer.status == 200]
    rate = max(1.0, len(full) / FULL_SECONDS)
    before = Held.by(stack.process.pid)
    answers = await _offer(clients, TIMES * rate, seconds)
    await clients.leave()
    after = Held.by(stack.process.pid)
    taken = [answer.first for answer in answers if answer.status == 200]
    refused = [answer.first for answer in answers if answer.status == 429]
    print(
        f"overload: {rate:.1f} requests a second fill it; {TIMES * rate:.0f} a second were offered for {seconds:.0f} s"
    )
    print(f"  first token of a request alone: {_shown(alone)}; of as many as there are places: {_shown(full)}")
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
    missed = "" if _p99(seconds) <= limit else ": MISSED"
    print(f"  {what}: {_shown(seconds)}, {goal}: {1000 * limit:.0f} ms{missed}")


def _shown(seconds: list[float]) -> str:
    return f"p50 {1000 * _quantile(seconds, 0.5):.0f}, p99 {1000 * _p99(seconds):.0f} ms"


def _p99(values: list[float]) -> float:
    return _quantile(values, 0.99)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else float("nan")


class Clients:
    """Asks for the same again and again, over a connection that is idle or a new one."""

    def __init__(self, http: str) -> None:
        self._at = urlsplit(http)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self) -> Answer:
        start = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                line = self._idle.pop() if self._idle else await asyncio.open_connection(*self._at.netloc.split(":"))
                reader, writer = line
                writer.write(REQUEST)
                head = await reader.readuntil(b"\r\n\r\n")
                status = int(head.split()[1])
                if status == 200:
                    await reader.readuntil(b"data: {")  # before it there may be comments
                    first = time.monotonic() - start
                    await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
                else:
                    length = re.search(rb"content-length: (\d+)", head.lower())
                    await reader.readexactly(int(length[1]) if length else 0)
                    first = time.monotonic() - start
        except (OSError, EOFError):
            return Answer(0, time.monotonic() - start)
        self._idle.append(line)
        return Answer(status, first)

    async def leave(self) -> None:
        """Close the connections, which the gateway has noticed soon after."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()
        await asyncio.sleep(0.5)


async def _fill(clients: Clients) -> list[Answer]:
    """Return what as many clients as there are places get, each asking again as soon as it is answered."""
    answers: list[Answer] = []
    end = time.monotonic() + FULL_SECONDS

    async def work() -> None:
        while time.monotonic() < end:
            answers.append(await clients.ask())
            if answers[-1].status == 429:  # its place is not known to be free yet
                await asyncio.sleep(0.05)

    await asyncio.gather(*(work() for _ in range(SESSIONS)))
    return answers


async def _offer(clients: Clients, rate: float, seconds: float) -> list[Answer]:
    """Send so many requests a second, whatever becomes of those before."""
    asking, start = [], time.monotonic()
    for number in range(round(rate * seconds)):
        await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
        asking.append(asyncio.create_task(clients.ask()))
    return await asyncio.gather(*asking)
