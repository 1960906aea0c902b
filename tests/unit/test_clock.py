"""The line that shows how long something takes, and what is printed above it, at a terminal and elsewhere."""

import os
import pty
import re
import subprocess
import sys
import termios

from tests.stack import ROOT

PROGRAM = """
import fcntl, logging, os, sys, termios, time
if os.isatty(1):
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)
from specahead.config import clock
clock._DELAY = clock._BEAT = 0.1
logging.basicConfig(format="%(message)s")
with clock.clock("baking"):
    time.sleep(0.5)
    print("a", "row")
    logging.getLogger().warning("hot")
    time.sleep(0.3)
    print("an end", end="")
print(".")
"""


def test_at_a_terminal_what_is_printed_stands_above_the_time() -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            shown += part
    os.close(ours)
    assert process.returncode == 0
    text = shown.decode()
    assert re.search(r"\rbaking 00:0\d", text)
    # What each line came to, once it was overwritten.
    lines = [re.split("\r(?!\n)", line.rstrip("\r\n"))[-1].strip() for line in text.split("\n")]
    assert lines == ["a row", "hot", "an end.", ""]


def test_elsewhere_no_time_is_shown() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("a row\nan end.\n", "hot\n")
