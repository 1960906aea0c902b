"""Limits on HTTP connections: how many there are, in all and of an address, how long a request takes to come, and how
long its head is.
"""

import asyncio
import logging
import resource
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

OTHER_FILES = 256  # that the process may want to open beside connections
LOG_SECONDS = 60.0
MOST_HEAD = 64 << 10  # bytes of a request's line and headers


@dataclass
class Connections:
    """The connections that are open. An address may have half of `most`; a request must come within receive_seconds."""

    most: int
    receive_seconds: float = 30.0
    by_address: Counter[str] = field(default_factory=Counter)
    _last_logged: float = -LOG_SECONDS
    _refused: int = 0

    @staticmethod
    def within_open_files(most: int) -> "Connections":
        """Return limits of at most `most` connections that leave the process the files that it needs itself."""
        return Connections(max(2, min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES)))

    def take(self, address: str) -> bool:
        """Count a connection; False if it is one too many. There is one line in the log a minute of those."""
        if self.by_address.total() < self.most and self.by_address[address] < -(-self.most // 2):
            self.by_address[address] += 1
            return True
        self._refused += 1
        if time.monotonic() - self._last_logged >= LOG_SECONDS:
            many = f"{self.by_address.total()} HTTP connections are open, {self.by_address[address]} from {address}"
            log.warning("%s: %d more were closed since the last such message", many, self._refused)
            self._last_logged, self._refused = time.monotonic(), 0
        return False

    def give_back(self, address: str) -> None:
        """Count a connection that is closed."""
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
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_expecting()
        if self._address:
            self._counted.give_back(self._address)

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

    def _expect(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self._counted.receive_seconds, self.transport.abort)

    def _stop_expecting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
