"""Waiting in an event loop for what happens soon."""

import asyncio
from collections.abc import Callable


async def until(reached: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until something is so. Raises TimeoutError after this time."""
    async with asyncio.timeout(seconds):
        while not reached():
            await asyncio.sleep(0.005)
