"""When a target's verdicts come, and when the next ones are expected."""

from dataclasses import dataclass

_ONE_STEP = 0.0005  # seconds between two verdicts of one step, at most
_NEWEST = 1 / 4  # weight of the newest gap in the mean
_LATE = 0.6  # gaps after the expected time, from which on verdicts are no longer waited for


@dataclass
class VerdictTimes:
    """Times in seconds by time.perf_counter."""

    latest: float = 0.0
    """When the latest verdicts came; 0: none has come."""
    gap: float = 0.0
    """Mean time between two steps of the target that gave verdicts; 0: not known yet."""

    def note(self, now: float) -> None:
        """Take up the time of a verdict."""
        since = now - self.latest
        if self.latest and since > _ONE_STEP:
            self.gap += (_NEWEST if self.gap else 1.0) * (since - self.gap)
        self.latest = now

    def put_off_until(self, now: float, seconds: float) -> float:
        """Return until when to wait for verdicts, if they are expected within `seconds` from now; else 0."""
        expected = self.latest + self.gap
        latest = expected + _LATE * self.gap
        return latest if now < latest and now + seconds > expected else 0.0
