"""A stream between two services, at either end: it receives, sends, and notices a peer that hangs.

Both ends send Beat every second from their event loops. A process that is stopped, or whose event loop is blocked,
sends nothing, although its machine still answers for its connections. A model step that hangs blocks no event loop: its
own process ends it (engine/steps/step_loop.py).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import grpc

from specahead.wire.errors import Unavailable
from specahead.wire.messages import Beat
from specahead.wire.outbox import Outbox

BEAT_SECONDS = 1.0
PATIENCE = 8  # beats that may be missed


async def exchange(
    frames: AsyncIterator[Any],
    receive: Callable[[Any], None],
    outbox: Outbox[Any],
    write: Callable[[list[Any]], Awaitable[None]],
    peer: str,
) -> None:
    """Pass a peer's frames to `receive` and the outbox's events to `write`, until the peer ends its stream.

    Raises what these raise, Unavailable naming the peer if it hangs, and ResourceExhausted if it does not read.
    """
    listener = Listener(peer)

    async def read() -> None:
        async for frame in frames:
            listener.heard()
            receive(frame)

    async def send() -> None:
        async for events in outbox:
            await write(events)

    sender = asyncio.create_task(send())
    beats, sent = send_beats(outbox.put), _ended(sender)
    try:
        await run_together(read(), sent, beats, listener.until_silent(), outbox.until_overflown())
    finally:
        # gRPC cannot end a call properly in the middle of a write, which gets a second to finish.
        outbox.close()
        await asyncio.wait([sender], timeout=1.0)
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait for a task and raise what it raises; cancelling the wait does not cancel the task."""
    await asyncio.shield(task)


async def read_frames(call: grpc.aio.StreamStreamCall) -> AsyncIterator[Any]:
    """Yield the frames of a call, by read(): gRPC forbids mixing it with iteration on one call."""
    while (frame := await call.read()) is not grpc.aio.EOF:
        yield frame


async def run_together(*work: Coroutine[Any, Any, None]) -> None:
    """Run coroutines side by side until one ends, then cancel the others; raise what the first one raised."""
    tasks = [asyncio.create_task(item) for item in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done:
            task.result()


async def send_beats(put: Callable[[Beat], None]) -> None:
    """Put a beat at once and then every second. Runs until cancelled."""
    while True:
        put(Beat())
        await asyncio.sleep(BEAT_SECONDS)


class Listener:
    """Knows how long ago a peer was heard, counted in its own beats: a pause of this process is no silence of the peer.

    peer: its name in the error.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._missed = 0

    def heard(self) -> None:
        """Note that the peer has sent something."""
        self._missed = 0

    async def until_silent(self) -> None:
        """Run until the peer has sent nothing for PATIENCE beats, then raise Unavailable."""
        while self._missed < PATIENCE:
            await asyncio.sleep(BEAT_SECONDS)
            self._missed += 1
        raise Unavailable(f"{self._peer} has said nothing for {PATIENCE * BEAT_SECONDS:g} s: it hangs or is cut off")
