"""The HTTP server: uvicorn with limits of its own on connections.

uvicorn does not limit how many connections one address has, how long a request takes to arrive, and how long its head
is; and beyond its limit of connections it refuses requests, while idle connections stay open.
"""

import asyncio
import contextlib
import logging
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from orchestrator.requests.access import Proxies
from specahead.config.logs import FrequentWarnings
from specahead.wire.tls import Tls

OTHER_FILES = 256  # that the process may want to open beside connections
MOST_HEAD = 64 << 10  # bytes of a request's line and headers


class Connections:
    """The connections that are open.

    A new connection beyond the limits takes the place of the one that has waited longest among those without a request
    or, if there is none, among those whose client does not read its answer: of the same address, or of the address
    with the most connections. If there is no such connection either, the new one is closed.
    """

    def __init__(self, most: int, receive_seconds: float = 30.0, proxies: Proxies | None = None) -> None:
        """most: connections in all; one address may have half of them, and a trusted proxy all.

        receive_seconds: in which a request must arrive.
        """
        self.most, self.receive_seconds = most, receive_seconds
        self.by_address: Counter[str] = Counter()
        self.idle: dict[asyncio.Transport, str] = {}  # without a request, by address
        self.unread: dict[asyncio.Transport, str] = {}  # whose client does not read
        self._proxies = proxies or Proxies()
        self._warnings = FrequentWarnings(logging.getLogger(__name__))

    @staticmethod
    def within_open_files(most: int, proxies: Proxies) -> "Connections":
        """Return limits of at most `most` connections that leave the process the files that it needs itself."""
        allowed = max(2, min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES))
        return Connections(allowed, proxies=proxies)

    def take(self, address: str) -> bool:
        """Count a new connection; return False if it has to be closed."""
        too_many = address not in self._proxies and self.by_address[address] >= -(-self.most // 2)
        if too_many or self.by_address.total() >= self.most:
            fields = {"open": self.by_address.total(), "address": address, "from_address": self.by_address[address]}
            self._warnings.warn("too many HTTP connections are open; one is closed", "", fields)
            if not self._close_one(address if too_many else max(self.by_address, key=self.by_address.__getitem__)):
                return False
        self.by_address[address] += 1
        return True

    def _close_one(self, address: str) -> bool:
        """Close a waiting connection of an address; return False if there is none."""
        for transports in (self.idle, self.unread):
            found = next((transport for transport, at in transports.items() if at == address), None)
            if found is not None:
                del transports[found]
                # close() would wait until the client has read the rest of our buffer.
                found.abort() if found.get_write_buffer_size() else found.close()
                return True
        return False

    def give_back(self, transport: asyncio.Transport, address: str) -> None:
        """Count a connection that is closed."""
        self.idle.pop(transport, None)
        self.unread.pop(transport, None)
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's connection within the limits of `Connections`.

    It is closed when a request takes too long to arrive, and after more than MOST_HEAD bytes that belong to no body,
    which the parser would gather.
    """

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._counted = connections
        self._address = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._has_arrived = False  # all of the latest request
        self._head = 0  # bytes since the last one of a body or of a request

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        address = str((transport.get_extra_info("peername") or ("",))[0])
        if not self._counted.take(address):
            transport.abort()
            return
        self._address = address
        self._counted.idle[transport] = address
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_deadline()
        if self._address:
            self._counted.give_back(self.transport, self._address)

    def data_received(self, data: bytes) -> None:
        self._start_deadline()
        self._head += len(data)
        super().data_received(data)
        if self._head > MOST_HEAD:
            self.transport.abort()
        if self._has_arrived:
            self._stop_deadline()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_arrived = False

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._head = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._has_arrived, self._head = True, 0
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

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._counted.receive_seconds, self.transport.abort)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _EmbeddedServer(uvicorn.Server):
    """A server in a running event loop. The launch handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def serve_http(
    app: ASGIApp, host: str, port: int, connections: Connections, tls: Tls | None = None
) -> AsyncIterator[str]:
    """Listen on host:port (0: any free port) while the context lasts, and yield the address.

    connections: their limits. tls: the port's certificate, None for plain text. Raises OSError with an address that
    cannot be bound.
    """
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    config = uvicorn.Config(
        app,
        http=partial(LimitedProtocol, connections),  # type: ignore[arg-type]  # any function that makes a protocol
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,  # orchestrator.requests.access finds the client's address, for gRPC as well
        lifespan="off",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,
    )
    config.load()
    config.ssl = tls.server_context() if tls else None
    server = _EmbeddedServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"{'https' if tls else 'http'}://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
