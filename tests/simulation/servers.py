"""The server's end of simulated gRPC: the part of `grpc.aio.server` that the product uses."""

import asyncio
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import grpc

from tests.simulation.network import CUT, FINISHED, Line, Network, Status
from tests.simulation.process import Process, current_process

UNIMPLEMENTED: Status = (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


class Aborted(Exception):
    """Raised by `abort`, through the method that calls it."""


class CallDetails(NamedTuple):
    """A call as interceptors see it."""

    method: str
    invocation_metadata: Any


class Server:
    """A server of the process that makes it."""

    def __init__(self, network: Network, interceptors: Sequence[Any] = (), **_: Any) -> None:
        process = current_process()
        assert process is not None, "servers are made by processes"
        self.process: Process = process
        self._network, self._interceptors = network, list(interceptors)
        self._handlers: dict[str, Any] = {}
        self._address = ""
        self._calls: dict[int, asyncio.Task[None]] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Do nothing: add_registered_method_handlers gets the same handlers."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers |= {f"/{service}/{method}": handler for method, handler in handlers.items()}

    def add_insecure_port(self, address: str) -> int:
        self._address = address
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        if self.process.alive:
            self._network.listen(self._address, self)

    async def stop(self, grace: float | None) -> None:
        """Take no more calls, and end running ones after `grace` seconds."""
        self._network.close(self._address, self)
        if self._calls and grace:
            await asyncio.wait(list(self._calls.values()), timeout=grace)
        for task in list(self._calls.values()):
            task.cancel()

    def accept(self, line: Line) -> None:
        loop = self._network.loop
        loop.call_at(loop.time(), self._begin, line, context=self.process.context.copy())

    def _begin(self, line: Line) -> None:
        if not line.is_open:
            return
        task = asyncio.get_running_loop().create_task(self._serve(line), name=line.method)
        self._calls[line.number] = task
        line.on_departure = partial(self._depart, task)

    def _depart(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            task.cancel()

    async def _serve(self, line: Line) -> None:
        context, status = ServerContext(line), FINISHED
        try:
            handler = await self._find(CallDetails(line.method, line.metadata))
            if handler is None:
                status = UNIMPLEMENTED
            else:
                await _answer(handler, line, context)
        except Aborted:
            status = context.status
        except asyncio.CancelledError:
            status = CUT
        except Exception as error:
            self._network.loop.call_exception_handler({"message": f"{line.method} raised", "exception": error})
            status = (grpc.StatusCode.UNKNOWN, repr(error))
        finally:
            del self._calls[line.number]
            line.end(status)

    async def _find(self, details: CallDetails) -> Any:
        """Return the handler of a call, passed through the interceptors."""

        async def at(index: int, details: CallDetails) -> Any:
            if index == len(self._interceptors):
                return self._handlers.get(details.method)
            return await self._interceptors[index].intercept_service(partial(at, index + 1), details)

        return await at(0, details)


async def _answer(handler: Any, line: Line, context: "ServerContext") -> None:
    context.serialize = handler.response_serializer or bytes
    requests = Requests(line, handler.request_deserializer or bytes)
    request = requests if handler.request_streaming else await anext(requests, None)
    if request is None:
        return
    kinds = {(True, True): "stream_stream", (False, True): "unary_stream", (False, False): "unary_unary"}
    answer = getattr(handler, kinds[handler.request_streaming, handler.response_streaming])(request, context)
    if inspect.isasyncgen(answer):
        async for message in answer:
            await context.write(message)
    elif (message := await answer) is not None:
        await context.write(message)


class Requests:
    """The messages of a call's client, in order."""

    def __init__(self, line: Line, parse: Any) -> None:
        self._line, self._parse = line, parse

    def __aiter__(self) -> "Requests":
        return self

    async def __anext__(self) -> Any:
        data = await self._line.to_server.receive()
        if data is None:
            raise StopAsyncIteration
        return self._parse(data)


class ServerContext:
    """A call as its handler sees it."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.status: Status = FINISHED
        self.serialize: Any = bytes

    async def write(self, message: Any) -> None:
        await self._line.to_client.send(self.serialize(message))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        self.status = (code, details)
        raise Aborted

    def invocation_metadata(self) -> Any:
        return self._line.metadata

    def peer_identities(self) -> None:
        """Return None: nobody shows a certificate."""

    def peer(self) -> str:
        client = self._line.client
        return f"{client.name if client else 'a client'}:1"
