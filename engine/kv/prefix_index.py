"""Which page holds which prefix of a text, so that later sequences need not compute it again.

Prefixes are compared by their tokens, not by hashes: no collision can leak the KV of one request to another.
"""

from engine.kv.pages import PAGE_SIZE, SequenceKV

# The serial of the page before (0 at the start), this page's tokens, and whether its KV comes of a sparse read.
Prefix = tuple[int, tuple[int, ...], bool]


def next_prefix(sequence: SequenceKV, tokens: list[int]) -> Prefix:
    """Return the prefix that ends with the first page of a sequence that is not indexed yet."""
    start = sequence.indexed * PAGE_SIZE
    return sequence.serial, tuple(tokens[start : start + PAGE_SIZE]), start + PAGE_SIZE > sequence.dense_tokens


class PrefixIndex:
    """Pages by their prefix. Each page in it has a serial, which names its prefix in the prefixes that extend it."""

    def __init__(self) -> None:
        self._page_of: dict[Prefix, int] = {}
        self._prefix_of: dict[int, Prefix] = {}
        self._serial_of: dict[int, int] = {}
        self._next_serial = 1

    def __contains__(self, page: int) -> bool:
        return page in self._prefix_of

    def page_of(self, prefix: Prefix) -> int | None:
        """Return the page that holds the prefix, or None."""
        return self._page_of.get(prefix)

    def serial_of(self, page: int) -> int:
        """Return the serial of a page that is in the index."""
        return self._serial_of[page]

    def add(self, page: int, prefix: Prefix) -> None:
        """Index a page under a prefix. Raises ValueError if the page is indexed already."""
        if page in self._prefix_of:
            raise ValueError(f"page {page} is indexed already")
        self._page_of[prefix], self._prefix_of[page] = page, prefix
        self._serial_of[page], self._next_serial = self._next_serial, self._next_serial + 1

    def remove(self, page: int) -> None:
        """Forget the prefix of an indexed page."""
        del self._page_of[self._prefix_of.pop(page)]
        del self._serial_of[page]

    def check_integrity(self) -> None:
        """Raise AssertionError unless both directions say the same."""
        assert {page: prefix for prefix, page in self._page_of.items()} == self._prefix_of
        assert self._serial_of.keys() == self._prefix_of.keys()
