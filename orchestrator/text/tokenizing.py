"""Where texts are tokenized: short ones at once, others in threads, so that the event loop goes on meanwhile.

There are few threads, since what is being tokenized takes many times the memory of its text, and long texts have one
of their own: they wait for each other, and no shorter one waits for them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

SHORT_TEXT = 4096  # characters of a text that is worked on at once
LONG_TEXT = 64 << 10  # characters of one that waits for others

T = TypeVar("T")
_SHORTER = ThreadPoolExecutor(2, "tokenizing")
_LONG = ThreadPoolExecutor(1, "tokenizing-long")


async def work_on_text(work: Callable[[], T], characters: int) -> T:
    """Return the outcome of some work on a text of so many characters. Raises what it raises."""
    if characters <= SHORT_TEXT:
        return work()
    threads = _LONG if characters > LONG_TEXT else _SHORTER
    return await asyncio.get_running_loop().run_in_executor(threads, copy_context().run, work)
