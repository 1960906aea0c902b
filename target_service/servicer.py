"""The target's gRPC edge: Speculate streams from drafts, a Serve stream from the orchestrator, status."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from protos import control_pb2, control_pb2_grpc, speculation_pb2, speculation_pb2_grpc
from target_service.session import DraftPeer
from target_service.verifier import Verifier
from wire import convert
from wire.errors import FailedPrecondition, InvalidArgument, ServiceError
from wire.messages import Abort, Closed, Hello, ServedEvent, ServiceStatus, TargetEvent
from wire.outbox import Outbox
from wire.server import guarded_stream


class SpeculationServicer(speculation_pb2_grpc.SpeculationServicer):
    def __init__(self, verifier: Verifier, hello: Hello, wake: asyncio.Event) -> None:
        self._verifier = verifier
        self._hello = hello
        self._wake = wake
        self.refusal = ""

    async def Speculate(
        self, request_iterator: AsyncIterator[speculation_pb2.DraftFrame], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[speculation_pb2.TargetFrame]:
        async for frame in guarded_stream(context, self._speculate(request_iterator)):
            yield frame

    async def _speculate(
        self, frames: AsyncIterator[speculation_pb2.DraftFrame]
    ) -> AsyncIterator[speculation_pb2.TargetFrame]:
        draft = await self._shake_hands(frames)
        yield speculation_pb2.TargetFrame(welcome=speculation_pb2.Welcome(target=convert.hello_to_pb(self._hello)))
        outbox: Outbox[TargetEvent] = Outbox()
        peer = DraftPeer(draft.peer, outbox.put)
        self._verifier.protocol.attach(peer)
        self._wake.set()

        def receive(frame: speculation_pb2.DraftFrame) -> None:
            if frame.WhichOneof("body") != "batch":
                raise InvalidArgument("after the handshake a draft sends batches of events")
            for event in frame.batch.events:
                self._verifier.protocol.receive(peer, convert.draft_event_from_pb(event))
            self._wake.set()

        try:
            async for events in _exchange(frames, receive, outbox):
                yield convert.target_events_to_pb(events)
        finally:
            self._verifier.protocol.detach(peer)
            self._wake.set()

    async def _shake_hands(self, frames: AsyncIterator[speculation_pb2.DraftFrame]) -> Hello:
        first = await anext(aiter(frames), None)
        if first is None or first.WhichOneof("body") != "hello":
            raise InvalidArgument("the first frame of a draft must be its hello")
        draft = convert.hello_from_pb(first.hello)
        mismatch = draft.mismatch(self._hello)
        if mismatch:
            self.refusal = f"draft and target do not fit: {mismatch}"
            raise FailedPrecondition(self.refusal)
        self.refusal = ""
        return draft


class ControlServicer(control_pb2_grpc.TargetControlServicer):
    """An orchestrator's sessions live as long as its stream: when that breaks, they are aborted."""

    def __init__(self, verifier: Verifier, wake: asyncio.Event, read_status: Callable[[], ServiceStatus]) -> None:
        self._verifier = verifier
        self._wake = wake
        self._read_status = read_status

    async def Status(
        self, request: control_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.ServiceStatus:
        return convert.status_to_pb(self._read_status())

    async def Serve(
        self, request_iterator: AsyncIterator[control_pb2.ServeFrame], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[control_pb2.ServedFrame]:
        async for frame in guarded_stream(context, self._serve(request_iterator)):
            yield frame

    async def _serve(self, frames: AsyncIterator[control_pb2.ServeFrame]) -> AsyncIterator[control_pb2.ServedFrame]:
        outbox: Outbox[ServedEvent] = Outbox()
        opened: set[str] = set()

        def receive(frame: control_pb2.ServeFrame) -> None:
            request = convert.serve_request_from_pb(frame)
            if isinstance(request, Abort):
                self._verifier.abort(request.session)
                opened.discard(request.session)  # the name may be another stream's next
            else:
                try:
                    self._verifier.admission.open(request, outbox.put)
                    opened.add(request.session)
                except ServiceError as error:
                    outbox.put(Closed(request.session, error.status.value[0], str(error)))
            self._wake.set()

        try:
            async for events in _exchange(frames, receive, outbox):
                yield convert.served_events_to_pb(events)
                opened -= {e.session for e in events if isinstance(e, Closed)}
                opened -= {e.at.session for e in events if not isinstance(e, Closed) and e.finish_reason}
        finally:
            for session in opened:
                self._verifier.abort(session)
            self._wake.set()


async def _exchange(
    frames: AsyncIterator[Any], receive: Callable[[Any], None], outbox: Outbox[Any]
) -> AsyncIterator[list[Any]]:
    """Receive frames beside yielding what is to be sent; ends when the peer does, or with receive's error."""
    failure: list[BaseException] = []

    async def read() -> None:
        try:
            async for frame in frames:
                receive(frame)
        except ServiceError as error:
            failure.append(error)
        finally:
            outbox.close()

    reader = asyncio.create_task(read())
    try:
        async for events in outbox:
            yield events
        if failure:
            raise failure[0]
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
