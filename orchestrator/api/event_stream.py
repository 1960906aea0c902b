"""Answers as server-sent events, with comments while there are no events."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from orchestrator.api.answers import Answer, Event
from orchestrator.sessions.generation import Chunk
from specahead.wire.errors import ServiceError
from specahead.wire.tasks import end_tasks

_REFUSAL_SECONDS = 0.25  # that the status line waits, so that an early refusal gets its HTTP code
KEEP_ALIVE_SECONDS = 5.0
T = TypeVar("T")


class EventStream(StreamingResponse):
    """An answer as server-sent events. The request ends with it, also if the client leaves before the first event."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, first: asyncio.Future[Chunk | None], chunks: AsyncGenerator[Chunk]) -> None:
        """first: the future of the first chunk. chunks: the others."""
        self._first, self._chunks, self._events = first, chunks, _events(answer, first, chunks)
        super().__init__(self._events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await end_tasks(self._first)
            await self._chunks.aclose()


async def open_stream(answer: Answer, chunks: AsyncGenerator[Chunk]) -> EventStream:
    """Return the response that streams an answer. Raises ServiceError if the request is refused at once."""
    first = asyncio.ensure_future(anext(chunks, None))
    try:
        await asyncio.wait({first}, timeout=_REFUSAL_SECONDS)
        if first.done():
            first.result()
    except BaseException:
        await end_tasks(first)
        await chunks.aclose()
        raise
    return EventStream(answer, first, chunks)


async def _events(
    answer: Answer, pending: asyncio.Future[Chunk | None], chunks: AsyncGenerator[Chunk]
) -> AsyncGenerator[str]:
    """Yield the events of an answer, and comments while there are none. pending: the future of the first chunk."""
    now, opened, chunk = asyncio.get_running_loop().time, False, None
    due = now()  # the time of the next comment
    try:
        while chunk is not None or not opened:
            await asyncio.wait({pending}, timeout=max(0.0, due - now()))
            events: list[Event] = []
            if pending.done():
                chunk = pending.result()
                events = [] if opened else answer.opening()
                events += answer.closing() if chunk is None else answer.add(chunk)
                opened = True
                pending = asyncio.ensure_future(anext(chunks, None))
            for event in events:
                yield _event_text(event)
            if not events and now() >= due:
                yield ": nothing to show yet\n\n"
            if events or now() >= due:
                due = now() + KEEP_ALIVE_SECONDS
    except ServiceError as error:
        yield _event_text(answer.failure(error))
    finally:
        await end_tasks(pending)
    yield answer.final_event


def _event_text(data: Event) -> str:
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def unless_left(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of work; if the client leaves, cancel the work and return None."""
    working: asyncio.Future[T] = asyncio.ensure_future(work)
    leaving: asyncio.Future[Any] = asyncio.ensure_future(request.receive())  # after the body, only the client's leaving
    tasks: list[asyncio.Future[Any]] = [working, leaving]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await end_tasks(*tasks)
