"""How long the target waits for a draft's proposal before it decodes a session plainly."""

LEAST_SECONDS, MOST_SECONDS = 1.0, 30.0
_GENEROUS = 4  # times the longest recent measurement
_KEPT = 0.95  # of the longest, with each further measurement: after 60 of them little is left


class Patience:
    """A multiple of the longest recent step or round of a draft: a slow machine waits as long as its rounds take, and a
    fast one soon notices that a draft has stopped.
    """

    def __init__(self, given: float) -> None:
        """given: a fixed wait in seconds; 0: by what was measured."""
        self._given, self._longest = given, 0.0

    def note(self, seconds: float) -> None:
        """Take note of the time of a step, of a draft's round, or of a wait for a proposal."""
        self._longest = max(min(seconds, MOST_SECONDS), _KEPT * self._longest)

    @property
    def seconds(self) -> float:
        """Seconds to wait."""
        return self._given or min(max(LEAST_SECONDS, _GENEROUS * self._longest), MOST_SECONDS)
