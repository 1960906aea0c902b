"""Asking a program that runs beside this one: what may take long or much memory is done where it can be ended."""

import asyncio
import subprocess
from collections.abc import Sequence


async def ask_process(command: Sequence[str], given: bytes, seconds: float | None = None) -> tuple[int, bytes, bytes]:
    """Run a program with `given` as its input; return its exit status, its output and its errors.

    It is killed where the caller is cancelled, and after so many seconds; then TimeoutError is raised. A thread waits
    for it: transports of the event loop fail in their own ways where a program ends before it has read all.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)  # noqa: ASYNC220 (starts in a moment)
    try:
        async with asyncio.timeout(seconds):
            out, errors = await asyncio.to_thread(process.communicate, given)
    finally:
        process.kill()  # which does nothing to one that has ended; the thread then ends too
    return process.returncode, out, errors
