"""What an orchestrator is told of the target: its load, and which prefixes it has KV of."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from specahead.engine.kv.prefix_index import PrefixIndex
from specahead.wire.messages import Report, ServedEvent
from target_service.admission import Admission
from target_service.orphaned_sessions import LeftSessions
from target_service.usage import CallerTokens, StreamUsage

REPORT_SECONDS = 0.1
MOST_HASHES = 1 << 16  # of a report


@dataclass
class ReadingRate:
    """Prompt tokens read and the seconds of their steps, of the last steps that had much to read."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a step; the older ones count the less."""
        self.tokens = 0.9 * self.tokens + tokens
        self.seconds = 0.9 * self.seconds + seconds

    @property
    def per_second(self) -> float:
        """Return the tokens read a second; 0 if nothing was counted."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Reporter:
    """Makes the reports for one orchestrator, which owns the sessions of `emit`. opens: sessions that it asked for.
    usage: counts what its callers use, too.
    """

    def __init__(
        self,
        admission: Admission,
        reading: ReadingRate,
        prefixes: PrefixIndex,
        emit: Callable[[ServedEvent], None],
        left: LeftSessions,
        tokens: CallerTokens,
    ) -> None:
        self.opens = 0
        self.usage = StreamUsage(admission, tokens, emit)
        self._admission, self._reading, self._prefixes, self._emit = admission, reading, prefixes, emit
        self._left = left
        self._changed, self._moved = prefixes.watch(), left.watch()
        self._number, self._due_at = 0, 0.0

    def due(self) -> list[Report]:
        """Return the next report, none if the last one was REPORT_SECONDS ago or less."""
        now = time.monotonic()
        if self._number and now < self._due_at:
            return []
        self._due_at, self._number = now + REPORT_SECONDS, self._number + 1
        changed = list(islice(self._changed, MOST_HASHES))  # what is left comes with the next one
        self._changed.difference_update(changed)
        held = self._prefixes.hashes
        self._left.expire()
        moved, left = sorted(self._moved), self._left.names
        self._moved.clear()
        report = replace(
            self._admission.room(self._emit),
            number=self._number,
            opens=self.opens,
            tokens_per_second=self._reading.per_second,
            indexed=[hash for hash in changed if hash in held],
            evicted=[hash for hash in changed if hash not in held],
            left=[name for name in moved if name in left],
            taken=[name for name in moved if name not in left],
            usage=self.usage.report(),
        )
        return [report]

    def hurry(self) -> None:
        """Let the next report be due at once: what it says has changed so that requests may be taken that were not."""
        self._due_at = 0.0

    def close(self) -> None:
        """Take note of nothing any more."""
        self._prefixes.unwatch(self._changed)
        self._left.unwatch(self._moved)
