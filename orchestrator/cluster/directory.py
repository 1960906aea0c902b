"""The addresses of services: one part of a process stores them (from its settings or from Ray), others read them."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

SIDES = "target", "draft"


def name_services(side: str, count: int) -> list[str]:
    """Return the names of the services of a side: the side itself for one service, else numbers from 1 (`target-1`)."""
    return [side] if count == 1 else [f"{side}-{number}" for number in range(1, count + 1)]


def side_of(name: str) -> str:
    """Return the side of a service that `name_services` has named."""
    return name.partition("-")[0]


class Directory:
    """Addresses (HOST:PORT) of services of one side by name. A service that was restarted elsewhere keeps its name.

    Used from one event loop.
    """

    def __init__(self, addresses: Mapping[str, str] | None = None) -> None:
        self._addresses = dict(addresses or {})
        self._changed = asyncio.Event()

    @property
    def addresses(self) -> Mapping[str, str]:
        """All services there are at the moment."""
        return MappingProxyType(self._addresses)

    def put(self, name: str, address: str) -> None:
        """Add a service, or say that it is at another address now."""
        if self._addresses.get(name) != address:
            self._addresses[name] = address
            self._tell()

    def remove(self, name: str) -> None:
        """Forget a service: it is gone for good. Raises KeyError if there is none of that name."""
        del self._addresses[name]
        self._tell()

    async def changed(self) -> None:
        """Wait for the next change after the call: read `addresses` first, then wait."""
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
