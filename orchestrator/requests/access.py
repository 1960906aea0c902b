"""Who may use the client endpoints, over HTTP as over gRPC, and what a launch shows to its own services."""

from collections.abc import Awaitable, Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import grpc
from starlette.responses import JSONResponse

from orchestrator.api.answers import error_body, error_headers
from orchestrator.api.http_requests import RequestId
from orchestrator.requests.callers import Callers
from orchestrator.requests.keys import read_keys
from orchestrator.requests.proxies import Proxies
from orchestrator.sessions.served_models import ServedModels
from specahead.config import Config
from specahead.config.access import ClientAccess, is_loopback, split_list
from specahead.wire.access import PeerAccess, bearer_of, read_peer_access
from specahead.wire.errors import InvalidArgument, ServiceError
from specahead.wire.tls import Tls, read_tls

Asgi = Callable[[Any, Any, Any], Awaitable[None]]

OPEN = ("/live", "/ready", "/health", "/dashboard")  # the last is a page that knows nothing itself


@dataclass(frozen=True)
class Access:
    """All that a launch knows of who may enter where."""

    peers: PeerAccess
    callers: Callers
    client_tls: Tls | None
    proxies: Proxies = field(default_factory=Proxies)

    def locate_call(self, context: grpc.aio.ServicerContext, refusal: ServiceError | None) -> None:
        """Tell the callers where a call over gRPC comes from. Raises what `Callers.locate` raises."""
        # A peer is ipv4:127.0.0.1:1234, or ipv6:%5B::1%5D:1234.
        peer = context.peer().partition(":")[2].rpartition(":")[0].removeprefix("%5B").removesuffix("%5D")
        headers = [(name, str(value)) for name, value in context.invocation_metadata() or ()]
        self.callers.locate(self.proxies.client_of(peer, headers), refusal)


class Misdirected(InvalidArgument):
    """A request for another host than this one."""

    http_code, code = 421, "misdirected_request"


def read_access(config: Config) -> Access:
    """Read tokens, keys and certificates. Raises SettingsError for what cannot be used."""
    clients = config.clients
    return Access(
        read_peer_access(config.target),
        Callers(read_keys(clients)),
        read_tls(clients.tls.cert, clients.tls.key),
        Proxies(clients.http.trusted_proxies),
    )


def open_paths(clients: ClientAccess) -> tuple[str, ...]:
    """Return the paths that are answered without a key."""
    return (*OPEN, "/metrics") if clients.http.open_metrics else OPEN


def hosts_of(host: str, allowed: str) -> tuple[str, ...] | None:
    """Return the names beside loopback's own by which an HTTP port may be called; None: by any.

    On loopback a web page could otherwise read answers from a browser on this machine, by having its own name lead here
    (DNS rebinding). host: what the port binds. allowed: the setting `allowed_hosts`.
    """
    names = tuple(name.lower() for name in split_list(allowed))
    return None if "*" in names or not is_loopback(host) else names


def _check_host(headers: list[tuple[str, str]], hosts: Collection[str] | None) -> None:
    """Raise Misdirected for a request whose Host header names neither this machine nor one of `hosts`."""
    if hosts is None:
        return
    for given in [value for name, value in headers if name == "host"]:
        try:
            name = (urlsplit(f"//{given}").hostname or "").rstrip(".")
        except ValueError:
            name = ""
        if not is_loopback(name) and name not in hosts:
            raise Misdirected(
                f"the Host header is {given[:80]!r}, and this port on loopback answers to localhost and loopback "
                'addresses; start the server with --http \'{"allowed_hosts": "NAME"}\' to allow another name'
            )


def guard_http(
    app: Asgi,
    callers: Callers,
    open_to_all: Collection[str],
    models: ServedModels,
    proxies: Proxies,
    hosts: Collection[str] | None = None,
) -> Asgi:
    """Wrap an ASGI application: requests for other paths need a key, and those that generate count against its limits.

    Those that every target would refuse are refused here, before they are parsed, so that refusing many costs those
    that run little. Whoever is not let in is told why, and so is the observer of the models. Every request gets an id.
    hosts: as of `hosts_of`.
    """

    def enter(scope: Any, headers: list[tuple[str, str]], entered: ExitStack) -> None:
        """Count a request until `entered` ends. Raises ServiceError if it is not let in."""
        _check_host(headers, hosts)
        if scope["path"] in open_to_all:
            return
        address = proxies.client_of((scope.get("client") or ("",))[0], headers)
        try:
            caller = callers.admit(bearer_of(dict(headers).get("authorization", "")))
        except ServiceError as error:
            callers.locate(address, error)
            raise
        callers.locate(address)
        if scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            entered.enter_context(caller.request())
            models.check_room()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        models.observer.follow(headers)
        with ExitStack() as entered:
            try:
                enter(scope, headers, entered)
            except ServiceError as error:
                models.observer.report(error, request=scope["state"]["request_id"])
                while (await receive()).get("more_body"):  # a client may not look for an answer before it has sent all
                    pass
                response = JSONResponse(error_body(error), error.http_code, error_headers(error))
                return await response(scope, receive, send)
            await app(scope, receive, send)

    return RequestId(answer)
