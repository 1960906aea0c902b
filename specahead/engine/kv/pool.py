"""The pool of pages with reference counts, some of them kept for their prefix.

Who owns which page:

    free list ── allocate ──> sequence(s) ── release ──> free list        (page not in the prefix index)
                                  │  ▲
                               release │ match (reference count + 1)
                                  ▼  │
                              prefix index, unreferenced ── evict ──> free list

A page is writable by the one sequence that allocated it; a page in the prefix index is full and never written again.
"""

from collections import OrderedDict
from collections.abc import Iterable

from specahead.engine.kv.pages import OutOfPages
from specahead.engine.kv.prefix_index import Prefix, PrefixIndex


class PagePool:
    """Page numbers 0 … n-1, each free, referenced by sequences, or unreferenced and kept for its prefix.

    `prefixes` is the index of prefixes. Whoever keeps more for each page sets `freed` to a list, to which pages are
    added in the order in which they become free, and empties it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.freed: list[int] | None = None
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self.prefixes = PrefixIndex()
        # Unreferenced pages with a prefix, the one that was released longest ago first.
        self._reusable: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that can be allocated, counting reusable ones that would be evicted."""
        return self.free + len(self._reusable)

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Pages that sequences refer to."""
        return self.num_pages - self.available

    def allocate(self, count: int) -> list[int]:
        """Give `count` pages to one owner; raise OutOfPages if fewer are available."""
        if count > self.available:
            raise OutOfPages(f"{count} pages wanted, {self.available} of {self.num_pages} available")
        while self.free < count:
            self.evict_one()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def release(self, pages: list[int]) -> None:
        """Take one reference off each page; raise ValueError for a page that nobody holds."""
        for page in pages:
            if self.references[page] < 1:
                raise ValueError(f"page {page} is released more often than it is held")
            self.references[page] -= 1
            if self.references[page] == 0:
                if page in self.prefixes:
                    self._reusable[page] = None
                else:
                    self._give_back(page)

    def match(self, blocks: Iterable[bytes]) -> tuple[list[int], list[int]]:
        """Return the pages of the longest prefix that is indexed of a text with these pages' tokens, each with one more
        reference, and their serials.
        """
        pages, serials = self.prefixes.longest(blocks)
        for page in pages:
            if not self.references[page]:
                del self._reusable[page]
            self.references[page] += 1
        return pages, serials

    def index(self, page: int, prefix: Prefix) -> int:
        """Let later sequences reuse a full, held page; the first page indexed for a prefix stays.

        Returns the serial that names this prefix in the prefixes that extend it.
        """
        if self.references[page] < 1:
            raise ValueError(f"page {page} is not held")
        known = self.prefixes.page_of(prefix)
        if known is None:
            self.prefixes.add(page, prefix)
            known = page
        return self.prefixes.serial_of(known)

    def forget(self, pages: list[int]) -> None:
        """Take held pages out of the prefix index."""
        for page in pages:
            if page in self.prefixes:
                self.prefixes.remove(page)

    def evict_one(self) -> None:
        """Forget the reusable page that was released longest ago."""
        page, _ = self._reusable.popitem(last=False)
        self.prefixes.remove(page)
        self._give_back(page)

    def _give_back(self, page: int) -> None:
        self._free.append(page)
        if self.freed is not None:
            self.freed.append(page)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is either free, held or kept for its prefix."""
        free, reusable = set(self._free), set(self._reusable)
        held = {page for page, count in enumerate(self.references) if count}
        assert len(free) == self.free and not free & reusable and not held & (free | reusable)
        assert len(free) + len(reusable) + len(held) == self.num_pages
        self.prefixes.check_integrity()
        indexed = self.prefixes.pages
        assert reusable <= indexed and not free & indexed
