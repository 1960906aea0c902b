"""Who may use the client endpoints, over HTTP as over gRPC, and what a launch shows to its own services."""

from collections.abc import Awaitable, Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from config import Config
from config.access import ClientAccess
from orchestrator.answers import error_body, error_headers
from orchestrator.callers import Callers
from orchestrator.http_requests import RequestId
from orchestrator.keys import read_keys
from orchestrator.served_models import ServedModels
from wire.access import PeerAccess, bearer_of, read_peer_access
from wire.errors import ServiceError
from wire.tls import Tls, read_tls

Asgi = Callable[[Any, Any, Any], Awaitable[None]]

OPEN = ("/live", "/ready", "/health", "/dashboard")  # the last is a page that knows nothing itself


@dataclass(frozen=True)
class Access:
    """All that a launch knows of who may enter where."""

    peers: PeerAccess
    callers: Callers
    client_tls: Tls | None


def read_access(config: Config) -> Access:
    """Read tokens, keys and certificates. Raises SettingsError for what cannot be used."""
    clients = config.clients
    return Access(
        read_peer_access(config.target), Callers(read_keys(clients)), read_tls(clients.tls_cert, clients.tls_key)
    )


def open_paths(clients: ClientAccess) -> tuple[str, ...]:
    """Return the paths that are answered without a key."""
    return (*OPEN, "/metrics") if clients.open_metrics else OPEN


def guard_http(app: Asgi, callers: Callers, open_to_all: Collection[str], models: ServedModels) -> Asgi:
    """Wrap an ASGI application: requests for other paths need a key, and those that generate count against its limits.

    Those that every target would refuse are refused here, before they are parsed, so that refusing many costs those
    that run little. Whoever is not let in is told why, and so is the observer of the models. Every request gets an id.
    """

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in open_to_all:
            return await app(scope, receive, send)
        models.observer.follow((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        with ExitStack() as entered:
            try:
                caller = callers.admit(bearer_of(dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")))
                if scope["method"] == "POST" and scope["path"].startswith("/v1/"):
                    entered.enter_context(caller.request())
                    models.check_room()
            except ServiceError as error:
                models.observer.report(error, request=scope["state"]["request_id"])
                while (await receive()).get("more_body"):  # a client may not look for an answer before it has sent all
                    pass
                response = JSONResponse(error_body(error), error.http_code, error_headers(error))
                return await response(scope, receive, send)
            await app(scope, receive, send)

    return RequestId(answer)
