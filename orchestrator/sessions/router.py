"""From a validated request to a stream of committed tokens: ledger, the choice of a target, resumption.

Every client request is one session of the ledger, open on one target. When that is lost, its sessions are opened again
from the ledger on another one as soon as that speaks, which it does every second; if there is none they wait, and a
client sees a pause. After `resume_timeout` they fail.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
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
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    error_from_code,
)
from specahead.wire.messages import At, CallerUsage, Closed, Commit, FinishReason, SessionReads

log = logging.getLogger(__name__)

# A session that is there each time its target is lost, without a token in between, may be what kills it.
_MAX_RESUMPTIONS = 2
# What is said later than this after a loss was not on its way before it.
_SETTLING_SECONDS = 0.2


class TargetState(NamedTuple):
    """How a target is used. serving: whether it takes new sessions. sessions: open on it. routed: so far."""

    serving: bool
    sessions: int
    routed: int


class Router:
    """Owns the ledger, the streams to the targets of a directory, and which session is open on which of them.

    resume_timeout: seconds that requests wait where there is no target. request_timeout: seconds that a request may
    take in all; 0: as long as it takes. policy: one of `routing.POLICIES`. max_wait: seconds that a request may be
    expected to wait before its prompt is read; 0: any time. on_usage: told by each target what callers use of it
    through other orchestrators. routed: how often sessions were opened on each target.
    """

    def __init__(
        self,
        targets: Directory,
        access: PeerAccess,
        resume_timeout: float,
        request_timeout: float = 0.0,
        policy: str = "prefix",
        max_wait: float = 0.0,
        on_usage: Callable[[str, Sequence[CallerUsage]], None] = lambda target, usage: None,
    ) -> None:
        self.ledger = Ledger()
        self.used = on_usage
        self.routed: Counter[str] = Counter()
        self._directory, self._access = targets, access
        self._resume_timeout, self._request_timeout = resume_timeout, request_timeout
        self._policy, self._max_wait = policy, max_wait
        self._origin = secrets.token_hex(4)
        self._streams: dict[str, TargetStream] = {}
        self._places: dict[str, TargetStream] = {}  # of open sessions; those that wait for a target have none
        self._readers: dict[str, asyncio.Queue[Commit | ServiceError]] = {}
        self._following: asyncio.Task[None] | None = None
        self._leaving = False
        self._lost_at = float("-inf")  # when a target was lost last
        self._giving_up: asyncio.TimerHandle | None = None

    # Targets.

    @contextlib.asynccontextmanager
    async def connected_to_targets(self) -> AsyncIterator[None]:
        """Keep streams to the targets while the context lasts, dialling again when one is lost."""
        self._following = asyncio.create_task(self._follow_directory())
        try:
            yield
        finally:
            self.leave(Unavailable("the orchestrator is stopping"))
            await asyncio.gather(self._following, return_exceptions=True)
            self._stop_clock()

    @property
    def targets(self) -> Mapping[str, TargetStream]:
        """The streams to all targets that there are, by name."""
        return MappingProxyType(self._streams)

    def target_states(self) -> dict[str, TargetState]:
        """Return how each target is used, by name."""
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
        """Keep a stream to each target that there is, where it is now. Runs until cancelled."""
        tasks: dict[TargetStream, asyncio.Task[None]] = {}
        try:
            while True:
                there = self._directory.addresses
                for name, stream in list(self._streams.items()):
                    if there.get(name) != stream.address:  # its sessions are told lost when it has ended
                        del self._streams[name]
                        tasks[stream].cancel()
                for name in [name for name in there if name not in self._streams]:
                    stream = self._streams[name] = TargetStream(name, there[name], self._access, self._origin, self)
                    tasks[stream] = asyncio.create_task(stream.keep())
                tasks = {stream: task for stream, task in tasks.items() if not task.done()}
                await self._directory.changed()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

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
        """How many requests are open."""
        return len(self._readers)

    async def stream(self, record: Record) -> AsyncGenerator[Commit]:
        """Open the session and yield its rounds up to the last. Leaving early aborts it.

        Raises ServiceError as a target or the loss of it demands, and where no target takes it.
        """
        usable = self._usable()
        if not usable:
            raise Unavailable("no target is connected; try again in a moment")
        views = [stream.view for stream in usable.values()]
        left = [view for view in views if record.session in view.left]
        views = left or routing.admit(views, len(record.tokens), self._max_wait)
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

    def why_full(self) -> ResourceExhausted | None:
        """Return why every request would be refused now, however short it is; None if some request might be taken."""
        views = [stream.view for stream in self._usable().values()]
        if not views or any(view.left for view in views):  # what was left may be gone on with
            return None
        try:
            routing.admit(views, 1, self._max_wait)
        except ResourceExhausted as error:
            return error
        return None

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

    def leave(self, error: ServiceError) -> None:
        """Leave the targets, which keep what sessions have come to, and tell all readers why."""
        self._leaving = True  # nothing is aborted
        self._streams.clear()  # nor opened again
        if self._following is not None:
            self._following.cancel()
        for session in self._readers:
            self._tell(session, error)

    async def reads(self, session: str) -> SessionReads:
        """Ask its target which blocks a round of a session read. Raises ServiceError."""
        place = self._places.get(session)
        if place is None:
            raise NotFound(f"no session {session!r} is open on a target")
        return await place.reads(session)

    # Places of sessions.

    def _place(self, record: Record, views: list[routing.TargetView]) -> None:
        """Open a session on one of some targets."""
        view = routing.choose(self._policy, views, record.tokens)
        self._places[record.session] = stream = self._streams[view.name]
        self.routed[view.name] += 1
        stream.open(record, self.routed.total())

    def _place_elsewhere(self, session: str) -> bool:
        """Open a session that its target has no place for on one that has not refused it either.

        Returns whether there is one. A session that was accepted before goes there whatever queues its targets report.
        """
        record, place = self.ledger.records.get(session), self._places.get(session)
        if record is None or place is None:
            return False
        record.refused_by.add(place.view.name)
        others = [stream.view for name, stream in self._usable().items() if name not in record.refused_by]
        try:
            views = (others if record.resumed else []) or routing.admit(others, len(record.tokens), self._max_wait)
        except ResourceExhausted:
            return False
        place.close(session, finished=True)
        self._place(record, views)
        return True

    def _resume(self, record: Record, views: list[routing.TargetView]) -> None:
        """Open a session again whose target is lost, on one of these."""
        if record.resumptions >= _MAX_RESUMPTIONS:
            self._abandon(record, "the target was lost again and again while it ran this request")
            return
        record.resumptions += 1
        self._place(record, views)

    def _abandon(self, record: Record, reason: str) -> None:
        """Open a session no more, and tell its reader."""
        record.resumptions = _MAX_RESUMPTIONS + 1
        self._tell(record.session, Unavailable(reason))

    def _waiting(self) -> list[Record]:
        """Return the sessions that are open on no target, and are neither at their end nor abandoned."""
        placeless = [item for name, item in self.ledger.records.items() if name not in self._places]
        return [item for item in placeless if not item.finish_reason and item.resumptions <= _MAX_RESUMPTIONS]

    def _resume_waiting(self) -> None:
        """Open the sessions that wait on targets that live, or have a clock run until they are given up."""
        usable = self._usable().values()
        living = [stream.view for stream in usable if self._lives(stream)]
        for record in self._waiting() if living else []:
            self._resume(record, living)
        if usable:
            self._stop_clock()
        elif self._giving_up is None and self._waiting():
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(self._resume_timeout, self._give_up)

    def _lives(self, stream: TargetStream) -> bool:
        """Return whether a target has spoken since one was lost: whatever cut that off, it still stands."""
        return stream.found_at > self._lost_at or stream.heard_at > self._lost_at + _SETTLING_SECONDS

    def heard(self) -> None:
        """Open sessions that wait for a target which lives."""
        if len(self._places) < len(self._readers):
            self._resume_waiting()

    def lost(self, sessions: list[str]) -> None:
        """Let these sessions wait for another target."""
        self._lost_at = asyncio.get_running_loop().time()
        for session in sessions:
            del self._places[session]
        self._resume_waiting()

    def receive(self, session: str | None, event: Commit | Closed) -> None:
        """Write a round down and tell its reader; or tell it why its session has ended."""
        if session is None:
            self.ledger.counters["unknown_session_commits"] += 1
        elif isinstance(event, Closed):
            # A target that stops is a target lost: its stream ends next, and its sessions go elsewhere.
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
        """Tell the sessions that wait that no target has come."""
        self._giving_up = None
        for record in self._waiting():
            self._abandon(record, "the target was lost and did not come back, nor is there another one")
