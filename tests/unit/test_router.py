"""The router over gRPC, against a target that misbehaves: readiness follows the stream, and requests go on or end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from orchestrator.cluster.directory import Directory
from orchestrator.sessions.ledger import Record
from orchestrator.sessions.router import Router
from protos import control_pb2, control_pb2_grpc
from specahead.engine.sampling.distributions import Sampling
from specahead.wire import convert
from specahead.wire.access import PeerAccess
from specahead.wire.errors import InvalidArgument, ResourceExhausted, ServiceError, Unavailable
from specahead.wire.messages import Abort, At, Beat, Closed, Commit, Exactness, FinishReason, Open, Report
from specahead.wire.server import start_server
from tests.unit.until import until

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
        async for request in opened(request_iterator, context):
            await say(context, last_commit(request))


async def say(context: grpc.aio.ServicerContext, event: Commit | Closed | Report | Beat) -> None:
    await context.write(convert.served_events_to_pb([event]))


async def opened(
    frames: AsyncIterator[Any], context: grpc.aio.ServicerContext, first: Report | None = None
) -> AsyncIterator[Open]:
    """Say the first word of a stream, and yield what it opens."""
    await say(context, first or Beat())
    async for frame in frames:
        request = convert.serve_request_from_pb(frame)
        if isinstance(request, Open):
            yield request


def last_commit(request: Open) -> Commit:
    at = At(request.session, 0, 0, len(request.tokens))
    return Commit(at, [7], finish_reason=FinishReason.LENGTH)


def record(session: str) -> Record:
    return Record(Open(session, [1, 2, 3], 3, 1, [], Sampling(0.0), Exactness.EXACT))


@contextlib.asynccontextmanager
async def serving(*targets: Target) -> AsyncIterator[Directory]:
    """Serve while the context lasts; the targets' names are their numbers."""
    add = control_pb2_grpc.add_TargetControlServicer_to_server
    services = [(add, target, "specahead.v1.TargetControl") for target in targets]
    servers = [await start_server("127.0.0.1", 0, [service]) for service in services]
    try:
        yield Directory({f"{number}": server.address for number, server in enumerate(servers)})
    finally:
        for server in servers:
            await server.stop(0)


@contextlib.asynccontextmanager
async def routing_to(*targets: Target, **settings: Any) -> AsyncIterator[Router]:
    """A router that is connected to all targets."""
    async with serving(*targets) as directory:
        router = Router(directory, PeerAccess(), **{"resume_timeout": 30} | settings)
        async with asyncio.timeout(20), router.connected_to_targets():
            await until(lambda: [stream.connected for stream in router.targets.values()] == [True] * len(targets))
            yield router


async def tokens_of(router: Router, name: str) -> list[int]:
    return [token async for item in router.stream(record(name)) for token in item.tokens]


