"""Ten times the requests that the services can take: some are answered as fast as without overload, the others refused.

The reference is as many clients as there are places, each with one request after the other: all places are taken, and
no request is refused. The models are scripted and sleep about as long as a GPU takes (lab/benchmarks/scripted.py),
since the clients would slow down models that compute on the same processor. Answers are checked after all have come.
"""

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import Iterator

import uvloop

from orchestrator.api.logprobs import Decode
from specahead.config.garbage import keep_loaded
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.lab.benchmarks.scripted import right_tokens
from specahead.models import TARGET
from tests.chaos.clients import Answer, Clients
from tests.chaos.setting import Held
from tests.stack import Services, Stack, start_gateway, start_service

SESSIONS = 8
PROMPTS, TOKENS = (100, 160), (24, 56)  # the least and the most tokens of a prompt and of an answer
TIMES, REFUSAL_SECONDS, SLOWER = 10, 0.1, 1.2
SHARES = 0.5, 0.9, 0.99
TARGET_FLAGS = "--max-sessions", str(SESSIONS), "--max-queued", "0", "--step-ms", "8", "0.25", "--prompt-ms", "100"
DRAFT_FLAGS = "--step-ms", "3", "0", "--prompt-ms", "10"
FIELDS = {"stream": True, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}


def run(seconds: float) -> list[str]:
    """Run without overload for half of the time, then with it, and return the violations.

    First tokens and refusals that come later than the goal are printed, and are no violations.
    """
    with _stack() as stack:
        return uvloop.run(_measure(stack, seconds / 2))


@contextlib.contextmanager
def _stack() -> Iterator[Stack]:
    target, at = start_service("-m", "specahead.lab.benchmarks.scripted", "target", *TARGET_FLAGS)
    services = Services(at, "", [target])
    try:
        draft, services.draft = start_service(
            "-m", "specahead.lab.benchmarks.scripted", "draft", "--target", at, *DRAFT_FLAGS
        )
        services.processes.append(draft)
        stack = start_gateway(services)
        try:
            yield stack
        finally:
            stack.stop()
    finally:
        services.stop()


async def _measure(stack: Stack, seconds: float) -> list[str]:
    keep_loaded()
    clients = Clients(stack.http, _request)
    for _ in range(3):
        await asyncio.gather(*(clients.ask() for _ in range(SESSIONS)))
    unloaded = await _fill(clients, seconds)
    rate = TIMES * max(1, len(_firsts(unloaded, 200))) / seconds
    before = Held.by(stack.process.pid)
    overloaded = await _offer(clients, rate, seconds)
    await clients.leave()
    after = Held.by(stack.process.pid)
    print(f"overload: {rate / TIMES:.1f} requests a second fill it; {rate:.0f} a second came for {seconds:.0f} s")
    _tell(_firsts(unloaded, 200), _firsts(overloaded, 200), _firsts(overloaded, 429), seconds)
    print(f"  the gateway held {before} and holds {after}", flush=True)
    decode = load_tokenizer(str(TARGET)).decode
    faults = (_fault(answer, decode) for answer in (*unloaded, *overloaded))
    violations = [f"overload: {fault}" for fault in faults if fault]
    if not {200, 429} <= {answer.status for answer in overloaded}:
        violations.append("overload: none was taken, or none refused")
    if excess := after.excess(before):
        violations.append(f"overload: the gateway holds more than before: {excess}")
    return violations


async def _fill(clients: Clients, seconds: float) -> list[Answer]:
    """Return the answers of as many clients as there are places, each of which asks again as soon as it is answered."""
    answers: list[Answer] = []
    end = time.monotonic() + seconds

    async def work() -> None:
        while time.monotonic() < end:
            answers.append(await clients.ask())
            if answers[-1].status == 429:  # the gateway does not know yet that the place is free
                await asyncio.sleep(0.05)

    await asyncio.gather(*(work() for _ in range(SESSIONS)))
    return answers


async def _offer(clients: Clients, rate: float, seconds: float) -> list[Answer]:
    """Send requests at random times, `rate` a second, whatever becomes of earlier ones, and return the answers."""
    asking, rng, due = [], random.Random(0), time.monotonic()
    for _ in range(round(rate * seconds)):
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        asking.append(asyncio.create_task(clients.ask()))
    return await asyncio.gather(*asking)


def _firsts(answers: list[Answer], status: int) -> list[float]:
    """Return the seconds to first tokens or refusals, sorted, without the first requests, which began at the same
    time."""
    return sorted([answer.first for answer in answers if answer.status == status][SESSIONS:])


def _tell(unloaded: list[float], taken: list[float], refused: list[float], seconds: float) -> None:
    """Print how soon first tokens and refusals came (both sorted), and whether they met the goals."""
    print(f"  {len(unloaded)} first tokens of as many as there are places: {_shown(unloaded)}")
    ratios = [_quantile(taken, share) / _quantile(unloaded, share) for share in SHARES]
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"  {len(taken)} overloaded: {_shown(taken)}; {shown} x{_missed(ratios[-1], SLOWER)}")
    refusal = _quantile(refused, SHARES[-1])
    print(f"  {len(refused) / seconds:.0f} refused a second: {_shown(refused)}{_missed(refusal, REFUSAL_SECONDS)}")


def _shown(seconds: list[float]) -> str:
    return ", ".join(f"p{100 * share:.0f} {1000 * _quantile(seconds, share):.1f}" for share in SHARES) + " ms"


def _quantile(values: list[float], share: float) -> float:
    return values[int(share * (len(values) - 1))] if values else float("nan")


def _missed(value: float, most: float) -> str:
    return "" if value <= most else f": MISSED, {most:g} is the goal"


# Requests and their expected answers.


def _request(number: int) -> bytes:
    """Return a request whose prompt begins like no other, so that no KV of it is cached."""
    prompt, tokens = _sizes(number)
    ids = [1000 + number // 1000, 1000 + number % 1000] + [1] * (prompt - 2)
    body = json.dumps({"prompt": ids, "max_tokens": tokens, **FIELDS})
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


def _sizes(number: int) -> tuple[int, int]:
    """Return the tokens of a request's prompt and answer. They differ, so that sessions do not run in step."""
    rng = random.Random(number)
    return rng.randint(*PROMPTS), rng.randint(*TOKENS)


def _fault(answer: Answer, decode: Decode) -> str:
    """Return what is wrong with an answer, or an empty text."""
    if answer.status == 429:
        return ""
    if answer.status != 200:
        return f"HTTP {answer.status} after {answer.first:.1f} s"
    pieces = re.findall(rb"^data: (\{.*\})$", answer.content, re.MULTILINE)
    text = "".join(choice["text"] for piece in pieces for choice in json.loads(piece)["choices"])
    expected = decode(right_tokens(*_sizes(answer.number)))
    return "" if text == expected else f"{text!r} was answered, not {expected!r}"
