"""Reports to an orchestrator: the target's load, and the prefixes that it has KV of."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from specahead.engine.kv.prefix_index import PrefixIndex
from specahead.wire.messages import Report, ServedEvent
from target_service.admission import Admission
from target_service.orphaned_sessions import OrphanedSessions

REPORT_SECONDS = 0.1
MOST_HASHES = 1 << 16  # of a report


@dataclass
class ReadingRate:
    """Prompt tokens read and the seconds of their steps, of the last steps that had much to read."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a step; older steps count less."""
        self.tokens = 0.9 * self.tokens + tokens
        self.seconds = 0.9 * self.seconds + seconds

    @property
    def per_second(self) -> float:
        """Return the prompt tokens read a second; 0 before the first step."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Reporter:
    """Makes the reports for one orchestrator, which owns the sessions of `emit`."""

    def __init__(
        self,
        admission: Admission,
        reading: ReadingRate,
        prefixes: PrefixIndex,
        emit: Callable[[ServedEvent], None],
        orphans: OrphanedSessions,
    ) -> None:
        self.opens = 0  # sessions that the orchestrator asked for
        self._admission, self._reading, self._prefixes, self._emit = admission, reading, prefixes, emit
        self._orphans = orphans
        self._changed, self._moved = prefixes.watch(), orphans.watch()
        self._number, self._due_at = 0, 0.0

    def due(self) -> list[Report]:
        """Return the next report; an empty list if the last one was made less than REPORT_SECONDS ago."""
        now = time.monotonic()
        if self._number and now < self._due_at:
            return []
        self._due_at, self._number = now + REPORT_SECONDS, self._number + 1
        changed = list(islice(self._changed, MOST_HASHES))  # the rest comes with the next report
        self._changed.difference_update(changed)
        held = self._prefixes.hashes
        self._orphans.expire()
        moved, orphans = sorted(self._moved), self._orphans.names
        self._moved.clear()
        report = replace(
            self._admission.room(self._emit),
            number=self._number,
            opens=self.opens,
            tokens_per_second=self._reading.per_second,
            indexed=[hash for hash in changed if hash in held],
            evicted=[hash for hash in changed if hash not in held],
            left=[name for name in moved if name in orphans],
            taken=[name for name in moved if name not in orphans],
        )
        return [report]

    def hurry(self) -> None:
        """Let the next report be due at once, since the target can take requests now that it could not take before."""
        self._due_at = 0.0

    def close(self) -> None:
        """Stop watching for changes."""
        self._prefixes.unwatch(self._changed)
        self._orphans.unwatch(self._moved)
