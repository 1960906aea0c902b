"""The events of sessions for the viewers of the dashboard. Without viewers they cost next to nothing.

A viewer gets a snapshot, then the events since its last call. They are bounded: of very many rounds only the first are
listed, though the sums count all; a viewer who misses too many changes gets a snapshot again.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from orchestrator.requests.callers import current_caller
from orchestrator.sessions.ledger import Record, SpeculationTotals
from specahead.wire.errors import ResourceExhausted
from specahead.wire.messages import Commit

MOST_VIEWERS = 8
MOST_ROUNDS = 256  # listed in an event
MOST_CHANGES = 256  # sessions that open or end between two events; more lead to a snapshot
MOST_SESSIONS = 256  # of a snapshot: the newest

# The fields of a round, in this order. seconds: since the session's last round, or since it was opened.
ROUND_FIELDS = ("session", "tokens", "drafted", "accepted", "seconds", "first", "kv_read", "kv_total", "kv_fetched")

Event = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Watched:
    """An open session."""

    number: int
    """Its name on the page."""
    caller: str
    """The name of its key."""
    record: Record

    def opening(self, viewer: str) -> Event:
        """Return the event of its opening. viewer: the name of a key; only the caller's own gets the id."""
        record = self.record
        return {
            "session": self.number,
            "request": record.session if viewer == self.caller else None,
            "exactness": record.asked.exactness.name.lower(),
            "prompt_tokens": record.prompt_tokens,
            "max_tokens": record.asked.max_tokens,
        }

    def snapshot(self, viewer: str) -> Event:
        """Return its opening with its rounds so far."""
        rounds = [_round(self.number, commit, 0.0, False) for commit in self.record.latest]
        return self.opening(viewer) | {"tokens": len(self.record.generated), "rounds": rounds}


def _round(number: int, commit: Commit, seconds: float, first: bool) -> tuple[Any, ...]:
    figures = commit.figures
    read = figures.kv_tokens_read, figures.kv_tokens_total, figures.kv_tokens_fetched
    return (number, len(commit.tokens), commit.drafted, commit.accepted, round(seconds, 6), first, *read)


@dataclass(eq=False)
class Viewer:
    """Someone who looks at the page, and the events since the last call."""

    name: str
    """Of the key."""
    needs_snapshot: bool = True
    sums: SpeculationTotals = field(default_factory=SpeculationTotals)
    tokens: int = 0
    rounds: list[tuple[Any, ...]] = field(default_factory=list)
    opened: list[Event] = field(default_factory=list)
    ended: list[tuple[int, str]] = field(default_factory=list)

    def add_round(self, fields: tuple[Any, ...], commit: Commit) -> None:
        """Add a round."""
        self.sums.add(commit)
        self.tokens += len(commit.tokens)
        if len(self.rounds) < MOST_ROUNDS:
            self.rounds.append(fields)

    def add_change(self, changes: list[Any], change: Any) -> None:
        """Add a session that opens or ends."""
        if len(changes) < MOST_CHANGES:
            changes.append(change)
        else:
            self.needs_snapshot = True

    def forget(self) -> None:
        """Drop all events."""
        self.sums, self.tokens, self.needs_snapshot = SpeculationTotals(), 0, False
        self.rounds, self.opened, self.ended = [], [], []


class Feed:
    """All viewers and open sessions."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, Watched] = {}
        self._viewers: list[Viewer] = []

    def open(self, record: Record) -> Watched:
        """Add a session of the current caller."""
        watched = Watched(next(self._numbers), current_caller().name, record)
        self._open[watched.number] = watched
        for viewer in self._viewers:
            viewer.add_change(viewer.opened, watched.opening(viewer.name))
        return watched

    def round(self, watched: Watched, commit: Commit, seconds: float, first: bool) -> None:
        """Add a round. seconds: that it took. first: whether it is the session's first."""
        if self._viewers:
            fields = _round(watched.number, commit, seconds, first)
            for viewer in self._viewers:
                viewer.add_round(fields, commit)

    def end(self, watched: Watched, outcome: str) -> None:
        """Remove a session that has ended. outcome: a finish reason or the code of an error."""
        del self._open[watched.number]
        for viewer in self._viewers:
            viewer.add_change(viewer.ended, (watched.number, outcome))

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
            newest = list(self._open.values())[-MOST_SESSIONS:]
            sessions = [watched.snapshot(viewer.name) for watched in newest]
            return {"type": "snapshot", "round_fields": ROUND_FIELDS, "sessions": sessions}
        if not (viewer.tokens or viewer.opened or viewer.ended):
            return None
        sums = viewer.sums.summary() | {"tokens": viewer.tokens}
        event: dict[str, Any] = {"type": "rounds", "sums": sums, "opened": viewer.opened, "rounds": viewer.rounds}
        event["ended"] = viewer.ended
        viewer.forget()
        return event
