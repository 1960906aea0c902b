"""Answers that come in pieces: server-sent events, with comments while nothing comes."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from orchestrator.answers import Event, error_body
from orchestrator.generation import Chunk
from wire.errors import ServiceError

_REFUSAL_SECONDS = 0.25  # the status line waits so long, so that a refusal still has its HTTP code
KEEP_ALIVE_SECONDS = 5.0
T = TypeVar("T")


class Answer(Protocol):
    """An answer in the making, as its protocol words it. final_event: the text that ends its stream."""

    final_event: str

    def opening(self) -> list[Event]:
        """Return what a stream begins with."""

    def add(self, chunk: Chunk) -> list[Event]:
        """Take a chunk in, and return what a stream says of it."""

    def closing(self) -> list[Event]:
        """Return what a stream says when all choices have ended."""

    def whole(self) -> Event:
        """Return the answer in one piece."""


class EventStream(StreamingResponse):
    """Server-sent events; their generator is closed at once when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def open_stream(answer: Answer, chunks: AsyncGenerator[Chunk]) -> EventStream:
    """Return the response that tells an answer as it comes. Raises ServiceError if it is refused at once."""
    first = asyncio.ensure_future(anext(chunks, None))
    try:
        await asyncio.wait({first}, timeout=_REFUSAL_SECONDS)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await chunks.aclose()
        raise
    return EventStream(_events(answer, first, chunks))


async def _events(
    answer: Answer, pending: asyncio.Future[Chunk | None], chunks: AsyncGenerator[Chunk]
) -> AsyncGenerator[str]:
    """Yield the events of an answer whose first chunk is awaited already, and comments while nothing comes."""
    patience, opened = 0.0, False
    async with aclosing(chunks):
        try:
            while True:
                await asyncio.wait({pending}, timeout=patience)
                patience = KEEP_ALIVE_SECONDS
                if not pending.done():
                    yield ": no tokens yet\n\n"
                    continue
                chunk = pending.result()
                said = [] if opened else answer.opening()
                said += answer.closing() if chunk is None else answer.add(chunk)
                opened = True
                for event in said:
                    yield _event_text(event)
                if chunk is None:
                    break
                pending = asyncio.ensure_future(anext(chunks, None))
        except ServiceError as error:
            yield _event_text(error_body(error))
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
    yield answer.final_event


def _event_text(data: Event) -> str:
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def unless_left(request: Request, work: Awaitable[T]) -> T | None:
    """Return the outcome of some work; None if the client left meanwhile, and the work is cancelled."""
    working: asyncio.Future[T] = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())  # the body is read: what comes next is the client's leaving
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        tasks: list[asyncio.Future[Any]] = [working, leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
