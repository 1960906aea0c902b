"""What becomes of sessions, told to those who look at the dashboard. While nobody looks a round costs a look at a list.

A viewer gets a snapshot, then what has happened since it was last asked. That is bounded: of very many rounds the first
are told one by one, and the sums hold all of them; a viewer who has fallen far behind gets a snapshot again.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.requests.callers import current_caller
from orchestrator.sessions.ledger import Record, SpeculationTotals
from specahead.wire.errors import NotFound, ResourceExhausted
from specahead.wire.messages import Commit

MOST_VIEWERS = 8
MOST_ROUNDS = 256  # told one by one in an event
MOST_CHANGES = 256  # sessions that open or end between two events, beyond which there is a snapshot
MOST_SESSIONS = 256  # of a snapshot: the newest

# What is told of a round, in this order. seconds: since the session's last round, or since it was opened.
ROUND_FIELDS = ("session", "tokens", "drafted", "accepted", "seconds", "first", "kv_read", "kv_total", "kv_fetched")

Event = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Watched:
    """A session that is open. number: what it is called on the page; caller: the name of its key."""

    number: int
    caller: str
    record: Record

    def told(self, viewer: str) -> Event:
        """Return what is told of it when it opens. Only who sent it, by the name of the key, learns its id."""
        record = self.record
        return {
            "session": self.number,
            "request": record.session if viewer == self.caller else None,
            "exactness": record.exactness.name.lower(),
            "prompt_tokens": record.prompt_tokens,
            "max_tokens": record.max_tokens,
        }

    def snapshot(self, viewer: str) -> Event:
        """Return the same with what has become of it so far."""
        rounds = [_round(self.number, commit, 0.0, False) for commit in self.record.latest]
        return self.told(viewer) | {"tokens": len(self.record.generated), "rounds": rounds}


def _round(number: int, commit: Commit, seconds: float, first: bool) -> tuple[Any, ...]:
    read = commit.kv_tokens_read, commit.kv_tokens_total, commit.kv_tokens_fetched
    return (number, len(commit.tokens), commit.drafted, commit.accepted, round(seconds, 6), first, *read)


@dataclass(eq=False)
class Viewer:
    """Who looks, by the name of a key, and what has happened since this viewer was told last."""

    name: str
    behind: bool = True  # a snapshot comes next
    sums: SpeculationTotals = field(default_factory=SpeculationTotals)
    tokens: int = 0
    rounds: list[tuple[Any, ...]] = field(default_factory=list)
    opened: list[Event] = field(default_factory=list)
    ended: list[tuple[int, str]] = field(default_factory=list)

    def add_round(self, told: tuple[Any, ...], commit: Commit) -> None:
        """Take note of a round."""
        self.sums.add(commit)
        self.tokens += len(commit.tokens)
        if len(self.rounds) < MOST_ROUNDS:
            self.rounds.append(told)

    def add_change(self, changes: list[Any], change: Any) -> None:
        """Take note of a session that opens or ends."""
        if len(changes) < MOST_CHANGES:
            changes.append(change)
        else:
            self.behind = True

    def forget(self) -> None:
        """Begin anew with nothing to tell."""
        self.sums, self.tokens, self.behind = SpeculationTotals(), 0, False
        self.rounds, self.opened, self.ended = [], [], []


class Feed:
    """Who looks, and which sessions are open."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, Watched] = {}
        self._viewers: list[Viewer] = []

    # What happens.

    def open(self, record: Record) -> Watched:
        """Take a session up."""
        watched = Watched(next(self._numbers), current_caller().name, record)
        self._open[watched.number] = watched
        for viewer in self._viewers:
            viewer.add_change(viewer.opened, watched.told(viewer.name))
        return watched

    def round(self, watched: Watched, commit: Commit, seconds: float, first: bool) -> None:
        """Take note of a session's round, which took so many seconds; first: whether it is the session's first."""
        if self._viewers:
            told = _round(watched.number, commit, seconds, first)
            for viewer in self._viewers:
                viewer.add_round(told, commit)

    def end(self, watched: Watched, outcome: str) -> None:
        """Forget a session that has ended so."""
        del self._open[watched.number]
        for viewer in self._viewers:
            viewer.add_change(viewer.ended, (watched.number, outcome))

    # Who looks.

    def check_room(self) -> None:
        """Raise ResourceExhausted if no one more may look."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise ResourceExhausted(f"{MOST_VIEWERS} dashboards are open already: close one", retry_after=5)

    @contextmanager
    def viewer(self, name: str) -> Iterator[Viewer]:
        """Let someone look while the context lasts. Raises ResourceExhausted if too many do."""
        self.check_room()
        viewer = Viewer(name)
        self._viewers.append(viewer)
        try:
            yield viewer
        finally:
            self._viewers.remove(viewer)

    def take(self, viewer: Viewer) -> Event | None:
        """Return what a viewer is to be told now, None if nothing has happened."""
        if viewer.behind:
            viewer.forget()
            newest = list(self._open.values())[-MOST_SESSIONS:]
            sessions = [watched.snapshot(viewer.name) for watched in newest]
            return {"type": "snapshot", "round_fields": ROUND_FIELDS, "sessions": sessions}
        if not (viewer.tokens or viewer.opened or viewer.ended):
            return None
        sums = asdict(viewer.sums) | {"tokens": viewer.tokens}
        happened = {"sums": sums, "opened": viewer.opened, "rounds": viewer.rounds, "ended": viewer.ended}
        viewer.forget()
        return {"type": "rounds"} | happened

    def record(self, number: int) -> Record:
        """Return the record of an open session. Raises NotFound."""
        if number not in self._open:
            raise NotFound(f"session {number} has ended")
        return self._open[number].record
