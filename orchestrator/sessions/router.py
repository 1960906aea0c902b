"""From a checked request to a stream of committed tokens: ledger, choice of a target, resumption.

Every choice of a request is one session of the ledger, open on one target. When the target is lost, its sessions are
opened again from the ledger on another target, as soon as that has sent a message, as each does every second. Without
another target they wait, and clients see a pause. After `resume_timeout` they fail.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import grpc

from orchestrator.cluster.directory import Directory
from orchestrator.sessions import routing
from orchestrator.sessions.ledger import Ledger, LedgerError, Record
from orchestrator.sessions.target_stream import TargetStream
from specahead.wire.access import PeerAccess
from specahead.wire.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    error_from_code,
)
from specahead.wire.messages import At, Closed, Commit, FinishReason
from specahead.wire.tasks import end_tasks

log = logging.getLogger(__name__)

# A session that loses several targets without a token in between may be the cause.
_MAX_RESUMPTIONS = 2
# A message that comes later than this after a loss was sent after it.
_SETTLING_SECONDS = 0.2


class TargetState(NamedTuple):
    """The use of a target."""

    serving: bool
    """Whether it takes new sessions."""
    sessions: int
    """Open on it."""
    routed: int
    """Sessions that were opened on it so far."""


class Router:
    """Owns the ledger, the streams to the targets of a directory, and the places of sessions on them."""

    def __init__(
        self, targets: Directory, access: PeerAccess, resume_timeout: float, request_timeout: float = 0.0
    ) -> None:
        """resume_timeout: seconds that requests wait for a target. request_timeout: seconds that a request may take in
        all; 0: any time."""
        self.ledger = Ledger()
        self.routed: Counter[str] = Counter()  # sessions that were opened on each target
        self._directory, self._access = targets, access
        self._resume_timeout, self._request_timeout = resume_timeout, request_timeout
        self._origin = secrets.token_hex(4)
        self._streams: dict[str, TargetStream] = {}
        self._places: dict[str, TargetStream] = {}  # of open sessions; a session that waits for a target has none
        self._readers: dict[str, asyncio.Queue[Commit | ServiceError]] = {}
        self._following: asyncio.Task[None] | None = None
        self._leaving = False
        self._lost_at = float("-inf")  # when a target was lost last
        self._giving_up: asyncio.TimerHandle | None = None

    # Targets.

    @contextlib.asynccontextmanager
    async def connected_to_targets(self) -> AsyncIterator[None]:
        """Keep streams to the targets while the context lasts."""
        self._following = asyncio.create_task(self._follow_directory())
        try:
            yield
        finally:
            self.leave(Unavailable("the orchestrator is stopping"))
            await asyncio.gather(self._following, return_exceptions=True)
            self._stop_clock()

    @property
    def targets(self) -> Mapping[str, TargetStream]:
        """The streams to all targets, by name."""
        return MappingProxyType(self._streams)

    def target_states(self) -> dict[str, TargetState]:
        """Return the use of each target, by name."""
        usable = self._usable()
        return {
            name: TargetState(name in usable, stream.sessions, self.routed[name])
            for name, stream in self._streams.items()
        }

    @property
    def connected(self) -> bool:
        """Whether new requests can be served."""
        return bool(self._usable())

    async def _follow_directory(self) -> None:
        """Keep a stream to each target of the directory at its present address. Runs until cancelled."""
        tasks: dict[TargetStream, asyncio.Task[None]] = {}
        try:
            while True:
                there = self._directory.addresses
                for name, stream in list(self._streams.items()):
                    if there.get(name) != stream.address:  # its sessions are lost when the stream has ended
                        del self._streams[name]
                        tasks[stream].cancel()
                for name in [name for name in there if name not in self._streams]:
                    stream = self._streams[name] = TargetStream(name, there[name], self._access, self._origin, self)
                    tasks[stream] = asyncio.create_task(stream.keep())
                tasks = {stream: task for stream, task in tasks.items() if not task.done()}
                await self._directory.changed()
        finally:
            await end_tasks(*tasks.values())

    def _usable(self) -> dict[str, TargetStream]:
        """Return the targets that take sessions, by name."""
        return {
            name: stream
            for name, stream in self._streams.items()
            if stream.connected and not stream.view.report.draining
        }

    # Requests.

    @property
    def running(self) -> int:
        """The number of open sessions."""
        return len(self._readers)

    async def stream(self, record: Record) -> AsyncGenerator[Commit]:
        """Open a session and yield its rounds up to the last. Leaving early aborts it.

        Raises ServiceError if no target takes it, if a target refuses or ends it, or if its target is lost for good.
        """
        usable = self._usable()
        if not usable:
            raise Unavailable("no target is connected; try again in a moment")
        views = [stream.view for stream in usable.values()]
        left = [view for view in views if record.session in view.left]
        views = left or routing.admit(views, len(record.tokens))
        try:
            self.ledger.open(record)
        except LedgerError as error:
            raise InvalidArgument(str(error)) from None
        queue = self._readers[record.session] = asyncio.Queue()
        allowed = self._request_timeout
        late = DeadlineExceeded(f"the request took longer than the {allowed:g} s that the server allows")
        alarm = asyncio.get_running_loop().call_later(allowed, queue.put_nowait, late) if allowed else None
        try:
            self._place(record, views)
            while True:
                item = await queue.get()
                if isinstance(item, ServiceError):
                    raise item
                yield item
                if item.finish_reason is not FinishReason.NONE:
                    return
        finally:
            if alarm is not None:
                alarm.cancel()
            del self._readers[record.session]
            self.ledger.close(record.session)
            place = self._places.pop(record.session, None)
            if place is not None:
                place.close(record.session, self._leaving or record.finish_reason is not FinishReason.NONE)

    def check_room(self) -> None:
        """Raise ResourceExhausted if even the shortest request would be refused now."""
        views = [stream.view for stream in self._usable().values()]
        if views and not any(view.left for view in views):  # sessions left there may go on
            routing.admit(views, 1)

    def is_open(self, session: str) -> bool:
        """Return whether a session of this name is open."""
        return session in self._readers

    def abort(self, session: str) -> bool:
        """End a session for its reader now; return False if it is not open."""
        return self._tell(session, Commit(At(session, 0, 0, 0), [], finish_reason=FinishReason.ABORT))

    def _tell(self, session: str, item: Commit | ServiceError) -> bool:
        """Pass a round or an error to a session's reader; return False if it is not open."""
        queue = self._readers.get(session)
        if queue is not None:
            queue.put_nowait(item)
        return queue is not None

    def leave(self, error: ServiceError) -> None:
        """Leave the targets, which keep their sessions, and fail all readers with the error."""
        self._leaving = True  # nothing is aborted
        self._streams.clear()  # nor opened again
        if self._following is not None:
            self._following.cancel()
        for session in self._readers:
            self._tell(session, error)

    # Places of sessions.

    def _place(self, record: Record, views: list[routing.TargetView]) -> None:
        """Open a session on one of these targets."""
        view = routing.choose(views, record.tokens)
        self._places[record.session] = stream = self._streams[view.name]
        self.routed[view.name] += 1
        stream.open(record, self.routed.total())

    def _place_elsewhere(self, session: str) -> bool:
        """Open a session that its target has no place for on another target; return False if all have refused it.

        A session that ran before goes there however long the reported queues are.
        """
        record, place = self.ledger.records.get(session), self._places.get(session)
        if record is None or place is None:
            return False
        record.refused_by.add(place.view.name)
        others = [stream.view for name, stream in self._usable().items() if name not in record.refused_by]
        try:
            views = (others if record.resumed else []) or routing.admit(others, len(record.tokens))
        except ResourceExhausted:
            return False
        place.close(session, finished=True)
        self._place(record, views)
        return True

    def _abandon(self, record: Record, reason: str) -> None:
        """Give a session up, and fail its reader."""
        record.resumptions = _MAX_RESUMPTIONS + 1
        self._tell(record.session, Unavailable(reason))

    def _waiting(self) -> list[Record]:
        """Return the sessions that wait for a target."""
        placeless = [item for name, item in self.ledger.records.items() if name not in self._places]
        return [item for item in placeless if not item.finish_reason and item.resumptions <= _MAX_RESUMPTIONS]

    def _resume_waiting(self) -> None:
        """Open waiting sessions on living targets; if no target is usable, start the clock after which they fail."""
        usable = self._usable().values()
        living = [stream.view for stream in usable if self._lives(stream)]
        for record in self._waiting() if living else []:
            record.resumptions += 1
            if record.resumptions > _MAX_RESUMPTIONS:
                self._abandon(record, "the target was lost again and again while it ran this request")
            else:
                self._place(record, living)
        if usable:
            self._stop_clock()
        elif self._giving_up is None and self._waiting():
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(self._resume_timeout, self._give_up)

    def _lives(self, stream: TargetStream) -> bool:
        """Return whether a target has spoken since another one was lost, so it did not fail with that one."""
        return stream.found_at > self._lost_at or stream.heard_at > self._lost_at + _SETTLING_SECONDS

    def heard(self) -> None:
        """Open waiting sessions if there are any: a target has sent a message."""
        if len(self._places) < len(self._readers):
            self._resume_waiting()

    def lost(self, sessions: list[str]) -> None:
        """Let the sessions of a lost target wait for another one."""
        self._lost_at = asyncio.get_running_loop().time()
        for session in sessions:
            del self._places[session]
        self._resume_waiting()

    def receive(self, session: str | None, event: Commit | Closed) -> None:
        """Add a round to the ledger and pass it on, or pass on why a session has ended."""
        if session is None:
            self.ledger.counters["unknown_session_commits"] += 1
        elif isinstance(event, Closed):
            # The stream of a target that stops ends next, and then its sessions go elsewhere.
            no_place = event.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            if event.code != grpc.StatusCode.UNAVAILABLE.value[0] and not (no_place and self._place_elsewhere(session)):
                self._tell(session, error_from_code(event.code, event.message))
        else:
            try:
                if self.ledger.apply(event) is not None:
                    self._tell(session, event)
            except LedgerError as error:
                log.error("%s", error)
                self._tell(session, ServiceError(str(error)))

    def _stop_clock(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        """Fail the sessions that still wait."""
        self._giving_up = None
        for record in self._waiting():
            self._abandon(record, "the target was lost and did not come back, nor is there another one")
