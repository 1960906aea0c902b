"""The orchestrator's end of the Serve stream to one target, which is dialled again when it is lost."""

import asyncio
import logging
from dataclasses import replace
from typing import Protocol

import grpc

from orchestrator.sessions.ledger import Record
from orchestrator.sessions.routing import TargetView
from protos import control_pb2, control_pb2_grpc
from specahead.wire import convert
from specahead.wire.access import PeerAccess
from specahead.wire.errors import ServiceError
from specahead.wire.messages import Abort, Beat, Closed, Commit, Report, ServedEvent, ServeRequest
from specahead.wire.outbox import Outbox
from specahead.wire.session_names import name_on_target
from specahead.wire.streams import exchange, read_frames

log = logging.getLogger(__name__)

_REDIAL_SECONDS = 0.1


class Owner(Protocol):
    """Receives the events of a stream."""

    def heard(self) -> None:
        """A message has come from the target."""

    def lost(self, sessions: list[str]) -> None:
        """The stream has ended, and with it these sessions on the target."""

    def receive(self, session: str | None, event: Commit | Closed) -> None:
        """An event of a session has come; None for a session that is no longer open on this stream."""


class TargetStream:
    """One target, with the sessions that this orchestrator has open on it.

    Each time a session is opened on a target it gets a new name there, so that it never meets sessions of other
    orchestrators or an earlier one of its own.
    """

    def __init__(self, name: str, address: str, access: PeerAccess, origin: str, owner: Owner) -> None:
        """origin: part of the sessions' names on the target; each orchestrator has another one."""
        self.view, self.address = TargetView(name), address
        self.found_at = self.heard_at = 0.0  # the loop's time when it was connected, and of its last message
        self._access, self._origin, self._owner = access, origin, owner
        self._outbox: Outbox[ServeRequest | Beat] | None = None
        self._control: control_pb2_grpc.TargetControlStub | None = None
        self._sessions: dict[str, str] = {}  # by the name on the target
        self._names: dict[str, str] = {}  # the other way round

    @property
    def connected(self) -> bool:
        """Whether the target can be sent to."""
        return self._outbox is not None

    @property
    def sessions(self) -> int:
        """The number of sessions that are open on it."""
        return len(self._names)

    # Sessions.

    def open(self, record: Record, number: int) -> None:
        """Open a session on the target, which must be connected and must have been chosen by routing.choose.

        number: counts all sessions that were opened from here.
        """
        assert self._outbox is not None
        name = name_on_target(record.session, self._origin, number)
        self._sessions[name], self._names[record.session] = record.session, name
        self._outbox.put(replace(record.to_open(), session=name))

    def close(self, session: str, finished: bool) -> None:
        """Forget an open session. finished: whether the target has ended it; else it is aborted there."""
        name = self._names.pop(session)
        del self._sessions[name]
        if not finished and self._outbox is not None:
            self._outbox.put(Abort(name))

    # The stream.

    async def keep(self) -> None:
        """Keep a stream open, dialling again whenever it ends. Runs until cancelled."""
        while True:
            try:
                async with self._access.dial(self.address) as channel:  # with the current certificates
                    self._control = control_pb2_grpc.TargetControlStub(channel)
                    await self._serve(channel, self._control)
            except TimeoutError:
                pass  # not reachable yet
            except grpc.aio.AioRpcError as error:
                log.warning("stream to %s ended: %s %s", self, error.code().name, error.details())
            except ServiceError as error:
                log.warning("stream to %s ended: %s", self, error)
            except Exception:
                log.exception("stream to %s failed; it is opened again", self)
            await asyncio.sleep(_REDIAL_SECONDS)

    def __str__(self) -> str:
        return f"{self.view.name} at {self.address}"

    async def _serve(self, channel: grpc.aio.Channel, control: control_pb2_grpc.TargetControlStub) -> None:
        """Serve until the stream ends. Raises the error that ended it; TimeoutError if the target cannot be reached."""
        async with asyncio.timeout(1.0):
            await channel.channel_ready()
        call = control.Serve(metadata=self._access.metadata)
        outbox: Outbox[ServeRequest | Beat] = Outbox()

        def receive(frame: control_pb2.ServedFrame) -> None:
            for event in frame.events:
                self._receive(convert.served_event_from_pb(event))
            self.heard_at = asyncio.get_running_loop().time()
            if self._outbox is None:  # the target has spoken: it lives
                self._outbox, self.found_at = outbox, self.heard_at
            self._owner.heard()

        async def write(requests: list[ServeRequest | Beat]) -> None:
            for request in requests:
                await call.write(convert.serve_request_to_pb(request))

        try:
            await exchange(read_frames(call), receive, outbox, write, "the target")
        finally:
            call.cancel()
            self._end()

    def _receive(self, event: ServedEvent | Beat) -> None:
        if isinstance(event, Report):
            self.view.take(event)
        elif isinstance(event, Closed):
            self._owner.receive(self._sessions.get(event.session), event)
        elif isinstance(event, Commit):
            session = self._sessions.get(event.at.session)
            known = event if session is None else replace(event, at=event.at._replace(session=session))
            self._owner.receive(session, known)

    def _end(self) -> None:
        """Forget the sessions of a stream that has ended."""
        if self._outbox is None:
            return
        self._outbox, sessions = None, list(self._names)
        self._names.clear()
        self._sessions.clear()
        self.view.forget()
        self._owner.lost(sessions)
