"""The events of sessions for the viewers of the dashboard. Without viewers they cost next to nothing.

A viewer gets a snapshot, then the events since its last call. They are bounded: of very many rounds only the first are
listed; a viewer who misses too many changes gets a snapshot again.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from orchestrator.requests.callers import current_caller
from orchestrator.sessions.ledger import LATEST_ROUNDS, Record
from specahead.wire.errors import ResourceExhausted
from specahead.wire.messages import Commit

MOST_VIEWERS = 8
MOST_ROUNDS = 256  # listed in an event
MOST_CHANGES = 256  # sessions that open or end between two events; more lead to a snapshot
MOST_SESSIONS = 256  # of a snapshot: the newest

MOST_ENDED = 30  # sessions that are shown after their end

# The fields of a round, in this order. Screening rounds give no tokens before the round that confirms them.
ROUND_FIELDS = ("session", "tokens", "drafted", "accepted", "proposer", "kv_read", "kv_total", "kv_fetched")

Event = dict[str, Any]


@dataclass(eq=False)
class Watched:
    """A session."""

    number: int
    """Its name on the page."""
    caller: str
    """The name of its key."""
    record: Record
    first_seconds: float = 0.0
    """From the request to the first token, 0 before it."""

    def opening(self, viewer: str) -> Event:
        """Return the event of its opening. viewer: the name of a key; only the caller's own gets the id."""
        record = self.record
        return {
            "session": self.number,
            "request": record.session if viewer == self.caller else None,
            "exactness": record.asked.exactness.name.lower(),
            "prompt_tokens": record.prompt_tokens,
        }

    def sums(self) -> Event:
        """Return the sums over its rounds."""
        record, totals = self.record, self.record.totals
        return {
            "tokens": len(record.generated),
            "cached_tokens": record.cached_tokens,
            "rounds": totals.rounds,
            "drafted": totals.drafted,
            "accepted": totals.accepted,
            "kv_read": totals.figures.kv_tokens_read,
            "kv_total": totals.figures.kv_tokens_total,
            "kv_fetched": totals.figures.kv_tokens_fetched,
            "first_seconds": self.first_seconds,
        }

    def snapshot(self, viewer: str) -> Event:
        """Return its opening, its sums and its last rounds."""
        rounds = [each for commit in self.record.latest for each in _rounds(self.number, commit)]
        return self.opening(viewer) | self.sums() | {"latest": rounds[-LATEST_ROUNDS:]}


def _rounds(number: int, commit: Commit) -> list[tuple[int, ...]]:
    """Return the rounds of a commit, by ROUND_FIELDS."""
    figures, (*screening, last) = commit.figures, commit.rounds
    read = figures.kv_tokens_read, figures.kv_tokens_total, figures.kv_tokens_fetched
    screened = [(number, 0, *each, commit.proposer, 0, 0, 0) for each in screening]
    return [*screened, (number, len(commit.tokens), *last, commit.proposer, *read)]


@dataclass(eq=False)
class Viewer:
    """Someone who looks at the page, and the events since the last call."""

    name: str
    """Of the key."""
    needs_snapshot: bool = True
    rounds: list[tuple[int, ...]] = field(default_factory=list)
    opened: list[Event] = field(default_factory=list)
    ended: list[Event] = field(default_factory=list)

    def add_change(self, changes: list[Any], change: Any) -> None:
        """Add a session that opens or ends."""
        if len(changes) < MOST_CHANGES:
            changes.append(change)
        else:
            self.needs_snapshot = True

    def forget(self) -> None:
        """Drop all events."""
        self.needs_snapshot = False
        self.rounds, self.opened, self.ended = [], [], []


class Feed:
    """All viewers and open sessions."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, Watched] = {}
        self._ended: deque[tuple[str, Event]] = deque(maxlen=MOST_ENDED)  # each with its caller
        self._viewers: list[Viewer] = []

    def open(self, record: Record) -> Watched:
        """Add a session of the current caller."""
        watched = Watched(next(self._numbers), current_caller().name, record)
        self._open[watched.number] = watched
        for viewer in self._viewers:
            viewer.add_change(viewer.opened, watched.opening(viewer.name))
        return watched

    def round(self, watched: Watched, commit: Commit, first_seconds: float) -> None:
        """Add the rounds of a commit. first_seconds: from the request to its first token."""
        watched.first_seconds = first_seconds
        if self._viewers:
            rounds = _rounds(watched.number, commit)
            for viewer in self._viewers:
                viewer.rounds += rounds[: MOST_ROUNDS - len(viewer.rounds)]

    def end(self, watched: Watched, outcome: str, seconds: float) -> None:
        """Remove a session that has ended. outcome: a finish reason or the code of an error. seconds: that it took."""
        del self._open[watched.number]
        over = {"session": watched.number, "ended": outcome, "seconds": seconds}
        self._ended.append((watched.caller, watched.snapshot(watched.caller) | over))
        for viewer in self._viewers:
            viewer.add_change(viewer.ended, watched.sums() | over)

    def check_room(self) -> None:
        """Raise ResourceExhausted if there are MOST_VIEWERS viewers."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise ResourceExhausted(f"{MOST_VIEWERS} dashboards are open already: close one", retry_after=5)

    @contextmanager
    def viewer(self, name: str) -> Iterator[Viewer]:
        """Add a viewer while the context lasts. Raises ResourceExhausted if there are too many."""
        self.check_room()
        viewer = Viewer(name)
        self._viewers.append(viewer)
        try:
            yield viewer
        finally:
            self._viewers.remove(viewer)

    def take(self, viewer: Viewer) -> Event | None:
        """Return the next event for a viewer, None if nothing has happened."""
        if viewer.needs_snapshot:
            viewer.forget()
            ended = [told if viewer.name == caller else told | {"request": None} for caller, told in self._ended]
            newest = [watched.snapshot(viewer.name) for watched in list(self._open.values())[-MOST_SESSIONS:]]
            return {"type": "snapshot", "sessions": [*ended, *newest]}
        if not (viewer.rounds or viewer.opened or viewer.ended):
            return None
        event: Event = {"type": "rounds", "opened": viewer.opened, "rounds": viewer.rounds, "ended": viewer.ended}
        viewer.forget()
        return event
