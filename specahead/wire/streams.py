"""A stream between two services, at either end: it receives, sends, and notices a peer that hangs.

Both ends send Beat every second from their event loops. A process that is stopped, or whose event loop is blocked,
sends nothing, although its machine still answers for its connections. A model step that hangs blocks no event loop: its
own process ends it (engine/steps/step_loop.py).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from specahead.wire.errors import Unavailable
from specahead.wire.messages import Beat
from specahead.wire.outbox import Outbox
from specahead.wire.tasks import end_tasks, run_together

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
    silent_beats = 0

    async def read() -> None:
        nonlocal silent_beats
        async for frame in frames:
            silent_beats = 0
            receive(frame)

    async def send() -> None:
        async for events in outbox:
            await write(events)

    async def beat() -> None:
        """Send beats. The silence of the peer is counted in them: a pause of this process is none of the peer."""
        nonlocal silent_beats
        while silent_beats < PATIENCE:
            outbox.put(Beat())
            await asyncio.sleep(BEAT_SECONDS)
            silent_beats += 1
        raise Unavailable(f"{peer} has said nothing for {PATIENCE * BEAT_SECONDS:g} s: it hangs or is cut off")

    sender = asyncio.create_task(send())
    try:
        await run_together(read(), asyncio.shield(sender), beat(), outbox.until_overflown())
    finally:
        # gRPC cannot end a call properly in the middle of a write, which gets a second to finish.
        outbox.close()
        await asyncio.wait([sender], timeout=1.0)
        await end_tasks(sender)


async def read_frames(call: grpc.aio.StreamStreamCall) -> AsyncIterator[Any]:
    """Yield the frames of a call, by read(): gRPC forbids mixing it with iteration on one call."""
    while (frame := await call.read()) is not grpc.aio.EOF:
        yield frame
