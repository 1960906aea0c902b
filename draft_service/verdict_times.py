"""When a target's verdicts come, and when the next ones are expected."""

from dataclasses import dataclass

_TOGETHER = 0.0005  # seconds between verdicts of one step, at most
_NEWEST = 1 / 4  # weight of the newest gap
_LATE = 0.6  # gaps; what is later than expected by more is no longer waited for


@dataclass
class VerdictTimes:
    """latest: when the latest verdicts came, in seconds; 0: never. gap: the seconds between two of the target's steps
    that gave verdicts, as a running mean; 0: not known yet.
    """

    latest: float = 0.0
    gap: float = 0.0

    def note(self, now: float) -> None:
        """Take note of a verdict."""
        since = now - self.latest
        if self.latest and since > _TOGETHER:
            self.gap += (_NEWEST if self.gap else 1.0) * (since - self.gap)
        self.latest = now

    def put_off_until(self, now: float, seconds: float) -> float:
        """Return the time until which something that takes so many seconds should not begin, since verdicts are
        expected before it would end; 0 if they are not.
        """
        expected = self.latest + self.gap
        latest = expected + _LATE * self.gap
        return latest if now < latest and now + seconds > expected else 0.0
