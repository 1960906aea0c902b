"""The checks that every HTTP request passes: it gets an id, its host and key are checked, and its body is JSON."""

import secrets
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Send

from orchestrator.api.answers import error_body
from orchestrator.api.messages_answer import PATH, messages_error
from orchestrator.requests.access import Proxies
from orchestrator.requests.callers import Callers
from orchestrator.requests.records import max_body
from orchestrator.requests.requests import MAX_NAME
from orchestrator.sessions.generation import Frontend
from specahead.config.access import ClientAccess, is_loopback, split_list
from specahead.config.garbage import no_garbage_collected
from specahead.wire.access import bearer_of
from specahead.wire.errors import InvalidArgument, ServiceError

Asgi = Callable[[Any, Any, Any], Awaitable[None]]
Headers = list[tuple[str, str]]

OPEN = ("/", "/live", "/ready", "/health", "/dashboard")  # the page of the dashboard holds no data itself
_ENDLESS = ("/dashboard/events",)  # answers that come to no end, so that nobody gets their head alone


class Misdirected(InvalidArgument):
    """A request for another host than this one."""

    http_code, code = 421, "misdirected_request"


class TooLarge(InvalidArgument):
    """A request with a longer body than any prompt within the context needs."""

    http_code, code = 413, "request_too_large"


def open_paths(clients: ClientAccess) -> tuple[str, ...]:
    """Return the paths that are answered without a key."""
    return (*OPEN, "/metrics") if clients.http.open_metrics else OPEN


def hosts_of(host: str, allowed: str) -> tuple[str, ...] | None:
    """Return the names, beside loopback's own, by which a port may be called; None if any name may be used.

    On loopback a web page could otherwise read answers in a browser on this machine by pointing its own name here (DNS
    rebinding). host: the address that the port binds. allowed: the setting `allowed_hosts`.
    """
    names = tuple(name.lower() for name in split_list(allowed))
    return None if "*" in names or not is_loopback(host) else names


def _check_host(headers: Headers, hosts: Collection[str] | None) -> None:
    """Raise Misdirected for a request whose Host header names neither this machine nor one of `hosts`."""
    for given in [value for name, value in headers if name == "host" and hosts is not None]:
        try:
            name = (urlsplit(f"//{given}").hostname or "").rstrip(".")
        except ValueError:
            name = ""
        if not is_loopback(name) and name not in (hosts or ()):
            raise Misdirected(
                f"the Host header is {given[:80]!r}, and this port on loopback answers to localhost and loopback "
                'addresses; start the server with --http \'{"allowed_hosts": "NAME"}\' to allow another name'
            )


def allow_origins(app: Asgi, allowed: str) -> Asgi:
    """Wrap an ASGI application so that web pages of these origins may call it. allowed: the setting of that name."""
    origins = split_list(allowed)
    if not origins:
        return app
    return CORSMiddleware(
        app, origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"], max_age=600
    )


@dataclass(frozen=True)
class GuardedHttp:
    """An ASGI application behind the checks that every request passes.

    Each request gets an id, from its own header or a new one, which its answer repeats. Requests that generate count
    against the key's limits. Those that every target would refuse are refused here, before they are parsed, so that
    many of them cost running requests little. Refusals are answered and reported.
    """

    app: Asgi
    callers: Callers
    open_to_all: Collection[str]
    """The paths that need no key."""
    frontend: Frontend
    proxies: Proxies
    hosts: Collection[str] | None = None
    """The names by which it may be called, as `hosts_of` returns them."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["method"] == "OPTIONS":
            return await Response(status_code=204, headers={"Allow": "GET, HEAD, POST, OPTIONS"})(scope, receive, send)
        if scope["method"] == "HEAD" and scope["path"] not in _ENDLESS:
            scope = scope | {"method": "GET"}  # uvicorn keeps the body back
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        name = scope.setdefault("state", {})["request_id"] = _request_id(headers)
        self.frontend.observer.follow(headers)
        send = _sending_id(name, scope["path"], send)
        with ExitStack() as entered:
            try:
                self._enter(scope, headers, entered)
            except ServiceError as error:
                self.frontend.observer.report(error, request=name)
                # A client may read an answer only after sending all, but nobody waits for a body that is too long.
                while not isinstance(error, TooLarge) and (await receive()).get("more_body"):
                    pass
                response = error_answer(scope["path"], error, error.http_code)
                return await response(scope, receive, send)
            await self.app(scope, receive, send)

    def _enter(self, scope: Any, headers: Headers, entered: ExitStack) -> None:
        """Count a request until `entered` ends. Raises ServiceError if it is refused."""
        _check_host(headers, self.hosts)
        if scope["path"] in self.open_to_all:
            return
        given = dict(headers)
        caller = self.callers.admit(bearer_of(given.get("authorization", "")) or given.get("x-api-key", ""))
        self.callers.locate(self.proxies.client_of((scope.get("client") or ("",))[0], headers))
        length, most = given.get("content-length", ""), max_body(self.frontend.limits)
        if length.isdecimal() and int(length) > most:  # Starlette's limit answers in plain text
            raise TooLarge(f"the body has {length} bytes, and the most for this model's context is {most}")
        if scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            entered.enter_context(caller.request())
            self.frontend.check_room()


def _sending_id(name: str, path: str, send: Send) -> Send:
    """Return what sends the answer to a request at a path, with the request's id in its headers."""

    async def send_with_id(message: Any) -> None:
        if message["type"] == "http.response.start":
            answered = MutableHeaders(scope=message)
            answered["x-request-id"] = name
            if path.startswith(PATH):
                answered["request-id"] = name  # Anthropic's name of it
        await send(message)

    return send_with_id


def error_answer(path: str, error: ServiceError, http_code: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response to a request at a path that ends in an error, in the form of the path's API."""
    body = messages_error(error, http_code) if path.startswith(PATH) else error_body(error)
    later = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    asked = {"WWW-Authenticate": "Bearer"} if error.http_code == 401 else {}
    return JSONResponse(body, http_code, {**(headers or {}), **later, **asked})


def _request_id(headers: Headers) -> str:
    given = dict(headers).get("x-request-id", "")[: MAX_NAME - 20]
    return given if given.isascii() and given.isprintable() and given else secrets.token_hex(12)


class _JSONRequest(Request):
    """A request whose body is JSON without lone surrogates and not nested too deeply, else it is refused with 400."""

    async def json(self) -> Any:
        body = await self.body()
        try:
            with no_garbage_collected():  # which would look at each of a million new objects again and again
                return from_json(body)
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from None


class JSONRoute(APIRoute):
    """A route that takes uncompressed bodies of JSON and refuses others with 415."""

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
                    return Response(status_code=499)  # nobody receives it
                if empty:
                    raise HTTPException(400, "the body is not valid JSON: it is empty")
            return await handle(request)

        return handle_json
