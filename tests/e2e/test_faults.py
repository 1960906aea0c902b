"""Frames repeated, delayed, reordered and said again late, between real services: only counters change."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from protos import speculation_pb2, speculation_pb2_grpc
from tests.client import APPROXIMATE, EXACT, generate, metric, wait_until_idle
from tests.stack import Stack, start_gateway, start_services


class FaultyLine(speculation_pb2_grpc.SpeculationServicer):
    """Stands between draft and target. Events are repeated, held back behind later ones, and said again late.

    Order is disturbed within a window of a few events in each direction; nothing is lost, as over gRPC.
    """

    def __init__(self, target: str, seed: int) -> None:
        self._target = target
        self._random = random.Random(seed)
        self.faults = 0

    async def Speculate(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async with grpc.aio.insecure_channel(self._target) as channel:
            call = speculation_pb2_grpc.SpeculationStub(channel).Speculate()

            async def forward() -> None:
                async for frame in self._mangle(request_iterator, speculation_pb2.DraftFrame):
                    await call.write(frame)

            sender = asyncio.create_task(forward())
            try:
                async for frame in self._mangle(_read(call), speculation_pb2.TargetFrame):
                    yield frame
            finally:
                sender.cancel()

    async def _mangle(self, frames: AsyncIterator[Any], kind: Any) -> AsyncIterator[Any]:
        held: list[Any] = []
        past: list[Any] = []
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def pump() -> None:
            async for frame in frames:
                queue.put_nowait(frame)

        reader = asyncio.create_task(pump())
        try:
            while True:
                try:
                    frame = await asyncio.wait_for(queue.get(), 0.02 if held else 0.2)
                except TimeoutError:  # a quiet line: what was held back goes out now
                    if held:
                        yield self._batch(kind, held)
                        held = []
                    elif reader.done():
                        return
                    continue
                if frame.WhichOneof("body") != "batch":
                    yield frame
                    continue
                out: list[Any] = []
                for event in frame.batch.events:
                    past = [*past[-40:], event]
                    fate = self._random.random()
                    if fate < 0.15:
                        held.append(event)
                    else:
                        out += [event] * (2 if fate < 0.3 else 1)
                    if fate > 0.9:
                        out.append(self._random.choice(past))
                    self.faults += fate < 0.3 or fate > 0.9
                if held and self._random.random() < 0.5:
                    out += held
                    held = []
                self._random.shuffle(out)
                if out:
                    yield self._batch(kind, out)
        finally:
            reader.cancel()

    def _batch(self, kind: Any, events: list[Any]) -> Any:
        batch = {"DraftFrame": speculation_pb2.DraftEvents, "TargetFrame": speculation_pb2.TargetEvents}[kind.__name__]
        return kind(batch=batch(events=events))


async def _read(call: Any) -> AsyncIterator[Any]:
    while (frame := await call.read()) is not grpc.aio.EOF:
        yield frame


class LineThread:
    """Runs a FaultyLine's server in a thread of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.line: FaultyLine | None = None

    def dial(self, target: str) -> str:
        async def start() -> str:
            self.line = FaultyLine(target, self._seed)
            self._server = grpc.aio.server()
            speculation_pb2_grpc.add_SpeculationServicer_to_server(self.line, self._server)
            port = self._server.add_insecure_port("127.0.0.1:0")
            await self._server.start()
            return f"127.0.0.1:{port}"

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(0), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def faulty() -> Iterator[tuple[Stack, LineThread]]:
    line = LineThread(seed=5)
    services = start_services(dial=line.dial)
    gateway = start_gateway(services)
    yield gateway, line
    gateway.stop()
    services.stop()
    line.stop()


def test_a_faulty_line_changes_nothing_but_counters(
    faulty: tuple[Stack, LineThread], stack: Stack, books: list[str], tokenizer: Any
) -> None:
    gateway, line = faulty
    cases = []
    for i in range(12):
        prompt = tokenizer.encode(books[i % len(books)][3000:13_000])[: 20 + 97 * i]
        exactness = EXACT if i % 3 else APPROXIMATE
        cases.append((prompt, {"max_tokens": 60, "ignore_eos": True, "exactness": exactness}))
    clean = [generate(stack.stub(), prompt, **fields) for prompt, fields in cases]
    stub = gateway.stub()
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda case: generate(stub, case[0], **case[1]), cases))
    for (_, fields), result, reference in zip(cases, results, clean, strict=True):
        assert len(result.tokens) == 60
        # A round that the line delayed for too long is decoded plainly, so densely: approximate may then differ.
        if fields["exactness"] == EXACT:
            assert result.tokens == reference.tokens
    assert line.line is not None
    assert line.line.faults > 100
    assert sum(result.speculation.accepted for result in results) > 0
    wait_until_idle(gateway.http)

    def events(name: str) -> float:
        return metric(gateway.http, "service_events_total", service="target", name=name)

    assert events("repeated_frames") > 0
    assert events("stale_frames") > 0
    assert metric(gateway.http, "service_events_total", service="draft", name="repeated_verdicts") > 0
