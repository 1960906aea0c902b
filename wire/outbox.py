"""Events waiting to be written to a stream; whatever has gathered goes out as one frame."""

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

Event = TypeVar("Event")


class Outbox(Generic[Event]):
    """Put from the event loop; iterate once to get the batches. After close() the iteration ends."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._events:
                events, self._events = self._events, []
                yield events
            if self._closed and not self._events:
                return
