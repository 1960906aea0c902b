"""The router over gRPC, against a target that misbehaves: readiness follows the stream, and requests go on or end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from engine.sampling import Sampling
from orchestrator.ledger import Record
from orchestrator.router import Router
from protos import control_pb2, control_pb2_grpc
from wire import convert
from wire.access import PeerAccess
from wire.errors import NotFound, ServiceError
from wire.messages import At, Beat, Commit, Exactness, FinishReason, Open, SessionReads
from wire.server import start_server

READS = SessionReads(At("a", 0, 3, 40), 2, 2, 16, 3, 1, [2, 1, 0, 2, 2, 2], [])
Serve = Callable[[AsyncIterator[Any], grpc.aio.ServicerContext], Awaitable[None]]


class Target(control_pb2_grpc.TargetControlServicer):
    """Serves the first streams as `scripts` say, the others honestly: each session gets its one token at once."""

    def __init__(self, *scripts: Serve) -> None:
        self.scripts = list(scripts)
        self.streams = 0

    async def Serve(self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        self.streams += 1
        if self.scripts:
            await self.scripts.pop(0)(request_iterator, context)
            return
        await say(context, Beat())
        async for frame in request_iterator:
            request = convert.serve_request_from_pb(frame)
            if isinstance(request, Open):
                await say(context, last_commit(request))

    async def Reads(
        self, request: control_pb2.ReadsRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.SessionReads:
        if request.session != "a":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such session is running")
        return convert.reads_to_pb(READS)


async def say(context: grpc.aio.ServicerContext, event: Commit | Beat) -> None:
    await context.write(convert.served_events_to_pb([event]))


def last_commit(request: Open) -> Commit:
    at = convert.m.At(request.session, 0, 0, len(request.tokens))
    return Commit(at, [7], finish_reason=FinishReason.LENGTH)


def record(session: str) -> Record:
    return Record(session, [1, 2, 3], 3, 1, [], Sampling(0.0), Exactness.EXACT)


async def with_router(target: Target, check: Callable[[Router], Awaitable[None]], request_timeout: float = 0) -> None:
    add = control_pb2_grpc.add_TargetControlServicer_to_server
    server = await start_server("127.0.0.1", 0, [(add, target, "specahead.v1.TargetControl")])
    router = Router(server.address, PeerAccess(), 30, request_timeout)
    try:
        async with asyncio.timeout(20), router.connected_to_target():
            await until(lambda: router.connected)
            await check(router)
    finally:
        await server.stop(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def tokens_of(router: Router, name: str) -> list[int]:
    return [token async for item in router.stream(record(name)) for token in item.tokens]


async def ask_then_garble(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
    await say(context, Beat())
    async for frame in frames:
        if frame.WhichOneof("body") == "open":
            await context.write(control_pb2.ServedFrame(events=[control_pb2.ServedEvent()]))


async def test_an_event_that_is_no_event_costs_the_stream_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    target = Target(ask_then_garble)

    async def check(router: Router) -> None:
        assert await tokens_of(router, "a") == [7]
        assert router.connected

    await with_router(target, check)
    assert target.streams == 2
    assert "none of commit, closed, beat is set" in caplog.text


async def test_a_request_that_cannot_be_sent_costs_the_stream_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """What the sender stumbles over is logged; the stream does not stay open with nobody sending."""

    async def check(router: Router) -> None:
        poison = record("poison")
        poison.tokens[0] = -1
        task = asyncio.create_task(anext(router.stream(poison)))
        with pytest.raises(ServiceError, match="lost again and again"):
            await task
        assert await tokens_of(router, "b") == [7]

    await with_router(Target(), check)
    assert "ValueError" in caplog.text


@pytest.mark.parametrize("speaks_first", [True, False])
async def test_a_target_that_falls_silent_is_not_connected(speaks_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.streams.BEAT_SECONDS", 0.05)

    async def hang(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        if speaks_first:
            await say(context, Beat())
        await asyncio.sleep(60)

    target = Target(hang, hang)

    async def check(router: Router) -> None:
        if speaks_first:
            await until(lambda: not router.connected)
            await until(lambda: router.connected)
            await until(lambda: not router.connected)
        await until(lambda: router.connected)
        assert await tokens_of(router, "a") == [7]

    await with_router(target, check)
    assert target.streams >= 3


async def test_a_request_ends_at_the_deadline_of_the_server() -> None:
    aborted = asyncio.Event()

    async def keep_waiting(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        await say(context, Beat())
        async for frame in frames:
            if frame.WhichOneof("body") == "abort":
                aborted.set()

    async def check(router: Router) -> None:
        with pytest.raises(ServiceError, match=r"longer than the 0.2 s") as error:
            await tokens_of(router, "a")
        assert error.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(5):
            await aborted.wait()

    await with_router(Target(keep_waiting), check, request_timeout=0.2)


async def test_what_a_session_reads_is_asked_of_the_target() -> None:
    async def check(router: Router) -> None:
        assert await router.reads("a") == READS
        with pytest.raises(NotFound, match="no such session"):
            await router.reads("b")

    await with_router(Target(), check)
