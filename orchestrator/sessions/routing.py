"""Which target a session goes to: the policies, over what targets report of themselves.

Pure: no streams, no clock. Targets report their load and which prefixes they hold (target_service/reporting.py), so
that several orchestrators over the same targets see the same. What a prefix is known by is in engine/kv/prefix_hash.py.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specahead.engine.kv.pages import PAGE_SIZE, pages_for
from specahead.engine.kv.prefix_index import prefix_hashes
from specahead.wire.errors import ResourceExhausted
from specahead.wire.messages import Report

# Of each session's answer: how many prompt tokens it delays a new session by, about.
ANSWER_TOKENS = 128
_MOST_RETRY_SECONDS = 60
# Of a target that has said nothing yet: whatever is asked of it, it answers itself.
_UNKNOWN = Report(free_places=1 << 31, free_kv_pages=1 << 31, queue_places=1 << 31)


class Asked(NamedTuple):
    """A session that a target was asked for. tokens: with which it begins; unread: those of them without KV there, as
    far as that is known."""

    tokens: int
    unread: int


@dataclass(eq=False)
class TargetView:
    """What an orchestrator knows of a target.

    report: its last one. prefixes: hashes of those that it holds. left: clients' names of sessions that a lost
    orchestrator has left there. opens: sessions that it was asked for on the present stream; unreported: the last of
    them, which the report does not count. turn: when it was chosen last, as a number that grows.
    """

    name: str
    report: Report = _UNKNOWN
    prefixes: set[int] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    opens: int = 0
    unreported: deque[Asked] = field(default_factory=deque)
    turn: int = 0

    def take(self, report: Report) -> None:
        """Go by a report from now on, unless a later one has come before it."""
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
        """Count a session of so many tokens that the target is asked for, which has KV of the `cached` first ones."""
        self.opens += 1
        self.unreported.append(Asked(tokens, tokens - cached))

    def forget(self) -> None:
        """Know nothing any more of a target whose stream has ended."""
        self.report, self.opens = _UNKNOWN, 0
        for each in (self.prefixes, self.left, self.unreported):
            each.clear()

    @property
    def sessions(self) -> int:
        """Return how many sessions it has, of all orchestrators, as far as that is known."""
        return self.report.sessions + len(self.unreported)

    @property
    def expected_tokens(self) -> int:
        """Return the tokens that its sessions are expected to take still."""
        return self._unread_tokens + ANSWER_TOKENS * self.sessions

    @property
    def expected_wait(self) -> float:
        """Return the seconds that a new session would wait before its prompt is read, as far as that is known."""
        rate = self.report.tokens_per_second
        return max(self.report.queue_seconds, self._unread_tokens / rate if rate else 0.0)

    @property
    def _unread_tokens(self) -> int:
        return self.report.unread_tokens + sum(asked.unread for asked in self.unreported)

    def has_room(self, tokens: int) -> bool:
        """Return whether a session of so many tokens would run at once."""
        pages = sum(_pages(asked.tokens) for asked in self.unreported) + _pages(tokens)
        places = self.report.free_places > len(self.unreported)
        return not self.report.waiting and places and pages <= self.report.free_kv_pages

    def is_full(self, tokens: int) -> bool:
        """Return whether the target would refuse a new session of so many tokens."""
        places, pages = self.report.free_places, self.report.free_kv_pages
        queued = 0  # of the sessions that it has not reported yet, and the new one: behind one that waits, all do
        for needed in map(_pages, (*(asked.tokens for asked in self.unreported), tokens)):
            runs = not self.report.waiting and not queued and places > 0 and needed <= pages
            places, pages, queued = places - runs, pages - needed * runs, queued + (not runs)
        return queued > self.report.queue_places


def _pages(tokens: int) -> int:
    """Return the KV pages of a session of so many tokens, at least: a target needs room for a round beyond them."""
    return pages_for(tokens + 2)


# Of one or more targets the one that a session with these tokens goes to, and how many of them it has KV of, 0 where
# that makes no difference.
Policy = Callable[[Sequence[TargetView], Sequence[int]], tuple[TargetView, int]]


def choose(policy: str, views: Sequence[TargetView], tokens: Sequence[int]) -> TargetView:
    """Return the target, of one or more, that a session with these tokens goes to, and count it there."""
    chosen, cached = views[0], 0
    if len(views) > 1:  # a long prompt takes milliseconds to hash
        chosen, cached = POLICIES[policy](views, tokens)
        chosen.turn = 1 + max(view.turn for view in views)
    chosen.count_open(len(tokens), cached)
    return chosen


def admit(views: Iterable[TargetView], tokens: int, max_wait: float) -> list[TargetView]:
    """Return the targets that a new session of so many tokens may go to.

    max_wait: seconds that it may be expected to wait; 0: any time. Raises ResourceExhausted if that leaves none.
    """
    open_to_it = [view for view in views if not view.is_full(tokens)]
    if not open_to_it:
        raise ResourceExhausted("the queues of all targets are full; try again later")
    soon = [view for view in open_to_it if not max_wait or view.expected_wait <= max_wait]
    if not soon:
        least = min(view.expected_wait for view in open_to_it)
        seconds = min(_MOST_RETRY_SECONDS, math.ceil(least - max_wait))
        message = f"a request would wait for {least:.0f} s now, and at most {max_wait:g} s are allowed; try again later"
        raise ResourceExhausted(message, retry_after=seconds)
    return soon


def cached_tokens(views: Sequence[TargetView], tokens: Sequence[int]) -> list[int]:
    """Return how many of the first tokens each target has KV of."""
    cached, following = [0] * len(views), set(range(len(views)))
    for count, hash in enumerate(prefix_hashes(tokens), 1):
        following = {index for index in following if hash in views[index].prefixes}
        if not following:
            break
        for index in following:
            cached[index] = count * PAGE_SIZE
    return cached


def _by_prefix(views: Sequence[TargetView], tokens: Sequence[int]) -> tuple[TargetView, int]:
    """Return where a session's first token is to be expected after the fewest tokens: those that are ahead of it, and
    those of its own prompt that are not cached."""
    cached = cached_tokens(views, tokens)
    return min(zip(views, cached, strict=True), key=lambda pair: _load(pair[0], len(tokens), pair[1]))


def _by_load(views: Sequence[TargetView], tokens: Sequence[int]) -> tuple[TargetView, int]:
    return min(views, key=lambda view: _load(view, len(tokens), 0)), 0


def _in_turn(views: Sequence[TargetView], tokens: Sequence[int]) -> tuple[TargetView, int]:
    return min(views, key=lambda view: view.turn), 0


def _load(view: TargetView, tokens: int, cached: int) -> tuple[bool, int, int]:
    return not view.has_room(tokens), view.expected_tokens - cached, view.turn


POLICIES: dict[str, Policy] = {"prefix": _by_prefix, "least-loaded": _by_load, "round-robin": _in_turn}
