"""Tasks of the event loop that run side by side, and how they end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any


async def run_together(*work: Awaitable[object]) -> None:
    """Run work side by side until a part of it ends, then cancel the others; raise what the first one raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(*tasks)
    for task in tasks:
        if task in done:
            task.result()


@contextlib.asynccontextmanager
async def meanwhile(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run work while the context lasts; its errors are not raised."""
    tasks = [asyncio.create_task(item) for item in work]
    try:
        yield
    finally:
        await end_tasks(*tasks)


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
