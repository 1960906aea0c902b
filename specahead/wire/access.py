"""Who may call a gRPC port, and how a caller proves it: by a bearer token in the metadata, over TLS."""

import contextlib
import hmac
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from specahead.config.access import ServiceAccess
from specahead.config.logs import FrequentWarnings
from specahead.wire.errors import ResourceExhausted, ServiceError, Unauthenticated
from specahead.wire.options import OPTIONS
from specahead.wire.tls import Tls, read_tls

log = logging.getLogger(__name__)

# Takes a call's bearer token, "" if it has none; raises ServiceError to refuse the call.
Authorize = Callable[[str], object]
Metadata = tuple[tuple[str, str], ...]


def bearer_of(value: str) -> str:
    """Return the token of an `authorization` header or metadatum; "" if its scheme is not Bearer."""
    scheme, _, token = value.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _refusal_log() -> Callable[[ServiceError], None]:
    """Return a function that logs a refused call."""
    warnings = FrequentWarnings(log)
    return lambda error: warnings.warn("refused a call", error.code, {"reason": str(error)})


@dataclass(frozen=True)
class Guard:
    """What a port asks of its callers; by default nothing."""

    authorize: Authorize | None = None
    tls: Tls | None = None
    refused: Callable[[ServiceError], None] = field(default_factory=_refusal_log)
    """Called for each refused call."""


OPEN = Guard()


@dataclass(frozen=True)
class PeerAccess:
    """How the services of one deployment know one another; by default, on loopback and in tests, not at all."""

    token: str = field(default="", repr=False)
    tls: Tls | None = None
    tls_name: str = ""
    """The name that a service's certificate must have; empty: the address that is dialled."""

    @property
    def metadata(self) -> Metadata:
        """The metadata of each call to a service."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def dial(self, address: str) -> grpc.aio.Channel:
        """Open a channel to another service of the deployment; calls on it must carry `metadata`."""
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=OPTIONS)
        return grpc.aio.secure_channel(address, self.tls.channel_credentials(), options=_named(self.tls_name))

    def guard(self) -> Guard:
        """Return what a service asks of its callers."""
        return Guard(partial(check_token, self.token) if self.token else None, self.tls)


def open_channel(address: str, tls: Tls | None, tls_name: str = "") -> grpc.Channel:
    """Open a channel for calls that block. tls_name: as in PeerAccess."""
    if tls is None:
        return grpc.insecure_channel(address, OPTIONS)
    return grpc.secure_channel(address, tls.channel_credentials(), _named(tls_name))


def _named(tls_name: str) -> list[tuple[str, Any]]:
    """Return the options of a channel to a peer whose certificate has the name tls_name; "": its address."""
    return [*OPTIONS, *([("grpc.ssl_target_name_override", tls_name)] if tls_name else [])]


def read_peer_access(settings: ServiceAccess) -> PeerAccess:
    """Read token and certificates; raise SettingsError for a file that cannot be used."""
    of_services = settings.service_tls
    tls = read_tls(of_services.cert, of_services.key, of_services.ca)
    return PeerAccess(settings.read_token(), tls, of_services.name)


def peer_of(context: grpc.aio.ServicerContext) -> str:
    """Return who calls: the names in its certificate if it has shown one, else its address."""
    if names := context.peer_identities():
        return ", ".join(sorted(name.decode(errors="replace") for name in names))
    return str(context.peer()).rpartition(":")[0]  # without the port, which differs for each connection


class PeerStreams:
    """Counts the streams of each peer, which may hold `most` of them. Used from one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def held_by(self, peer: str) -> Iterator[None]:
        """Count a stream while the context lasts. Raises ResourceExhausted if the peer holds as many as it may."""
        if self._held[peer] >= self._most:
            raise ResourceExhausted(f"{peer} holds {self._most} streams here, as many as a peer may")
        self._held[peer] += 1
        try:
            yield
        finally:
            self._held -= Counter([peer])  # forgets who holds none


def check_token(expected: str, given: str) -> None:
    """Raise Unauthenticated unless the tokens are equal; the time taken does not show where they differ."""
    if not given:
        raise Unauthenticated("this port asks for the token of its deployment (service_token), and none was sent")
    if not hmac.compare_digest(expected.encode(), given.encode()):
        raise Unauthenticated("the token is not that of this deployment (service_token)")


class RequireBearer(grpc.aio.ServerInterceptor):
    """Refuses the calls that a guard refuses, before any of their messages is read. Health is open, for probes."""

    def __init__(self, guard: Guard) -> None:
        assert guard.authorize is not None
        self._authorize, self._refused = guard.authorize, guard.refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return the method's handler, or one that refuses."""
        if handler_call_details.method.startswith("/grpc.health.v1.Health/"):
            return await continuation(handler_call_details)
        given = [value for key, value in handler_call_details.invocation_metadata if key == "authorization"]
        try:
            self._authorize(bearer_of(str(given[0])) if given else "")
        except ServiceError as error:
            # As a stream whatever the method is: such a handler runs before the first message is there.
            return grpc.stream_stream_rpc_method_handler(partial(self._refuse, error))
        return await continuation(handler_call_details)

    async def _refuse(self, error: ServiceError, requests: Any, context: grpc.aio.ServicerContext) -> None:
        self._refused(error)
        await context.abort(error.status, str(error))
