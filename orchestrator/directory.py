"""Where the services are: one part of a process learns it (from its settings, or from Ray), others look it up."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType


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
        """Wait for the next change. What changed before the call is not waited for: look first, then wait."""
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
