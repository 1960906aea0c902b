"""The target's gRPC edge: Speculate streams from drafts, a Serve stream from the orchestrator, status."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from protos import control_pb2, control_pb2_grpc, speculation_pb2, speculation_pb2_grpc
from specahead.wire import convert
from specahead.wire.access import PeerStreams, peer_of
from specahead.wire.errors import FailedPrecondition, InvalidArgument, ServiceError
from specahead.wire.messages import Abort, Beat, Closed, Commit, Hello, Open, ServedEvent, ServiceStatus, TargetEvent
from specahead.wire.outbox import Outbox
from specahead.wire.server import guarded
from specahead.wire.streams import BEAT_SECONDS, PATIENCE, exchange
from target_service.orphaned_sessions import OrphanedSessions, SessionRecord, StreamRecords
from target_service.reporting import Reporter
from target_service.session import DraftPeer
from target_service.verifier import Verifier

MOST_STREAMS = 32  # of a kind that one peer may hold


class SpeculationServicer(speculation_pb2_grpc.SpeculationServicer):
    def __init__(self, verifier: Verifier, hello: Hello, wake: asyncio.Event) -> None:
        self._verifier = verifier
        self._streams = PeerStreams(MOST_STREAMS)
        self._hello = hello
        self._wake = wake
        self.refusal = ""

    async def Speculate(
        self, request_iterator: AsyncIterator[speculation_pb2.DraftFrame], context: grpc.aio.ServicerContext
    ) -> None:
        async with guarded(context):
            with self._streams.held_by(peer_of(context)):
                await self._speculate(request_iterator, context)

    async def _speculate(
        self, frames: AsyncIterator[speculation_pb2.DraftFrame], context: grpc.aio.ServicerContext
    ) -> None:
        draft = await self._shake_hands(frames)
        welcome = speculation_pb2.Welcome(target=convert.hello_to_pb(self._hello))
        await context.write(speculation_pb2.TargetFrame(welcome=welcome))
        outbox: Outbox[TargetEvent | Beat] = Outbox(self._verifier.settings.most_unread_tokens)
        peer = DraftPeer(draft.peer, outbox.put)
        self._verifier.protocol.attach(peer)
        self._wake.set()

        def receive(frame: speculation_pb2.DraftFrame) -> None:
            if frame.WhichOneof("body") != "batch":
                raise InvalidArgument("after the handshake a draft sends batches of events")
            for pb in frame.batch.events:
                self._receive(peer, pb)

        async def write(events: list[TargetEvent | Beat]) -> None:
            await context.write(convert.target_events_to_pb(events))

        try:
            await exchange(frames, receive, outbox, write, f"draft {draft.peer}")
        finally:
            self._verifier.protocol.detach(peer)
            self._wake.set()

    def _receive(self, peer: DraftPeer, pb: speculation_pb2.DraftEvent) -> None:
        """Apply an event. A wrong event ends its session's drafting; raises InvalidArgument if it names no session."""
        try:
            event = convert.draft_event_from_pb(pb)
            if isinstance(event, Beat):
                return
            self._verifier.protocol.receive(peer, event)
        except InvalidArgument as error:
            name = convert.session_in(pb, "event")
            if not name:
                raise
            self._verifier.protocol.reject(peer, name, error)
        self._wake.set()

    async def _shake_hands(self, frames: AsyncIterator[speculation_pb2.DraftFrame]) -> Hello:
        first = await anext(aiter(frames), None)
        if first is None or first.WhichOneof("body") != "hello":
            raise InvalidArgument("the first frame of a draft must be its hello")
        draft = convert.hello_from_pb(first.hello)
        settings = self._verifier.settings
        if not settings.has_draft or settings.draft_in_target:
            own = " --placement together" if settings.draft_in_target else ""
            raise FailedPrecondition(f"this target takes no draft: it runs with --draft {settings.draft}{own}")
        mismatch = draft.mismatch(self._hello)
        if mismatch:
            self.refusal = f"draft and target do not fit: {mismatch}"
            raise FailedPrecondition(self.refusal)
        self.refusal = ""
        return draft


