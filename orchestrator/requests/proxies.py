"""From which address a client calls, also where a proxy stands between it and us."""

from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address, ip_network

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from specahead.config.access import split_list

_LONGEST_ADDRESS = 64  # characters that are kept of what a proxy says


class Proxies:
    """The proxies whose X-Forwarded-For is believed. addresses: theirs and those of networks, separated by commas."""

    def __init__(self, addresses: str = "") -> None:
        # uvicorn's rules: the client is the last address in the header that is not a trusted proxy itself.
        self._trusted = ProxyHeadersMiddleware(None, split_list(addresses)).trusted_hosts  # type: ignore[arg-type]

    def __contains__(self, address: str) -> bool:
        return address in self._trusted

    def client_of(self, peer: str, headers: Iterable[tuple[str, str]]) -> str:
        """Return the address of who calls, or of its network.

        An IPv6 address stands for its /64, since one client has all addresses in it. peer: the address at the other end
        of the connection. headers: those of the request, names in lower case.
        """
        peer = peer.removeprefix("::ffff:")  # IPv4, met on a port that binds IPv6
        if peer not in self._trusted:
            return _share_of(peer)
        said = ", ".join(value for name, value in headers if name == "x-forwarded-for")
        return _share_of(self._trusted.get_trusted_client_address(said)[0] or peer)


def _share_of(address: str) -> str:
    try:
        parsed = ip_address(address)
    except ValueError:
        return address[:_LONGEST_ADDRESS]
    if isinstance(parsed, IPv6Address):
        return str(parsed.ipv4_mapped or ip_network((parsed.packed[:8] + bytes(8), 64)))
    return str(parsed)
