"""Events that wait to be written to a stream; all that have gathered go out as one frame."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

from specahead.wire.errors import ResourceExhausted

Event = TypeVar("Event")

MOST_EVENTS = 1 << 17
FRAME_TOKENS = 1 << 20  # gRPC limits the size of a message, and all sessions may begin at once


class Outbox(Generic[Event]):
    """Put events from the event loop; iterate once to get them in batches. After close() the iteration ends.

    most_tokens: how many tokens may wait in events for a peer, which need not be honest. If more gather, or more than
    MOST_EVENTS events, the peer does not read its stream, and all of them are dropped.
    """

    def __init__(self, most_tokens: float = float("inf")) -> None:
        self._most_tokens = most_tokens
        self._events: list[Event] = []
        self._tokens = 0
        self._closed = False
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

    def close(self) -> None:
        self._closed = True
        self._filled.set()

    async def until_overflown(self) -> None:
        """Run until more has gathered than is allowed, then raise ResourceExhausted."""
        await self._overflown.wait()
        raise ResourceExhausted(
            f"the peer does not read: at most {self._most_tokens} tokens in {MOST_EVENTS} events may wait for it"
        )

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        while True:
            await self._filled.wait()
            self._filled.clear()
            if self._closed:
                return
            while self._events:
                yield self._take_frame()

    def _take_frame(self) -> list[Event]:
        """Take the oldest events, as many as fit into a message by their tokens, and at least one."""
        if self._tokens <= FRAME_TOKENS:
            frame, self._events, self._tokens = self._events, [], 0
            return frame
        count = tokens = 0
        for event in self._events:
            tokens += _tokens_in(event)
            if count and tokens > FRAME_TOKENS:
                break
            count += 1
        frame, self._events = self._events[:count], self._events[count:]
        self._tokens -= sum(map(_tokens_in, frame))
        return frame


def _tokens_in(event: Any) -> int:
    return len(getattr(event, "tokens", ()))
