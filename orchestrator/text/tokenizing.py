"""Work on texts, such as tokenizing: on short ones at once, on others in threads beside the event loop.

There are few threads, since tokenizing takes many times the memory of the text. Long texts share one thread, so that
they wait for each other and shorter ones do not wait for them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

SHORT_TEXT = 4096  # characters of a text that needs no thread
LONG_TEXT = 64 << 10  # characters of a text that waits for other long ones

T = TypeVar("T")
_SHORTER = ThreadPoolExecutor(2, "tokenizing")
_LONG = ThreadPoolExecutor(1, "tokenizing-long")


async def work_on_text(work: Callable[[], T], characters: int) -> T:
    """Return the result of work on a text. Raises the error of the work. characters: of the text."""
    if characters <= SHORT_TEXT:
        return work()
    threads = _LONG if characters > LONG_TEXT else _SHORTER
    return await asyncio.get_running_loop().run_in_executor(threads, copy_context().run, work)
