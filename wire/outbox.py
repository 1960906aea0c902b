"""Events waiting to be written to a stream; whatever has gathered goes out as one frame."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

from wire.errors import ResourceExhausted

Event = TypeVar("Event")

MOST_EVENTS = 1 << 17


class Outbox(Generic[Event]):
    """Put from the event loop; iterate once to get the batches, without end.

    most_tokens: how many tokens of events may wait, of a peer that need not be honest. A peer that lets more gather, or
    MOST_EVENTS events, does not read what it is sent; then all of it is dropped.
    """

    def __init__(self, most_tokens: float = float("inf")) -> None:
        self._most_tokens = most_tokens
        self._events: list[Event] = []
        self._tokens = 0
        self._filled, self._overflown = asyncio.Event(), asyncio.Event()

    def put(self, event: Event) -> None:
        if self._overflown.is_set():
            return
        self._events.append(event)
        self._tokens += _tokens_in(event)
        self._filled.set()
        if len(self._events) > MOST_EVENTS or self._tokens > self._most_tokens:
            self._events.clear()
            self._overflown.set()

    async def until_overflown(self) -> None:
        """Run until more has gathered than may, then raise ResourceExhausted."""
        await self._overflown.wait()
        raise ResourceExhausted(
            f"the peer does not read: at most {self._most_tokens} tokens in {MOST_EVENTS} events may wait for it"
        )

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        while True:
            await self._filled.wait()
            self._filled.clear()
            events, self._events, self._tokens = self._events, [], 0
            if events:
                yield events


def _tokens_in(event: Any) -> int:
    return len(getattr(event, "tokens", ()))
