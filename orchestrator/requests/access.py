"""Who may use the client endpoints, over HTTP and gRPC, from which address, and what a launch shows to its services."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network

import grpc
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from orchestrator.requests.callers import Callers
from orchestrator.requests.keys import read_keys
from specahead.config import Config
from specahead.config.access import split_list
from specahead.wire.access import PeerAccess, read_peer_access
from specahead.wire.tls import Tls, read_tls

_LONGEST_ADDRESS = 64  # characters that are kept of an address that a proxy reports


class Proxies:
    """The proxies whose X-Forwarded-For header is believed."""

    def __init__(self, addresses: str = "") -> None:
        """addresses: those of proxies and of their networks, separated by commas."""
        # uvicorn's rules: the client is the last address in the header that is not a trusted proxy itself.
        self._trusted = ProxyHeadersMiddleware(None, split_list(addresses)).trusted_hosts  # type: ignore[arg-type]

    def __contains__(self, address: str) -> bool:
        return address in self._trusted

    def client_of(self, peer: str, headers: Iterable[tuple[str, str]]) -> str:
        """Return the address of the client, or its network: one client has all IPv6 addresses of a /64.

        peer: the address at the other end of the connection. headers: of the request, with names in lower case.
        """
        peer = peer.removeprefix("::ffff:")  # IPv4 on a port that binds IPv6
        if peer in self._trusted:
            forwarded = ", ".join(value for name, value in headers if name == "x-forwarded-for")
            peer = self._trusted.get_trusted_client_address(forwarded)[0] or peer
        try:
            parsed = ip_address(peer)
        except ValueError:
            return peer[:_LONGEST_ADDRESS]
        if isinstance(parsed, IPv6Address):
            return str(parsed.ipv4_mapped or ip_network((parsed.packed[:8] + bytes(8), 64)))
        return str(parsed)


@dataclass(frozen=True)
class Access:
    """Everything a launch knows about who may enter where."""

    peers: PeerAccess
    callers: Callers
    client_tls: Tls | None
    proxies: Proxies = field(default_factory=Proxies)

    def locate_call(self, context: grpc.aio.ServicerContext) -> None:
        """Tell the callers the address of a call over gRPC."""
        # A peer is ipv4:127.0.0.1:1234, or ipv6:%5B::1%5D:1234.
        peer = context.peer().partition(":")[2].rpartition(":")[0].removeprefix("%5B").removesuffix("%5D")
        headers = [(name, str(value)) for name, value in context.invocation_metadata() or ()]
        self.callers.locate(self.proxies.client_of(peer, headers))


def read_access(config: Config) -> Access:
    """Read tokens, keys and certificates. Raises SettingsError if one of them cannot be used."""
    clients = config.clients
    return Access(
        read_peer_access(config.target),
        Callers(read_keys(clients)),
        read_tls(clients.tls.cert, clients.tls.key),
        Proxies(clients.http.trusted_proxies),
    )
