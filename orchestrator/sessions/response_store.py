"""Responses that later requests continue by `previous_response_id`, in a file of SQLite. Knows nothing of models.

A turn is stored once: its own items, and the name of the turn before it. Turns are read and written in the event loop,
since either takes a millisecond or so.
"""

import json
import os
import sqlite3
import time
from collections.abc import Callable
from typing import Any

from specahead.wire.errors import NotFound

_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    name TEXT, caller TEXT, previous TEXT, used REAL, size INTEGER, items TEXT, PRIMARY KEY (name, caller));
CREATE INDEX IF NOT EXISTS by_use ON responses (used, size);
"""
_CHAIN = """
WITH RECURSIVE chain (name, previous, items, depth) AS (
    SELECT name, previous, items, 0 FROM responses WHERE name = :name AND caller = :caller
    UNION ALL
    SELECT r.name, r.previous, r.items, depth + 1 FROM responses r, chain
    WHERE r.name = chain.previous AND r.caller = :caller AND depth < 8192)
SELECT name, previous, items FROM chain ORDER BY depth DESC
"""
_LEAST_USED = """
DELETE FROM responses WHERE rowid IN (
    SELECT rowid FROM (SELECT rowid, SUM(size) OVER (ORDER BY used DESC, rowid DESC) AS kept FROM responses)
    WHERE kept > ?)
"""


class ResponseStore:
    """The turns of conversations, by the name of their response. A caller finds its own alone."""

    def __init__(self, file: str, seconds: float, most_bytes: float, clock: Callable[[], float] = time.time) -> None:
        """seconds: that a turn is kept after its last use. most_bytes: of all turns; the least recently used ones go.

        Raises OSError for a file that cannot be used.
        """
        self._seconds, self._most_bytes, self._clock = seconds, most_bytes, clock
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))  # what people wrote is nobody else's
        try:
            self._database = sqlite3.connect(file, isolation_level=None)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(_TABLE)
        except sqlite3.Error as error:
            raise OSError(f"the stored responses in {file} cannot be opened: {error}") from None

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def read(self, name: str, caller: str) -> list[dict[str, Any]]:
        """Return the items of a conversation up to a response. Raises NotFound unless all of its turns are there."""
        now = self._clock()
        self._drop(now)
        turns = self._database.execute(_CHAIN, {"name": name, "caller": caller}).fetchall()
        if not turns or turns[0][1] is not None:
            raise NotFound(
                f"Previous response with id '{name[:80]}' not found. It may have expired: send the conversation along",
                "previous_response_id",
                "previous_response_not_found",
            )
        used = [(now, turn, caller) for turn, _, _ in turns]
        self._database.executemany("UPDATE responses SET used = ? WHERE name = ? AND caller = ?", used)
        return [item for _, _, items in turns for item in json.loads(items)]

    def write(self, name: str, caller: str, previous: str | None, items: list[dict[str, Any]]) -> None:
        """Store a turn unless its name is taken, and drop turns beyond the limits. previous: the one before it."""
        text, now = json.dumps(items), self._clock()
        row = (name, caller, previous, now, len(text), text)
        self._database.execute("INSERT OR IGNORE INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
        self._drop(now)

    def _drop(self, now: float) -> None:
        """Drop the turns that are beyond the limits."""
        self._database.execute("DELETE FROM responses WHERE used < ?", (now - self._seconds,))
        ((size,),) = self._database.execute("SELECT SUM(size) FROM responses")
        if (size or 0) > self._most_bytes:
            self._database.execute(_LEAST_USED, (self._most_bytes,))
