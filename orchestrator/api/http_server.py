"""The HTTP server: uvicorn with limits on connections.

uvicorn itself limits neither the connections of one address, nor how long a request takes to arrive or an answer to be
read, nor the length of a request's head.
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
    """Counts the open connections by address, and refuses new ones beyond the limits."""

    def __init__(self, most: int, patience: float = 30.0, proxies: Proxies | None = None) -> None:
        """most: connections in all; one address may have half of them, and a trusted proxy all.

        patience: seconds in which a request must arrive, and in which a client must read what was sent.
        """
        self.most, self.patience = most, patience
        self.by_address: Counter[str] = Counter()
        self._proxies = proxies or Proxies()
        self._warnings = FrequentWarnings(logging.getLogger(__name__))

    @staticmethod
    def within_open_files(most: int, proxies: Proxies) -> "Connections":
        """Return limits of at most `most` connections that leave the process the files that it needs itself."""
        allowed = max(2, min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES))
        return Connections(allowed, proxies=proxies)

    def take(self, address: str) -> bool:
        """Count a new connection; return False if it has to be closed."""
        here, all_open = self.by_address[address], self.by_address.total()
        if all_open >= self.most or (address not in self._proxies and here >= -(-self.most // 2)):
            fields = {"open": all_open, "address": address, "from_address": here}
            self._warnings.warn("too many HTTP connections are open; a new one is closed", "", fields)
            return False
        self.by_address[address] += 1
        return True

    def give_back(self, address: str) -> None:
        """Count a connection that is closed."""
        self.by_address -= Counter([address])  # forgets addresses without connections


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's connection within the limits of `Connections`.

    It is closed when it waits too long for its client, and after more than MOST_HEAD bytes that belong to no body,
    which the parser would gather.
    """

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._connections = connections
        self._address = ""
        self._deadline: asyncio.TimerHandle | None = None  # runs while the client has to send or to read
        self._has_arrived = False  # all of the latest request
        self._head = 0  # bytes since the last one of a body or of a request

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        address = str((transport.get_extra_info("peername") or ("",))[0])
        if self._connections.take(address):
            self._address = address
            self._start_deadline()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_deadline(closed=True)
        if self._address:
            self._connections.give_back(self._address)

    def data_received(self, data: bytes) -> None:
        self._start_deadline()
        self._head += len(data)
        super().data_received(data)
        if self._head > MOST_HEAD:
            self.transport.abort()
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

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_deadline()

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._connections.patience, self.transport.abort)

    def _stop_deadline(self, closed: bool = False) -> None:
        """Stop the clock, unless the client still has to send the rest of a request, or to read."""
        waits = not self._has_arrived or self.flow.write_paused
        if self._deadline is not None and (closed or not waits):
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
