"""The network between simulated processes: a line carries the frames of one call, in order, late, or no longer.

Frames of one direction of a call keep their order, as over HTTP/2; calls are independent. A line that is cut may lose
the frames on their way. A line that stalls delivers later, as TCP does when a network heals.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from tests.simulation.loop import VirtualLoop
from tests.simulation.process import Process, current_process

Status = tuple[grpc.StatusCode, str]
CUT: Status = (grpc.StatusCode.UNAVAILABLE, "Socket closed")
REFUSED: Status = (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses: connection refused")
FINISHED: Status = (grpc.StatusCode.OK, "")
_LEAST_DELAY = 0.0002


class Listener(Protocol):
    """A server of a process that listens at an address."""

    process: Process

    def accept(self, line: "Line") -> None:
        """Take a call."""


class Network:
    """Owns the lines, and knows who listens where.

    spread: seconds that the slowest frames take. window: the most frames of one direction that may be on their way or
    unread before a writer waits. repeated: share of the frames between services that arrive twice.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.spread, self.window, self.repeated = 0.01, 64, 0.0
        self.listeners: dict[str, Listener] = {}
        self.lines: dict[int, Line] = {}
        self.counters: Counter[str] = Counter()
        self._numbers = 0
        self._stalls: dict[tuple[str, str], float] = {}

    def listen(self, address: str, listener: Listener) -> None:
        self.check_free(address)
        self.listeners[address] = listener
        listener.process.at_end.append(lambda _: self.close(address, listener))

    def check_free(self, address: str) -> None:
        """Raise OSError if another process listens there."""
        if address in self.listeners:
            raise OSError(f"cannot listen on {address}: Address already in use")

    def close(self, address: str, listener: Listener) -> None:
        """Stop listening at an address."""
        if self.listeners.get(address) is listener:
            del self.listeners[address]

    def dial(self, address: str, method: str, metadata: Any) -> "Line":
        """Return a line for a new call from the present process."""
        self._numbers += 1
        line = Line(self, self._numbers, current_process(), address, method, metadata)
        self.lines[line.number] = line
        self.loop.call_outside(self.arrival(line, 0.0), self._reach, line)
        return line

    def _reach(self, line: "Line") -> None:
        listener = self.listeners.get(line.address)
        if line.client is not None and not line.client.alive:
            line.forget()
        elif listener is None:
            line.end(REFUSED)
        else:
            line.server = listener.process
            listener.accept(line)

    def arrival(self, line: "Line", not_before: float) -> float:
        """Return the time at which a frame that is sent now arrives."""
        at = self.loop.time() + _LEAST_DELAY + self.spread * self.loop.random.random() ** 3
        return max(at, not_before, self._stalls.get(line.ends, 0.0))

    def reachable(self, address: str) -> bool:
        """Return whether the present process can connect to an address now."""
        listener, client = self.listeners.get(address), current_process()
        if listener is None or (client is not None and not client.alive):
            return False
        ends = _ends(client, address)
        return not listener.process.stopped and self._stalls.get(ends, 0.0) <= self.loop.time()

    def stall(self, ends: tuple[str, str], seconds: float) -> None:
        """Hold up all frames between two processes for a while."""
        self._stalls[ends] = self.loop.time() + seconds

    def drop(self, process: Process, is_lost: Callable[[], bool]) -> None:
        """Cut all lines of a process that has ended. is_lost: returns for each whether frames on their way are lost."""
        for line in [line for line in self.lines.values() if process in (line.client, line.server)]:
            line.cut(is_lost())


def _ends(client: Process | None, address: str) -> tuple[str, str]:
    return ("nobody" if client is None else client.name), address.partition(":")[0]


