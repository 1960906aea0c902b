"""Files that others may change while a process runs."""

import os

Version = tuple[int, int, int]


def version_of(path: str) -> Version | None:
    """Return what changes with a file's content; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