class ControlServicer(control_pb2_grpc.TargetControlServicer):
    """Serves orchestrators. An orchestrator's sessions live as long as its stream: when that breaks, they are aborted
    and their commits are kept for another orchestrator. No other stream may abort them.
    """

    def __init__(self, verifier: Verifier, wake: asyncio.Event, read_status: Callable[[], ServiceStatus]) -> None:
        self._verifier = verifier
        self._streams = PeerStreams(MOST_STREAMS)
        self._wake = wake
        self._read_status = read_status
        self._orphans = OrphanedSessions(verifier.settings.timeouts.resume)
        self._reporters: dict[Reporter, Outbox[ServedEvent | Beat]] = {}  # of the streams that there are

    async def Status(
        self, request: control_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.ServiceStatus:
        return convert.status_to_pb(self._read_status())

    async def Drain(self, request: control_pb2.DrainRequest, context: grpc.aio.ServicerContext) -> control_pb2.Drained:
        self._verifier.admission.draining = request.draining
        return control_pb2.Drained()

    async def Serve(
        self, request_iterator: AsyncIterator[control_pb2.ServeFrame], context: grpc.aio.ServicerContext
    ) -> None:
        async with guarded(context):
            outbox: Outbox[ServedEvent | Beat] = Outbox(self._verifier.settings.most_unread_tokens)
            peer = peer_of(context)
            with self._streams.held_by(peer), self._verifier.admission.shared(outbox.put, peer):
                await self._serve(request_iterator, context, outbox)

    async def _serve(
        self,
        frames: AsyncIterator[control_pb2.ServeFrame],
        context: grpc.aio.ServicerContext,
        outbox: Outbox[ServedEvent | Beat],
    ) -> None:
        records, verifier = StreamRecords(PATIENCE * BEAT_SECONDS), self._verifier
        prefixes = verifier.runner.kv.pool.prefixes
        reporter = Reporter(verifier.admission, verifier.reading, prefixes, outbox.put, self._orphans)
        self._reporters[reporter] = outbox

        def receive(frame: control_pb2.ServeFrame) -> None:
            reporter.opens += frame.HasField("open")
            try:
                self._receive(frame, records, reporter, outbox)
            except ServiceError as error:
                name = convert.session_in(frame, "body")
                if not name:
                    raise
                outbox.put(Closed(name, error.status.value[0], str(error)))
            self._wake.set()

        async def write(events: list[ServedEvent | Beat]) -> None:
            for event in events:
                if isinstance(event, Closed):
                    records.close(event.session)
                if isinstance(event, Closed) or (isinstance(event, Commit) and event.finish_reason):
                    reporter.hurry()  # a place is free
            frame = convert.served_events_to_pb([*events, *reporter.due()])
            for event, pb in zip(events, frame.events, strict=False):
                if isinstance(event, Commit):
                    records.write(event, pb.SerializeToString())
            await context.write(frame)

        try:
            await exchange(frames, receive, outbox, write, "the orchestrator")
        finally:
            reporter.close()
            del self._reporters[reporter]
            self._leave(records)
            self._wake.set()

    def _leave(self, records: StreamRecords) -> None:
        """End the sessions of a lost orchestrator, and report the orphaned ones to the others at once."""
        for record in records:
            if not record.has_ended:
                self._verifier.abort(record.request.session)
            self._orphans.leave(record)
        for reporter, outbox in self._reporters.items():
            reporter.hurry()
            outbox.put(Beat())

    def _receive(
        self,
        frame: control_pb2.ServeFrame,
        records: StreamRecords,
        reporter: Reporter,
        outbox: Outbox[ServedEvent | Beat],
    ) -> None:
        """Apply a frame. Raises ServiceError for a session that cannot be opened, and for a wrong frame."""
        request = convert.serve_request_from_pb(frame)
        if isinstance(request, Open):
            self._open(request, records, outbox)
        elif isinstance(request, Abort) and request.session in records:
            self._verifier.abort(request.session)
            records.close(request.session)  # the name may be another stream's next
            reporter.hurry()
            outbox.put(Beat())

    def _open(self, request: Open, records: StreamRecords, outbox: Outbox[ServedEvent | Beat]) -> None:
        """Open a session, or continue an orphaned one: then its commits are sent again first."""
        orphan = self._orphans.find(request)
        record = SessionRecord(request) if orphan is None else orphan.continued_by(request)
        if not record.has_ended:
            self._verifier.admission.open(record.reopening(), outbox.put)
        records.open(record)
        self._orphans.forget(request)
        if orphan is not None:
            self._verifier.counters["taken_up_sessions"] += 1
            for commit in record.commits:
                self._verifier.counters["retold_tokens"] += len(commit.tokens)
                outbox.put(commit)
