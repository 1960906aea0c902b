"""Files that may change while a process runs."""

import os

Version = tuple[int, int, int]


def version_of(path: str) -> Version | None:
    """Return a value that changes with a file's content; None if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
