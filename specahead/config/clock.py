"""A line at the terminal that shows how long something has taken, where no count of what is left is known."""

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

_DELAY, _BEAT = 2.0, 1.0  # seconds until the line is shown, and between its updates


@contextlib.contextmanager
def clock(what: str) -> Iterator[None]:
    """Show `what` and the time below all that is printed and logged in this context, once that takes two seconds.

    Shows nothing where standard error is no terminal, or that of another process, which started this one.
    """
    if not _has_terminal():
        yield
        return
    from tqdm.contrib.logging import logging_redirect_tqdm

    ended, printed = threading.Event(), _Above(sys.stdout)
    shower = threading.Thread(target=_show, args=(what, time.time(), ended), name="clock", daemon=True)
    shower.start()
    try:
        with logging_redirect_tqdm(), contextlib.redirect_stdout(printed):
            yield
    finally:
        ended.set()
        shower.join()
        printed.end()


def _has_terminal() -> bool:
    """Return whether this process is in the foreground of the terminal that its standard error is."""
    try:
        return sys.stderr.isatty() and os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:  # it belongs to another session
        return False


def _show(what: str, began: float, ended: threading.Event) -> None:
    if ended.wait(_DELAY):
        return
    from tqdm import tqdm

    with tqdm(desc=what, bar_format="{desc} {elapsed}", leave=False, delay=_DELAY) as line:
        line.start_t = began
        while not ended.is_set():
            line.refresh()
            ended.wait(_BEAT)


class _Above(io.TextIOBase):
    """Writes whole lines, each where the line of a clock stood, which follows it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._rest = stream, ""

    def write(self, text: str) -> int:
        from tqdm import tqdm

        whole, end, self._rest = (self._rest + text).rpartition("\n")
        if end:
            with tqdm.external_write_mode(sys.stderr):
                self._stream.write(whole + end)
                self._stream.flush()
        return len(text)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def end(self) -> None:
        """Write what stands behind the last line."""
        self._stream.write(self._rest)
        self._stream.flush()
