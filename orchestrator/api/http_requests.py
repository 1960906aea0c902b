"""What every HTTP request goes through: its body is JSON and says so, and it has an id."""

import marshal
import secrets
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.api import parse_json
from orchestrator.requests.requests import MAX_NAME
from orchestrator.text.child_process import ask_process
from specahead.config.garbage import no_garbage_collected
from specahead.wire.errors import ServiceError

LARGE = 512 << 10  # bytes of a body that is parsed elsewhere; this process would take some 15 ms
PARSERS = 2  # at once


class _JSONRequest(Request):
    """A request whose body is JSON without lone surrogates and not nested too deeply, else it is refused with 400."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            if len(body) <= LARGE:
                return from_json(body)
            async with self.app.state.parsing:
                return await _parse_elsewhere(body)
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from None


async def _parse_elsewhere(body: bytes) -> Any:
    """Return what JSON says, parsed by another process. Raises ValueError if it is none, ServiceError if that fails."""
    status, out, errors = await ask_process((sys.executable, "-P", parse_json.__file__), body)
    if status:
        reason = errors.decode(errors="replace")
        raise ValueError(reason) if status == parse_json.INVALID else ServiceError(reason[-500:])
    with no_garbage_collected():  # which would look at a million new objects again and again
        return marshal.loads(out)


class JSONRoute(APIRoute):
    """A route that takes bodies of JSON alone, not compressed: any other is refused with 415."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            request = _JSONRequest(request.scope, request.receive)
            if request.method == "POST":
                kind, encoding = request.headers.get("content-type", ""), request.headers.get("content-encoding")
                if kind.partition(";")[0].strip().lower() != "application/json":
                    raise HTTPException(415, f"the body must be application/json; its headers say {kind[:80]!r}")
                if encoding not in (None, "identity"):
                    raise HTTPException(415, f"the body must not be compressed; its headers say {encoding[:80]!r}")
                try:
                    empty = not await request.body()
                except ClientDisconnect:
                    return Response(status_code=499)  # which nobody gets
                if empty:
                    raise HTTPException(400, "the body is not valid JSON: it is empty")
            return await handle(request)

        return handle_json


class RequestId:
    """Gives every request an id, its own header's or a new one, which its answer's headers repeat."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")[: MAX_NAME - 20]
        name = given if given.isascii() and given.isprintable() and given else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = name

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        await self._app(scope, receive, send_with_id)
