"""Limits on HTTP connections: how many there are, in all and of an address, how long a request takes to come, and how
long its head is. Where there are too many, those give way on which nothing happens.
"""

import asyncio
import logging
import resource
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from orchestrator.requests.proxies import Proxies

log = logging.getLogger(__name__)

OTHER_FILES = 256  # that the process may want to open beside connections
LOG_SECONDS = 60.0
MOST_HEAD = 64 << 10  # bytes of a request's line and headers


@dataclass
class Connections:
    """The connections that are open. An address may have half of `most`; a request must come within receive_seconds.

    A new connection beyond that takes the place of one of its address (where there are `most`: of the address that has
    the most) on which no request runs, or whose client does not read its answer; of these the one for which this has
    lasted longest. Only where there is none is the new one closed. proxies: they may have all of `most`, since many
    clients have their address.
    """

    most: int
    receive_seconds: float = 30.0
    proxies: Proxies = field(default_factory=Proxies)
    by_address: Counter[str] = field(default_factory=Counter)
    idle: dict[asyncio.Transport, str] = field(default_factory=dict)  # their addresses, as of the next
    unread: dict[asyncio.Transport, str] = field(default_factory=dict)
    _last_logged: float = -LOG_SECONDS
    _refused: int = 0

    @staticmethod
    def within_open_files(most: int, proxies: Proxies) -> "Connections":
        """Return limits of at most `most` connections that leave the process the files that it needs itself."""
        allowed = max(2, min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES))
        return Connections(allowed, proxies=proxies)

    def take(self, address: str) -> bool:
        """Count a connection; False if it is one too many. The log has one line a minute of those that are closed."""
        too_many = address not in self.proxies and self.by_address[address] >= -(-self.most // 2)
        if not too_many and self.by_address.total() < self.most:
            self.by_address[address] += 1
            return True
        self._refused += 1
        self._log_closed(address)
        if not self._close_one(address if too_many else max(self.by_address, key=self.by_address.__getitem__)):
            return False
        self.by_address[address] += 1
        return True

    def _close_one(self, address: str) -> bool:
        """Close a connection of an address that nobody misses; False if there is none."""
        for transports in (self.idle, self.unread):
            found = next((transport for transport, at in transports.items() if at == address), None)
            if found is not None:
                del transports[found]
                # What is in our buffer may never be read, and until then it would not be closed.
                found.abort() if found.get_write_buffer_size() else found.close()
                return True
        return False

    def _log_closed(self, address: str) -> None:
        if time.monotonic() - self._last_logged >= LOG_SECONDS:
            many = f"{self.by_address.total()} HTTP connections are open, {self.by_address[address]} from {address}"
            log.warning("%s: %d were closed since the last such message", many, self._refused)
            self._last_logged, self._refused = time.monotonic(), 0

    def give_back(self, transport: asyncio.Transport, address: str) -> None:
        """Count a connection that is closed."""
        self.idle.pop(transport, None)
        self.unread.pop(transport, None)
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's connection, closed at once if it is one too many, and later if its request does not come.

    It is closed as well where more than MOST_HEAD bytes come that are no body, which the parser would gather.
    """

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._counted = connections
        self._address = ""
        self._patience: asyncio.TimerHandle | None = None
        self._is_here = False  # whether all of the latest request is
        self._head = 0  # bytes since the last one of a body or of a request

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        address = str((transport.get_extra_info("peername") or ("",))[0])
        if not self._counted.take(address):
            transport.abort()
            return
        self._address = address
        self._counted.idle[transport] = address
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_expecting()
        if self._address:
            self._counted.give_back(self.transport, self._address)

    def data_received(self, data: bytes) -> None:
        self._expect()
        self._head += len(data)
        super().data_received(data)
        if self._head > MOST_HEAD:
            self.transport.abort()
        if self._is_here:
            self._stop_expecting()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_here = False

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._head = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_here, self._head = True, 0
        self._counted.idle.pop(self.transport, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:  # no other request runs
            self._counted.idle[self.transport] = self._address

    def pause_writing(self) -> None:
        super().pause_writing()
        self._counted.unread[self.transport] = self._address

    def resume_writing(self) -> None:
        super().resume_writing()
        self._counted.unread.pop(self.transport, None)

    def _expect(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self._counted.receive_seconds, self.transport.abort)

    def _stop_expecting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
