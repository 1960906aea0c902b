"""Chooses the target of a session by the reports of targets: the one with the least to do before its first token.

Pure: no streams, no clock. Targets report their load and the prefixes in their KV (target_service/reporting.py), so
that several orchestrators over the same targets see the same. Prefixes are known by hashes (engine/kv/prefix_index.py).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specahead.engine.kv.pages import PAGE_SIZE, pages_for
from specahead.engine.kv.prefix_index import prefix_hashes
from specahead.wire.errors import ResourceExhausted
from specahead.wire.messages import Report

ANSWER_TOKENS = 128  # prompt tokens that take about as long as the answer of a session delays a new one
# A target without a report has room for everything; it decides itself.
_UNKNOWN = Report(free_places=1 << 31, free_kv_pages=1 << 31, queue_places=1 << 31)


class Asked(NamedTuple):
    """A session that was opened on a target."""

    tokens: int
    """At its beginning."""
    unread: int
    """Tokens of these that the target has no KV of, as far as its reports say."""


@dataclass(eq=False)
class TargetView:
    """An orchestrator's knowledge of a target."""

    name: str
    report: Report = _UNKNOWN
    """The latest."""
    prefixes: set[int] = field(default_factory=set)
    """Hashes of the prefixes whose KV it holds."""
    left: set[str] = field(default_factory=set)
    """Clients' names of its sessions without an orchestrator."""
    opens: int = 0
    """Sessions that were opened on the present stream."""
    unreported: deque[Asked] = field(default_factory=deque)
    """The last of these, which the report does not count yet."""
    turn: int = 0
    """Grows each time that any target is chosen, and is set in the chosen one."""

    def take(self, report: Report) -> None:
        """Use a report from now on, unless a later one came before it."""
        if report.number <= self.report.number:
            return
        self.report = report
        self.prefixes.update(report.indexed)
        self.prefixes.difference_update(report.evicted)
        self.left.update(report.left)
        self.left.difference_update(report.taken)
        while self.unreported and self.opens - len(self.unreported) < report.opens:
            self.unreported.popleft()

    def count_open(self, tokens: int, cached: int = 0) -> None:
        """Count a session that is opened on the target. tokens: of it. cached: of these, tokens with KV there."""
        self.opens += 1
        self.unreported.append(Asked(tokens, tokens - cached))

    def forget(self) -> None:
        """Forget the reports of a target whose stream has ended."""
        self.report, self.opens = _UNKNOWN, 0
        for each in (self.prefixes, self.left, self.unreported):
            each.clear()

    @property
    def sessions(self) -> int:
        """The number of its sessions, of all orchestrators, as far as its reports say."""
        return self.report.sessions + len(self.unreported)

    @property
    def expected_tokens(self) -> int:
        """The work of its sessions, in prompt tokens."""
        return self._unread_tokens + ANSWER_TOKENS * self.sessions

    @property
    def expected_wait(self) -> float:
        """The seconds that a new session would wait until its prompt is read."""
        rate = self.report.tokens_per_second
        return max(self.report.queue_seconds, self._unread_tokens / rate if rate else 0.0)

    @property
    def _unread_tokens(self) -> int:
        return self.report.unread_tokens + sum(asked.unread for asked in self.unreported)

    def has_room(self, tokens: int) -> bool:
        """Return whether a session of `tokens` tokens would run at once."""
        pages = sum(_pages(asked.tokens) for asked in self.unreported) + _pages(tokens)
        places = self.report.free_places > len(self.unreported)
        return not self.report.waiting and places and pages <= self.report.free_kv_pages

    def is_full(self, tokens: int) -> bool:
        """Return whether the target would refuse a new session of `tokens` tokens."""
        places, pages = self.report.free_places, self.report.free_kv_pages
        queued = 0  # of the unreported sessions and the new one; after one that waits, all wait
        for needed in map(_pages, (*(asked.tokens for asked in self.unreported), tokens)):
            runs = not self.report.waiting and not queued and places > 0 and needed <= pages
            places, pages, queued = places - runs, pages - needed * runs, queued + (not runs)
        return queued > self.report.queue_places


def _pages(tokens: int) -> int:
    """Return the least KV pages of a session of `tokens` tokens: a target needs room for a round after them."""
    return pages_for(tokens + 2)


def choose(views: Sequence[TargetView], tokens: Sequence[int]) -> TargetView:
    """Return the target, of at least one, for a session with these tokens, and count the session there.

    It is the one with the least work before the session's first token: the work of its other sessions, and the tokens
    of the session's own prompt without KV. Equal targets take turns.
    """
    chosen, cached = views[0], 0
    if len(views) > 1:  # a long prompt takes milliseconds to hash

        def load(pair: tuple[TargetView, int]) -> tuple[bool, int, int]:
            view, cached = pair
            return not view.has_room(len(tokens)), view.expected_tokens - cached, view.turn

        chosen, cached = min(zip(views, cached_tokens(views, tokens), strict=True), key=load)
        chosen.turn = 1 + max(view.turn for view in views)
    chosen.count_open(len(tokens), cached)
    return chosen


def admit(views: Iterable[TargetView], tokens: int) -> list[TargetView]:
    """Return the targets on which a new session of `tokens` tokens may be opened. Raises ResourceExhausted if there is
    none."""
    open_to_it = [view for view in views if not view.is_full(tokens)]
    if not open_to_it:
        raise ResourceExhausted("the queues of all targets are full; try again later")
    return open_to_it


def cached_tokens(views: Sequence[TargetView], tokens: Sequence[int]) -> list[int]:
    """Return, for each target, how many of the first tokens it has KV of."""
    cached, following = [0] * len(views), set(range(len(views)))
    for count, hash in enumerate(prefix_hashes(tokens), 1):
        following = {index for index in following if hash in views[index].prefixes}
        if not following:
            break
        for index in following:
            cached[index] = count * PAGE_SIZE
    return cached
