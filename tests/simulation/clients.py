"""Clients of a run: what each asks for, how it behaves, and whether it got the tokens of the script."""

import asyncio
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc

from protos import control_pb2, inference_pb2, inference_pb2_grpc
from tests.simulation.model import STOP, VOCAB, script
from tests.simulation.scenario import Scenario
from tests.simulation.services import CONTEXT, address_of

_EXACTNESS = [*[control_pb2.EXACTNESS_EXACT] * 3, control_pb2.EXACTNESS_APPROXIMATE]
_LENGTHS = (1, 4, 8, 12, 24)
_REASONS = {control_pb2.FINISH_REASON_STOP: "stop", control_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True)
class Request:
    """What a client asks for, which gateway it asks, and when."""

    name: str
    gateway: int
    at: float
    prompt: list[int]
    max_tokens: int
    temperature: float
    exactness: int
    choices: int
    stop: list[int]
    leaves_after: int = -1
    """Tokens after which the client cancels its call; -1: never."""
    aborts_after: int = -1
    """Tokens after which the client asks for an abort; -1: never."""
    pause: float = 0.0
    """Seconds that the client takes to read a message."""
    timeout: float | None = None
    """The deadline in seconds; None: none."""
    again: int | None = None
    """The gateway that the client asks again if the first one is unavailable; None: it gives up."""

    def to_pb(self) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(
            request_id=self.name,
            token_ids=inference_pb2.TokenIds(ids=self.prompt),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=7,
            n=self.choices,
            exactness=self.exactness,
            stop_token_ids=self.stop,
        )


def make_requests(scenario: Scenario) -> list[Request]:
    """Return the requests of a run. Many prompts begin alike, and some names are used twice."""
    random = Random(scenario.seed + 1)
    common = [random.randrange(1, VOCAB) for _ in range(80)]
    requests = list[Request]()
    for index in range(scenario.sessions):
        shared = random.choice((0, 0, 16, 33, 80))
        prompt = [*common[:shared], *(random.randrange(1, VOCAB) for _ in range(random.choice((1, 3, 20))))]
        exactness = random.choice(_EXACTNESS)
        number = index if random.random() < 0.5 else random.randrange(scenario.names)
        requests.append(
            Request(
                name=f"r{number}",
                gateway=random.randrange(len(scenario.gateways)),
                at=random.random() * scenario.seconds,
                prompt=prompt,
                max_tokens=random.choice(_LENGTHS) if random.random() < 0.95 else CONTEXT - len(prompt),
                temperature=random.choice((0.0, 0.0, 0.0, 1.0)),
                exactness=exactness,
                choices=2 if random.random() < 0.05 else 1,
                stop=[random.randrange(VOCAB)] if random.random() < 0.2 else [],
                leaves_after=random.randrange(12) if random.random() < 0.1 else -1,
                aborts_after=random.randrange(12) if random.random() < 0.1 else -1,
                pause=random.choice((0.05, 1.0)) if random.random() < 0.05 else 0.0,
                timeout=random.choice((0.01, 0.1, 1.0)) if random.random() < 0.05 else None,
                again=random.randrange(len(scenario.gateways)) if random.random() < 0.5 else None,
            )
        )
    return requests


class Client:
    """One client.

    outcome: how its request ended, empty until then; details: of an error. violations: descriptions of what was wrong.
    paused: seconds that it spent reading. gateway: the one that it asked last; attempts: how often it asked. got: the
    tokens of the last attempt, by choice. aborted: names of all requests whose abort any client has asked for.
    """

    def __init__(self, request: Request, aborted: set[str]) -> None:
        self.request, self._aborted = request, aborted
        self.outcome = self.details = ""
        self.started = self.ended = self.paused = 0.0
        self.violations: list[str] = []
        self._stop = [*request.stop, STOP]
        self._expected = script(request.prompt, request.max_tokens, self._stop)
        self.gateway, self.attempts = request.gateway, 0
        self.got: dict[int, list[int]] = {}
        self._reasons: dict[int, int] = {}
        self._asked = False

    async def run(self) -> None:
        """Ask and read to the end. If the gateway is unavailable, perhaps ask again, there or at another one."""
        loop, request = asyncio.get_running_loop(), self.request
        await asyncio.sleep(request.at)
        self.started = loop.time()
        await self._ask(request.gateway)
        if self.outcome == "UNAVAILABLE" and request.again is not None:
            await self._ask(request.again)
        self.ended = loop.time()

    async def _ask(self, gateway: int) -> None:
        self.gateway, self.attempts = gateway, self.attempts + 1
        self.got = {choice: [] for choice in range(self.request.choices)}
        self._reasons.clear()
        async with grpc.aio.insecure_channel(address_of(f"gateway-{gateway}")) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            try:
                self.outcome = await self._read(stub)
            except grpc.aio.AioRpcError as error:
                self.outcome, self.details = error.code().name, error.details() or ""
            except asyncio.CancelledError:
                self.outcome = "left"

    async def _read(self, stub: Any) -> str:
        request = self.request
        call = stub.Generate(request.to_pb(), timeout=request.timeout)
        async for response in call:
            self._take(response)
            count = sum(map(len, self.got.values()))
            if 0 <= request.leaves_after <= count:
                call.cancel()
                return "left"
            if 0 <= request.aborts_after <= count and not self._asked:
                await self._abort(stub)
            if request.pause:
                self.paused += request.pause
                await asyncio.sleep(request.pause)
        return self._finish()

    async def _abort(self, stub: Any) -> None:
        self._asked = True
        self._aborted.add(self.request.name)
        try:
            await stub.Abort(inference_pb2.AbortRequest(request_id=self.request.name))
        except grpc.aio.AioRpcError as error:
            known = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
            self._check(error.code() in known, f"Abort: {error.code().name} {error.details()}")

    def _take(self, response: inference_pb2.GenerateResponse) -> None:
        """Check that a message continues the script."""
        got, new = self.got[response.choice], list(response.token_ids)
        rest = self._expected[len(got) :]
        self._check(new == rest[: len(new)], f"choice {response.choice}: got {new} behind {got}, expected {rest}")
        self._check(response.choice not in self._reasons, f"choice {response.choice} goes on behind its end")
        got += new
        if response.finish_reason:
            self._reasons[response.choice] = response.finish_reason
            usage = response.usage.completion_tokens
            self._check(usage == len(got), f"usage says {usage} tokens, {len(got)} came")

    def _finish(self) -> str:
        """Check a request that ended without an error, and return how it ended."""
        reasons = [self._reasons.get(choice, 0) for choice in self.got]
        self._check(all(reasons), f"ended without a finish reason: {self._reasons}")
        expected = "stop" if self._expected[-1] in self._stop else "length"
        for choice, tokens in self.got.items():
            reason = self._reasons.get(choice, 0)
            if reason == control_pb2.FINISH_REASON_ABORT:
                self._check(self.request.name in self._aborted, "aborted by nobody")
            elif reason:
                self._check(tokens == self._expected, f"{len(tokens)} tokens of {len(self._expected)} came")
                self._check(_REASONS[reason] == expected, f"finish reason {reason}, expected {expected}")
        return "abort" if control_pb2.FINISH_REASON_ABORT in reasons else expected

    def _check(self, holds: bool, problem: str) -> None:
        if not holds:
            self.violations.append(f"client {self.request.name}: {problem}")
