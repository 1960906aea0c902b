"""A copy of the project's sources, as a release or a machine without git has them."""

import subprocess
from pathlib import Path

from tests.stack import ROOT

LISTED = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]


def copy_sources(to: Path) -> Path:
    """Fill a folder with what git tracks or would track, but for tests, and return it."""
    names = subprocess.run(LISTED, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in names:
        source, place = ROOT / name, to / name
        if not name or name.startswith("tests/") or not (source.exists() or source.is_symlink()):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            place.symlink_to(source.readlink())
        else:
            place.hardlink_to(source)
    return to