class Line:
    """The line of a call, a pipe in each direction. server: the process that serves it, once it is reached."""

    def __init__(
        self, network: Network, number: int, client: Process | None, address: str, method: str, metadata: Any
    ) -> None:
        self.network, self.number, self.client, self.address = network, number, client, address
        self.method, self.metadata = method, metadata
        self.ends = _ends(client, address)
        self.server: Process | None = None
        self.on_departure: Callable[[], None] = lambda: None
        self.is_open = True
        repeats = network.repeated if method in BETWEEN_SERVICES else 0.0
        self.to_server = Pipe(self, ">", repeats if method == _SPECULATE else 0.0)
        self.to_client = Pipe(self, "<", repeats)

    def forget(self) -> None:
        """End the line without notice to either end."""
        self.is_open = False
        self.network.lines.pop(self.number, None)

    def end(self, status: Status) -> None:
        """Let the client see the end of the call, after all frames that were sent to it."""
        if self.is_open:
            self.forget()
            self.to_client.finish(status)

    def cancel(self) -> None:
        """Let the server see that the client has left the call."""
        if self.is_open:
            self.forget()
            self._let_server_see()

    def cut(self, lost: bool) -> None:
        """Break the line, so that both ends see it. lost: whether frames on their way never arrive."""
        if not self.is_open:
            return
        self.forget()
        for pipe in (self.to_server, self.to_client) if lost else ():
            pipe.lose()
        self.to_client.finish(CUT)
        self._let_server_see()

    def _let_server_see(self) -> None:
        """Let the server see a departure: as the end of the requests, as a cancelled call, or as both."""
        loop, network = self.network.loop, self.network
        at = network.arrival(self, 0.0)
        if loop.random.random() < 0.5:
            self.to_server.finish(FINISHED)
            at = network.arrival(self, self.to_server.last)
        loop.call_outside(at, lambda: self.on_departure())


class Pipe:
    """One direction of a line. status: how it ended, None until then. last: when the last frame arrives."""

    def __init__(self, line: Line, direction: str, repeated: float) -> None:
        self._network, self._loop = line.network, line.network.loop
        self._line, self._name, self._repeated = line, f"{line.number}{direction}", repeated
        self.status: Status | None = None
        self.last = 0.0
        self._inbox: deque[bytes] = deque()
        self._sent = self._on_way = 0
        self._lost = False
        self._reader: asyncio.Future[None] | None = None
        self._writers: deque[asyncio.Future[None]] = deque()

    async def send(self, data: bytes) -> None:
        """Send a frame once the window has room."""
        while self._on_way + len(self._inbox) >= self._network.window and self._line.is_open:
            self._network.counters["full windows"] += 1
            room = self._loop.create_future()
            self._writers.append(room)
            await room
        if not self._line.is_open:
            return
        self._on_way += 1
        self._sent += 1
        self.last = self._network.arrival(self._line, self.last)
        self._loop.call_outside(self.last, self._arrive, data)
        if self._repeated and self._sent > 1 and self._loop.random.random() < self._repeated:
            self._network.counters["repeated frames"] += 1
            later = self.last + self._loop.random.random() * 0.1
            self._loop.call_outside(later, self._take, data)

    def _arrive(self, data: bytes) -> None:
        self._on_way -= 1
        self._take(data)

    def _take(self, data: bytes) -> None:
        if not self._lost and self.status is None:
            self._inbox.append(data)
            self._network.counters["frames"] += 1
            content = len(data) if self._line.method.endswith("/Status") else data  # the bytes of maps have no order
            self._loop.log.note(f"{self._loop.time():.6f} {self._name} {content!r}")
            self._wake_reader()

    def finish(self, status: Status) -> None:
        """Let the reader see this status after all frames that were sent."""
        self.last = self._network.arrival(self._line, self.last)
        self._loop.call_outside(self.last, self._end, status)

    def _end(self, status: Status) -> None:
        if self.status is None:
            self.status = status
            self._loop.log.note(f"{self._loop.time():.6f} {self._name} ends: {status[0].name} {status[1]}")
        self._wake_reader()
        while self._writers:
            self._wake(self._writers.popleft())

    def lose(self) -> None:
        """Drop all frames on their way."""
        self._lost = True

    async def receive(self) -> bytes | None:
        """Return the next frame, or None at the end."""
        while not self._inbox:
            if self.status is not None:
                return None
            self._reader = self._loop.create_future()
            await self._reader
        data = self._inbox.popleft()
        if self._writers:
            self._wake(self._writers.popleft())
        return data

    def _wake_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            self._wake(reader)

    @staticmethod
    def _wake(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)


_SPECULATE = "/specahead.v1.Speculation/Speculate"
BETWEEN_SERVICES = (_SPECULATE, "/specahead.v1.TargetControl/Serve")
