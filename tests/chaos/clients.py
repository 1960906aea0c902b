"""Clients that take little processor time, since they share the machine with the services: HTTP written by hand over
connections that are used again, as in the pools of client libraries.
"""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 60
_STATUS = slice(9, 12)  # bytes of an answer


@dataclass(frozen=True)
class Answer:
    """An answer.

    number: of the request. status: the HTTP status, 0 if the answer is not whole. first: seconds to the first event of
    a stream, or to the end of another answer. content: all bytes of a stream.
    """

    number: int
    status: int
    first: float
    content: bytes = b""


class Clients:
    """Sends requests, each over an idle or a new connection. make_request: returns the bytes of a numbered request."""

    def __init__(self, http: str, make_request: Callable[[int], bytes]) -> None:
        self._host, self._port = str(urlsplit(http).hostname), urlsplit(http).port
        self._make_request = make_request
        self._idle: list[_Line] = []
        self._asked = 0

    async def ask(self) -> Answer:
        """Send the next request and return its answer."""
        self._asked += 1
        number, request, start = self._asked, self._make_request(self._asked), time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                if self._idle:
                    line = self._idle.pop(0)  # in turn, because the gateway closes connections that stay idle
                else:
                    _, line = await asyncio.get_running_loop().create_connection(_Line, self._host, self._port)
                status, first = await line.ask(request)
        except OSError:  # a timeout is an OSError too
            return Answer(number, 0, time.monotonic() - start)
        self._idle.append(line)
        return Answer(number, status, first - start, line.take() if status == 200 else b"")

    async def leave(self) -> None:
        """Close the connections, and give the gateway time to notice."""
        for line in self._idle:
            line.close()
        self._idle.clear()
        await asyncio.sleep(0.5)


class _Line(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self._came, self._first = bytearray(), 0.0
        self._status: asyncio.Future[int] = asyncio.Future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._status.done():
            self._status.set_exception(ConnectionResetError())

    def data_received(self, data: bytes) -> None:
        self._came += data
        if self._came[_STATUS] == b"200":
            if not self._first and b"data: {" in self._came:  # comments may come first
                self._first = time.monotonic()
            ended = self._came.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            ended = self._has_all()
        if ended and not self._status.done():
            self._status.set_result(int(self._came[_STATUS]))

    def _has_all(self) -> bool:
        head, end, body = self._came.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        return end != b"" and len(body) == (int(length[1]) if length else 0)

    async def ask(self, request: bytes) -> tuple[int, float]:
        """Return the status of a whole answer and the time of its first event. Raises OSError."""
        self._came, self._first, self._status = bytearray(), 0.0, asyncio.Future()
        self._transport.write(request)
        return await self._status, self._first or time.monotonic()

    def take(self) -> bytes:
        """Return all bytes of the last answer."""
        return bytes(self._came)

    def close(self) -> None:
        self._transport.close()
