"""From a validated request to a stream of committed tokens: ledger, the stream to the target, resumption.

Every client request is one session of the ledger. When the target is lost, its sessions wait and are opened
again from the ledger as soon as it is back; a client sees a pause. After `resume_timeout` they fail.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import grpc

from orchestrator.ledger import Ledger, LedgerError, Record
from protos import control_pb2, control_pb2_grpc
from wire import convert
from wire.errors import InvalidArgument, ServiceError, Unavailable, error_from_code
from wire.messages import Abort, Closed, Commit, FinishReason, ServedEvent, ServeRequest, ServiceStatus
from wire.outbox import Outbox
from wire.server import OPTIONS

log = logging.getLogger(__name__)

_REDIAL_SECONDS = 0.1
# A session that is there each time the target is lost, without a token in between, may be what kills it.
_MAX_RESUMPTIONS = 2


@dataclass(frozen=True)
class Committed:
    """What a session's reader gets for each round."""

    tokens: list[int]
    finish_reason: FinishReason


class Router:
    """Owns the ledger and the Serve stream to one target."""

    def __init__(self, target: str, resume_timeout: float) -> None:
        self.ledger = Ledger()
        self.connected = False
        self._target = target
        self._resume_timeout = resume_timeout
        self._readers: dict[str, asyncio.Queue[Committed | ServiceError]] = {}
        self._outbox: Outbox[ServeRequest] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._target, options=OPTIONS)
        self._tasks = [asyncio.create_task(self._keep_stream())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.fail_all(Unavailable("the orchestrator is stopping"))
        if self._channel is not None:
            await self._channel.close()

    @property
    def running(self) -> int:
        return len(self._readers)

    async def status(self, timeout: float = 1.0) -> ServiceStatus:
        """The target's own account. Raises Unavailable."""
        assert self._channel is not None
        try:
            stub = control_pb2_grpc.TargetControlStub(self._channel)
            return convert.status_from_pb(await stub.Status(control_pb2.StatusRequest(), timeout=timeout))
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"target at {self._target}: {error.code().name}") from error

    async def stream(self, record: Record) -> AsyncGenerator[Committed]:
        """Open the session and yield its rounds up to the last. Leaving early aborts it.

        Raises ServiceError as the target or the loss of it demands.
        """
        if self._outbox is None:
            raise Unavailable("the target is not connected; try again in a moment")
        try:
            self.ledger.open(record)
        except LedgerError as error:
            raise InvalidArgument(str(error)) from None
        queue = self._readers[record.session] = asyncio.Queue()
        self._outbox.put(record.to_open())
        try:
            while True:
                item = await queue.get()
                if isinstance(item, ServiceError):
                    raise item
                yield item
                if item.finish_reason is not FinishReason.NONE:
                    return
        finally:
            del self._readers[record.session]
            self.ledger.close(record.session)
            if record.finish_reason is FinishReason.NONE and self._outbox is not None:
                self._outbox.put(Abort(record.session))

    def is_open(self, session: str) -> bool:
        return session in self._readers

    def end(self, session: str, reason: FinishReason) -> bool:
        """Let a session's reader see its end now; False if it is not open."""
        queue = self._readers.get(session)
        if queue is not None:
            queue.put_nowait(Committed([], reason))
        return queue is not None

    def _fail(self, session: str, error: ServiceError) -> None:
        queue = self._readers.get(session)
        if queue is not None:
            queue.put_nowait(error)

    def fail_all(self, error: ServiceError) -> None:
        for queue in self._readers.values():
            queue.put_nowait(error)

    async def _keep_stream(self) -> None:
        lost_at: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._serve()
            except TimeoutError:
                pass  # not reachable yet
            except grpc.aio.AioRpcError as error:
                log.warning("stream to the target at %s ended: %s %s", self._target, error.code().name, error.details())
            if self.connected:
                self.connected, lost_at = False, loop.time()
            if lost_at is not None and loop.time() - lost_at > self._resume_timeout:
                self.fail_all(Unavailable(f"the target at {self._target} was lost and did not come back"))
                lost_at = None
            await asyncio.sleep(_REDIAL_SECONDS)

    async def _serve(self) -> None:
        assert self._channel is not None
        await asyncio.wait_for(self._channel.channel_ready(), 1.0)
        call = control_pb2_grpc.TargetControlStub(self._channel).Serve()
        await call.wait_for_connection()
        outbox: Outbox[ServeRequest] = Outbox()
        for record in self.ledger.records.values():
            if record.resumptions >= _MAX_RESUMPTIONS:
                self._fail(record.session, Unavailable("the target was lost again and again while it ran this request"))
                continue
            record.resumptions += 1
            outbox.put(record.to_open())
        self._outbox, self.connected = outbox, True
        sender = asyncio.create_task(self._send(call, outbox))
        try:
            # read(), not iteration: gRPC forbids mixing the two on one call.
            while (frame := await call.read()) is not grpc.aio.EOF:
                for event in frame.events:
                    self._receive(convert.served_event_from_pb(event))
        finally:
            self._outbox = None
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _send(self, call: grpc.aio.StreamStreamCall, outbox: Outbox[ServeRequest]) -> None:
        async for requests in outbox:
            for request in requests:
                await call.write(convert.serve_request_to_pb(request))

    def _receive(self, event: ServedEvent) -> None:
        if isinstance(event, Closed):
            # A target that stops is a target lost: its stream ends next, and the session waits for it.
            if event.code != grpc.StatusCode.UNAVAILABLE.value[0]:
                self._fail(event.session, error_from_code(event.code, event.message))
            return
        self._apply(event)

    def _apply(self, commit: Commit) -> None:
        try:
            record = self.ledger.apply(commit)
        except LedgerError as error:
            log.error("%s", error)
            self._fail(commit.at.session, ServiceError(str(error)))
            return
        if record is not None and record.session in self._readers:
            self._readers[record.session].put_nowait(Committed(commit.tokens, commit.finish_reason))
