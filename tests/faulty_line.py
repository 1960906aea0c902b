"""A line between draft and target on which frames are repeated, held back, reordered and said again late."""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from protos import speculation_pb2, speculation_pb2_grpc


class FaultyLine(speculation_pb2_grpc.SpeculationServicer):
    """Stands between draft and target. Events are repeated, held back behind later ones, and said again late.

    Order is disturbed within a window of a few events in each direction; nothing is lost, as over gRPC.

    faulty: while it is not set, all is passed on as it is.
    """

    def __init__(self, target: str, seed: int) -> None:
        self.faulty = False
        self.faults = 0
        self._target = target
        self._random = random.Random(seed)

    async def Speculate(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async with grpc.aio.insecure_channel(self._target) as channel:
            shown = [(key, value) for key, value in context.invocation_metadata() if key == "authorization"]
            call = speculation_pb2_grpc.SpeculationStub(channel).Speculate(metadata=shown)

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
                    async with asyncio.timeout(0.02 if held else 0.2):
                        frame = await queue.get()
                except TimeoutError:  # a quiet line: what was held back goes out now
                    if held:
                        yield self._batch(kind, held)
                        held = []
                    elif reader.done():
                        return
                    continue
                if frame.WhichOneof("body") != "batch" or not (self.faulty or held):
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


@contextlib.contextmanager
def faulty_line(target: str, seed: int) -> Iterator[tuple[FaultyLine, str]]:
    """Run a line to a target in a thread of its own while the context lasts; yield it and the address to dial."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    line = FaultyLine(target, seed)

    async def start() -> tuple[grpc.aio.Server, str]:
        server = grpc.aio.server()
        speculation_pb2_grpc.add_SpeculationServicer_to_server(line, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, f"127.0.0.1:{port}"

    server, address = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield line, address
    asyncio.run_coroutine_threadsafe(server.stop(0), loop).result()
    loop.call_soon_threadsafe(loop.stop)
