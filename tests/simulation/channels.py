"""The client's end of simulated gRPC: the part of `grpc.aio.insecure_channel` that the product uses."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import Any, Self

import grpc

from tests.simulation.network import Network, Status

CANCELLED: Status = (grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
EXPIRED: Status = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


class Channel:
    """A channel to an address. Stubs ask it for callables by the kind of a method."""

    def __init__(self, network: Network, address: str) -> None:
        self._network, self._address = network, address
        self._calls: list[Call] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()

    async def channel_ready(self) -> None:
        """Return once the address can be reached."""
        while not self._network.reachable(self._address):
            await asyncio.sleep(0.1)

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return partial(self._call, method, request_serializer, response_deserializer)

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(request: Any, **options: Any) -> Call:
            call = self._call(method, request_serializer, response_deserializer, **options)
            call.start(request)
            return call

        return start

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return self.unary_stream(method, request_serializer, response_deserializer)

    def _call(
        self,
        method: str,
        serialize: Callable[[Any], bytes],
        parse: Callable[[bytes], Any],
        timeout: float | None = None,
        metadata: Any = (),
    ) -> "Call":
        call = Call(self._network, self._address, method, serialize, parse, timeout, metadata)
        self._calls = [other for other in self._calls if not other.done()]
        self._calls.append(call)
        return call


class Call:
    """A call of any kind: callers write to it, read from it, iterate over it, or await its only response."""

    def __init__(
        self,
        network: Network,
        address: str,
        method: str,
        serialize: Callable[[Any], bytes],
        parse: Callable[[bytes], Any],
        timeout: float | None,
        metadata: Any,
    ) -> None:
        self._line = network.dial(address, method, metadata)
        self._serialize, self._parse = serialize, parse
        self._own_status: Status | None = None
        self._sender: asyncio.Task[None] | None = None
        self._timer = None if timeout is None else network.loop.call_later(timeout, self._give_up, EXPIRED)

    def start(self, request: Any) -> None:
        """Send the only request."""
        self._sender = asyncio.get_running_loop().create_task(self._line.to_server.send(self._serialize(request)))

    def _status(self) -> Status | None:
        return self._own_status or self._line.to_client.status

    def done(self) -> bool:
        return self._status() is not None

    def cancel(self) -> bool:
        return self._give_up(CANCELLED)

    def _give_up(self, status: Status) -> bool:
        """End the call from this side."""
        if self.done():
            return False
        self._own_status = status
        self._line.to_client._end(status)
        self._line.cancel()
        return True

    async def write(self, request: Any) -> None:
        if self.done():
            self._raise_for_status()
        try:
            await self._line.to_server.send(self._serialize(request))
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def read(self) -> Any:
        """Return the next message, or EOF at the end. Raises AioRpcError if the status is an error."""
        try:
            data = None if self._own_status is not None else await self._line.to_client.receive()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if data is not None and self._own_status is None:
            return self._parse(data)
        if self._timer is not None:
            self._timer.cancel()
        self._raise_for_status()
        return grpc.aio.EOF

    def _raise_for_status(self) -> None:
        status = self._status()
        if status is CANCELLED:
            raise asyncio.CancelledError
        if status is not None and status[0] is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(status[0], details=status[1])

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    async def _only(self) -> Any:
        message = await self.read()
        if await self.read() is not grpc.aio.EOF:
            raise AssertionError("a method with one response gave several")
        return message
