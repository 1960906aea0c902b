"""From a validated request to a stream of committed tokens: ledger, the stream to the target, resumption.

Every client request is one session of the ledger. When the target is lost, its sessions wait and are opened
again from the ledger as soon as it is back; a client sees a pause. After `resume_timeout` they fail.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import grpc

from orchestrator.directory import Directory
from orchestrator.ledger import Ledger, LedgerError, Record
from protos import control_pb2, control_pb2_grpc
from wire import convert
from wire.access import PeerAccess
from wire.errors import DeadlineExceeded, InvalidArgument, ServiceError, Unavailable, error_from_code
from wire.messages import Abort, At, Beat, Closed, Commit, FinishReason, ServedEvent, ServeRequest, SessionReads
from wire.outbox import Outbox
from wire.streams import BEAT_SECONDS, exchange, read_frames

log = logging.getLogger(__name__)

_REDIAL_SECONDS = 0.1
# A session that is there each time the target is lost, without a token in between, may be what kills it.
_MAX_RESUMPTIONS = 2


class Router:
    """Owns the ledger and the Serve stream to one target.

    resume_timeout: seconds that requests wait for a lost target. request_timeout: seconds that a request may take in
    all; 0: as long as it takes.
    """

    def __init__(
        self, targets: Directory, access: PeerAccess, resume_timeout: float, request_timeout: float = 0.0
    ) -> None:
        self.ledger = Ledger()
        self.connected = False
        self._targets, self._access = targets, access
        self._resume_timeout, self._request_timeout = resume_timeout, request_timeout
        self._readers: dict[str, asyncio.Queue[Commit | ServiceError]] = {}
        self._outbox: Outbox[ServeRequest | Beat] | None = None
        self._control: control_pb2_grpc.TargetControlStub | None = None

    @contextlib.asynccontextmanager
    async def connected_to_target(self) -> AsyncIterator[None]:
        """Keep the stream to the target while the context lasts, dialling again when it is lost."""
        keeping = asyncio.create_task(self._keep_stream())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            self.fail_all(Unavailable("the orchestrator is stopping"))

    @property
    def running(self) -> int:
        """How many requests are open."""
        return len(self._readers)

    async def stream(self, record: Record) -> AsyncGenerator[Commit]:
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
        deadline = asyncio.get_running_loop().time() + self._request_timeout if self._request_timeout else None
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        item = await queue.get()
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"the request took longer than the {self._request_timeout:g} s that the server allows"
                    ) from None
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

    def abort(self, session: str) -> bool:
        """Let a session's reader see its end now; False if it is not open."""
        return self._tell(session, Commit(At(session, 0, 0, 0), [], finish_reason=FinishReason.ABORT))

    def _tell(self, session: str, item: Commit | ServiceError) -> bool:
        """Hand something to a session's reader; False if it is not open."""
        queue = self._readers.get(session)
        if queue is not None:
            queue.put_nowait(item)
        return queue is not None

    def fail_all(self, error: ServiceError) -> None:
        for queue in self._readers.values():
            queue.put_nowait(error)

    async def reads(self, session: str) -> SessionReads:
        """Ask the target which blocks a round of a session read. Raises ServiceError."""
        if self._control is None or not self.connected:
            raise Unavailable("the target is not connected; try again in a moment")
        asked = control_pb2.ReadsRequest(session=session)
        try:
            pb = await self._control.Reads(asked, timeout=BEAT_SECONDS, metadata=self._access.metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_code(error.code().value[0], error.details() or "the target does not answer") from None
        return convert.reads_from_pb(pb)

    @property
    def _target(self) -> str:
        return next(iter(self._targets.addresses.values()))

    async def _keep_stream(self) -> None:
        """Serve over one stream after the other, whatever ends it. Runs until cancelled."""
        lost_at: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with self._access.dial(self._target) as channel:
                    self._control = control_pb2_grpc.TargetControlStub(channel)
                    await self._serve(channel)
            except TimeoutError:
                pass  # not reachable yet
            except grpc.aio.AioRpcError as error:
                log.warning("stream to the target at %s ended: %s %s", self._target, error.code().name, error.details())
            except ServiceError as error:
                log.warning("stream to the target at %s ended: %s", self._target, error)
            except Exception:
                log.exception("stream to the target at %s failed; it is opened again", self._target)
            if self.connected:
                self.connected, lost_at = False, loop.time()
            if lost_at is not None and loop.time() - lost_at > self._resume_timeout:
                self.fail_all(Unavailable(f"the target at {self._target} was lost and did not come back"))
                lost_at = None
            await asyncio.sleep(_REDIAL_SECONDS)

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        """Serve until the stream ends. Raises what ended it; TimeoutError if the target cannot be reached."""
        await asyncio.wait_for(channel.channel_ready(), 1.0)
        call = control_pb2_grpc.TargetControlStub(channel).Serve(metadata=self._access.metadata)
        outbox: Outbox[ServeRequest | Beat] = Outbox()

        def receive(frame: control_pb2.ServedFrame) -> None:
            if self._outbox is None:  # the target has spoken: it lives
                self._resume(outbox)
            for event in frame.events:
                self._receive(convert.served_event_from_pb(event))

        async def write(requests: list[ServeRequest | Beat]) -> None:
            for request in requests:
                await call.write(convert.serve_request_to_pb(request))

        try:
            await exchange(read_frames(call), receive, outbox, write, "the target")
        finally:
            self._outbox = None
            call.cancel()

    def _resume(self, outbox: Outbox[ServeRequest | Beat]) -> None:
        """Take a stream into use, and open all sessions on it that there are."""
        for record in self.ledger.records.values():
            if record.resumptions >= _MAX_RESUMPTIONS:
                self._tell(record.session, Unavailable("the target was lost again and again while it ran this request"))
                continue
            record.resumptions += 1
            outbox.put(record.to_open())
        self._outbox, self.connected = outbox, True

    def _receive(self, event: ServedEvent | Beat) -> None:
        if isinstance(event, Beat):
            return
        if isinstance(event, Closed):
            # A target that stops is a target lost: its stream ends next, and the session waits for it.
            if event.code != grpc.StatusCode.UNAVAILABLE.value[0]:
                self._tell(event.session, error_from_code(event.code, event.message))
            return
        try:
            if self.ledger.apply(event) is not None:
                self._tell(event.at.session, event)
        except LedgerError as error:
            log.error("%s", error)
            self._tell(event.at.session, ServiceError(str(error)))
