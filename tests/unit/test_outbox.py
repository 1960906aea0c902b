"""What waits for a peer goes out in frames that fit into a message, and no more of it waits than may."""

import asyncio

import pytest

from specahead.engine.sampling.distributions import Sampling
from specahead.wire.errors import ResourceExhausted
from specahead.wire.messages import At, Begin, Ready
from specahead.wire.outbox import FRAME_TOKENS, Outbox


def begin(tokens: int) -> Begin:
    return Begin(At("a", 0, 0, tokens), [1] * tokens, Sampling(), tokens + 1)


async def frames(outbox: Outbox[Begin | Ready], count: int) -> list[list[int]]:
    """The tokens of the events of the next frames."""
    found = []
    async with asyncio.timeout(5):
        async for events in outbox:
            found.append([len(getattr(event, "tokens", ())) for event in events])
            if len(found) == count:
                break
    return found


async def test_long_events_go_out_in_several_frames_and_in_order() -> None:
    outbox: Outbox[Begin | Ready] = Outbox()
    sizes = [FRAME_TOKENS // 2, FRAME_TOKENS // 2, 5, FRAME_TOKENS + 1, 7]
    for size in sizes:
        outbox.put(begin(size))
    outbox.put(Ready(At("a", 0, 0, 1)))
    assert await frames(outbox, 4) == [sizes[:2], sizes[2:3], sizes[3:4], [7, 0]]


async def test_more_than_may_wait_ends_the_waiting() -> None:
    outbox: Outbox[Begin | Ready] = Outbox(most_tokens=100)
    outbox.put(begin(60))
    assert await frames(outbox, 1) == [[60]]
    outbox.put(begin(60))  # what was taken counts no more
    waiting = asyncio.create_task(outbox.until_overflown())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    outbox.put(begin(60))
    with pytest.raises(ResourceExhausted, match="does not read"):
        async with asyncio.timeout(1):
            await waiting