async def ask_then_garble(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
    await say(context, Beat())
    async for frame in frames:
        if frame.WhichOneof("body") == "open":
            await context.write(control_pb2.ServedFrame(events=[control_pb2.ServedEvent()]))


async def test_an_event_that_is_no_event_costs_the_stream_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    target = Target(ask_then_garble)

    async with routing_to(target) as router:
        assert await tokens_of(router, "a") == [7]
        assert router.connected
    assert target.streams == 2
    assert "none of commit, closed, report, beat is set" in caplog.text


@pytest.mark.parametrize("speaks_first", [True, False])
async def test_a_target_that_falls_silent_is_not_connected(speaks_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specahead.wire.streams.BEAT_SECONDS", 0.05)

    async def hang(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        if speaks_first:
            await say(context, Beat())
        await asyncio.sleep(60)

    target = Target(hang, hang)

    async with routing_to(target) as router:
        if speaks_first:
            await until(lambda: not router.connected)
            await until(lambda: router.connected)
            await until(lambda: not router.connected)
        await until(lambda: router.connected)
        assert await tokens_of(router, "a") == [7]
    assert target.streams >= 3


async def test_a_request_ends_at_the_deadline_of_the_server() -> None:
    aborted = asyncio.Event()

    async def keep_waiting(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        await say(context, Beat())
        async for frame in frames:
            if frame.WhichOneof("body") == "abort":
                aborted.set()

    async with routing_to(Target(keep_waiting), request_timeout=0.2) as router:
        with pytest.raises(ServiceError, match=r"longer than the 0.2 s") as error:
            await tokens_of(router, "a")
        assert error.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(5):
            await aborted.wait()


def serve_with(answer: Callable[[Open], list[Commit | Closed]]) -> Serve:
    """Return a stream that answers the first Open by these events, and ends."""

    async def serve(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        async for request in opened(frames, context):
            for event in answer(request):
                await say(context, event)
            return

    return serve


def beating(serve: Serve) -> Serve:
    """Return the same stream of a target that says again and again that it lives."""

    async def beat(context: grpc.aio.ServicerContext) -> None:
        while True:
            await asyncio.sleep(0.05)
            await say(context, Beat())

    async def both(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        beats = asyncio.create_task(beat(context))
        try:
            await serve(frames, context)
        finally:
            beats.cancel()

    return both


def one_token(request: Open) -> list[Commit | Closed]:
    return [Commit(At(request.session, 0, 0, len(request.tokens)), [len(request.tokens)])]


async def test_a_session_is_resumed_where_it_stands_and_as_often_as_it_gets_on() -> None:
    """Four targets in a row die after a token each; only losses without a token in between count."""

    async with routing_to(Target(*[serve_with(one_token)] * 4)) as router:
        assert await tokens_of(router, "a") == [3, 4, 5, 6, 7]


async def test_a_session_that_gets_nothing_is_given_up_at_the_third_loss() -> None:
    target = Target(*[serve_with(lambda _: [])] * 20)
    async with routing_to(target) as router:
        with pytest.raises(Unavailable, match="lost again and again"):
            await tokens_of(router, "a")
    assert target.streams <= 5


async def test_after_resume_timeout_requests_fail_and_no_sooner() -> None:
    loop = asyncio.get_running_loop()

    async with routing_to(Target(serve_with(lambda _: []), *[leave] * 200), resume_timeout=0.5) as router:
        start = loop.time()
        with pytest.raises(Unavailable, match="was lost and did not come back"):
            await tokens_of(router, "a")
        assert 0.5 <= loop.time() - start < 5
        assert not router.connected


async def test_a_target_that_stops_is_a_target_lost() -> None:
    def stop(request: Open) -> list[Commit | Closed]:
        return [Closed(request.session, grpc.StatusCode.UNAVAILABLE.value[0], "the target is stopping")]

    async with routing_to(Target(serve_with(stop))) as router:
        assert await tokens_of(router, "a") == [7]


async def test_a_session_that_the_target_refuses_fails_with_its_status() -> None:
    def refuse(request: Open) -> list[Commit | Closed]:
        return [Closed(request.session, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "no room")]

    async with routing_to(Target(serve_with(refuse))) as router:
        with pytest.raises(ResourceExhausted, match="no room"):
            await tokens_of(router, "a")


async def test_a_commit_said_twice_comes_once_and_a_gap_ends_its_session() -> None:
    def twice(request: Open) -> list[Commit | Closed]:
        first = Commit(At(request.session, 0, 0, 3), [8, 9])
        return [first, first, Commit(At(request.session, 0, 1, 5), [7], finish_reason=FinishReason.LENGTH)]

    def gap(request: Open) -> list[Commit | Closed]:
        return [Commit(At(request.session, 0, 0, 4), [8])]

    async with routing_to(Target(serve_with(twice), serve_with(gap))) as router:
        assert await tokens_of(router, "a") == [8, 9, 7]
        await until(lambda: router.connected)
        with pytest.raises(ServiceError, match="a commit at 4, the ledger holds 3 tokens"):
            await tokens_of(router, "b")
        assert not router.ledger.records


async def collect(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext, into: list[Any]) -> None:
    await say(context, Beat())
    async for frame in frames:
        into.append(convert.serve_request_from_pb(frame))
        if isinstance(into[-1], Open):
            await say(context, Commit(At(into[-1].session, 0, 0, 3), [8]))


async def test_who_leaves_early_or_is_aborted_has_the_target_told() -> None:
    received: list[Any] = []

    async with routing_to(Target(lambda frames, context: collect(frames, context, received))) as router:
        early = router.stream(record("early"))
        await anext(early)
        with pytest.raises(InvalidArgument, match="in the ledger already"):
            await anext(router.stream(record("early")))
        await early.aclose()
        aborted = router.stream(record("aborted"))
        await anext(aborted)
        assert router.abort("aborted") and not router.abort("early")
        assert (await anext(aborted)).finish_reason is FinishReason.ABORT
        await aborted.aclose()
        await until(lambda: sum(isinstance(request, Abort) for request in received) == 2)
        opened = [request.session for request in received if isinstance(request, Open)]
        assert [name.partition("@")[0] for name in opened] == ["early", "aborted"]
        assert [request for request in received if isinstance(request, Abort)] == [*map(Abort, opened)]
        assert not router.running and not router.ledger.records


# Several targets.


async def leave(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")


async def test_sessions_of_a_lost_target_go_on_at_another_one_at_once() -> None:
    """The lost one never comes back, and nobody waits for it."""
    gone, other = Target(serve_with(one_token), *[leave] * 200), Target(beating(Target().Serve))
    async with routing_to(gone, other) as router:
        async with asyncio.timeout(5):  # a silent target would be asked only after 8 s
            assert await tokens_of(router, "a") == [3, 7]
        assert router.connected and not router.targets["0"].connected
        assert await tokens_of(router, "b") == [7]
        assert router.routed == {"0": 1, "1": 2}


async def test_a_session_goes_to_no_target_that_has_said_nothing_since_its_own_was_lost() -> None:
    """What has cut one off may have cut off others as well."""
    speaking = asyncio.Event()

    async def silent_at_first(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        await say(context, Beat())
        await speaking.wait()
        await say(context, Beat())
        await Target().Serve(frames, context)

    async with routing_to(Target(serve_with(one_token), *[leave] * 200), Target(silent_at_first)) as router:
        asked = asyncio.create_task(tokens_of(router, "a"))
        await until(lambda: not router.targets["0"].connected)
        await asyncio.sleep(0.4)
        assert router.routed == {"0": 1}
        speaking.set()
        assert await asked == [3, 7]


async def test_what_kills_one_target_after_the_other_is_given_up_at_the_third() -> None:
    targets = [Target(*[serve_with(lambda _: [])] * 20) for _ in range(5)]
    async with routing_to(*targets) as router:
        with pytest.raises(Unavailable, match="lost again and again"):
            await tokens_of(router, "a")
        assert router.routed.total() == 3


async def full(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
    """Refuse each session, as a target does whose queue has filled up since its last report."""
    async for request in opened(frames, context):
        await say(context, Closed(request.session, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "the queue is full"))


async def test_a_session_for_which_one_target_has_no_place_goes_to_another() -> None:
    async with routing_to(Target(full), Target(full), Target()) as router:
        for name in ("a", "b", "c"):
            assert await tokens_of(router, name) == [7]
        assert router.targets["0"].sessions == router.targets["1"].sessions == 0
        assert router.routed["2"] == 3 and router.routed.total() > 3


async def test_a_session_for_which_no_target_has_a_place_is_refused_after_one_try_at_each() -> None:
    async with routing_to(Target(full), Target(full)) as router:
        with pytest.raises(ResourceExhausted, match="the queue is full"):
            await tokens_of(router, "a")
        assert router.routed == {"0": 1, "1": 1}


def token_then_full(request: Open) -> list[Commit | Closed]:
    return [*one_token(request), Closed(request.session, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "no room")]


async def test_a_session_that_has_begun_goes_to_another_target_when_its_own_has_no_place() -> None:
    """Where it stands, to one whose queue is full: it was accepted. Its target stays connected."""

    async def serve(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        await serve_with(token_then_full)(frames, context)
        await asyncio.sleep(60)

    received: list[Any] = []
    full_queue = reporting(Report(number=1, sessions=70, waiting=6, queue_places=0), received)
    async with routing_to(Target(serve), Target(full_queue)) as router:
        assert await tokens_of(router, "a") == [3, 7]
        assert router.targets["0"].connected and router.routed == {"0": 1, "1": 1}
    assert [(request.tokens, request.resumed) for request in received] == [([1, 2, 3, 3], True)]


@pytest.mark.parametrize("begun", [False, True])
async def test_a_session_of_a_lost_target_goes_on_where_all_queues_are_full(begun: bool) -> None:
    """Targets are told that it was accepted before; if one refuses it nevertheless, it goes to the next."""
    received: list[Any] = []
    lost = serve_with(one_token if begun else lambda _: [])
    full_queue = reporting(Report(number=1, sessions=70, waiting=6, queue_places=0), received)
    targets = Target(lost, *[leave] * 200), Target(beating(full)), Target(full_queue)
    async with routing_to(*targets) as router:
        assert await tokens_of(router, "a") == [3, 7][not begun :]
        assert router.routed == {"0": 1, "1": 1, "2": 1}
    assert [(request.tokens, request.resumed) for request in received] == [([1, 2, 3, 3][: 3 + begun], True)]


async def test_a_target_that_drains_takes_no_new_sessions_and_finishes_those_it_has() -> None:
    """It says itself that it drains, and when it stays after all."""
    going_on, says = asyncio.Event(), asyncio.Queue[Report]()

    async def slow(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        async def report() -> None:
            while True:
                await say(context, await says.get())

        reporting = asyncio.create_task(report())
        async for request in opened(frames, context):
            await going_on.wait()
            await say(context, last_commit(request))
        reporting.cancel()

    async with routing_to(Target(slow), Target()) as router:
        running = asyncio.create_task(tokens_of(router, "a"))
        await until(lambda: router.targets["0"].sessions == 1)
        says.put_nowait(Report(number=1, sessions=1, queue_places=9, draining=True))
        await until(lambda: not router.target_states()["0"].serving)
        assert [await tokens_of(router, name) for name in "bcd"] == [[7]] * 3
        assert router.routed == {"0": 1, "1": 3} and router.connected
        going_on.set()
        assert await running == [7] and router.targets["0"].sessions == 0
        says.put_nowait(Report(number=2, opens=1, free_places=9, free_kv_pages=99))
        await until(lambda: router.target_states()["0"].serving)
        assert [await tokens_of(router, name) for name in "fg"] == [[7]] * 2
        assert router.routed == {"0": 3, "1": 3}, "it has less to do"


async def test_a_target_is_found_again_where_it_is_now() -> None:
    """Its session goes on at the new address; a target that is forgotten is left."""
    received: list[Any] = []
    old, new = Target(lambda frames, context: collect(frames, context, received)), Target()
    async with serving(old, new) as places:
        first, second = places.addresses.values()
        directory = Directory({"target": first})
        router = Router(directory, PeerAccess(), 30)
        async with asyncio.timeout(20), router.connected_to_targets():
            await until(lambda: router.connected)
            session = router.stream(record("a"))
            assert (await anext(session)).tokens == [8]
            directory.put("target", second)
            assert [token async for item in session for token in item.tokens] == [7]
            directory.remove("target")
            await until(lambda: not router.connected)
            assert not router.targets


async def test_two_orchestrators_use_the_same_names_on_one_target() -> None:
    names: list[str] = []

    async def note(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        async for request in opened(frames, context):
            names.append(request.session)
            await say(context, last_commit(request))

    async with serving(Target(note, note)) as directory:
        routers = [Router(directory, PeerAccess(), 30) for _ in range(2)]
        async with asyncio.timeout(20), routers[0].connected_to_targets(), routers[1].connected_to_targets():
            await until(lambda: all(router.connected for router in routers))
            assert await asyncio.gather(*(tokens_of(router, "a") for router in routers)) == [[7], [7]]
            assert await tokens_of(routers[0], "a") == [7]
    assert len(set(names)) == 3


def reporting(report: Report, received: list[Any]) -> Serve:
    """Return a stream that says this at its start and notes what it is asked for."""

    async def serve(frames: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        async for request in opened(frames, context, report):
            received.append(request)
            await say(context, last_commit(request))

    return serve


async def test_a_request_is_refused_before_it_is_sent_where_all_queues_are_full() -> None:
    received: list[Any] = []
    full = reporting(Report(number=1, sessions=70, waiting=6, queue_places=0), received)
    async with routing_to(Target(full), Target(full)) as router:
        with pytest.raises(ResourceExhausted, match="the queues of all targets are full") as error:
            await tokens_of(router, "a")
        assert error.value.retry_after == 1 and not received and not router.ledger.records
        with pytest.raises(ResourceExhausted) as refusal:
            router.check_room()
        assert str(refusal.value) == str(error.value)
    free = reporting(Report(number=1, sessions=70, waiting=6, queue_places=1), received)
    async with routing_to(Target(full), Target(free)) as router:
        router.check_room()
        assert await tokens_of(router, "a") == [7]
    left = reporting(Report(number=1, sessions=70, waiting=6, queue_places=0, left=["a"]), received)
    async with routing_to(Target(full), Target(left)) as router:
        router.check_room()
        assert await tokens_of(router, "a") == [7]
