"""What an orchestrator is told of the target: its load, and which prefixes it has KV of."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from engine.kv.prefix_index import PrefixIndex
from target_service.admission import Admission
from wire.messages import Report, ServedEvent

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
    """Makes the reports for one orchestrator, which owns the sessions of `emit`. opens: sessions that it asked for."""

    def __init__(
        self,
        admission: Admission,
        reading: ReadingRate,
        prefixes: PrefixIndex,
        emit: Callable[[ServedEvent], None],
        peer: str,
    ) -> None:
        self.opens = 0
        self._admission, self._reading, self._prefixes = admission, reading, prefixes
        self._emit, self._peer = emit, peer
        self._changed = prefixes.watch()
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
        report = replace(
            self._admission.room(self._emit, self._peer),
            number=self._number,
            opens=self.opens,
            tokens_per_second=self._reading.per_second,
            indexed=[hash for hash in changed if hash in held],
            evicted=[hash for hash in changed if hash not in held],
        )
        return [report]

    def close(self) -> None:
        """Take note of nothing any more."""
        self._prefixes.unwatch(self._changed)
