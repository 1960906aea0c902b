"""The texts that tests run on: four books in the public domain (tests/data/README.md)."""

import lzma
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"


def read_books() -> list[str]:
    """Return the four books, ordered by their file's name. The shortest has 175,000 characters."""
    return [lzma.decompress(file.read_bytes()).decode() for file in sorted(DATA.glob("*.txt.xz"))]
