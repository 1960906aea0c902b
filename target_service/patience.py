"""How long the target waits for a draft's proposal before it decodes plainly."""

LEAST_SECONDS, MOST_SECONDS = 1.0, 30.0
_GENEROUS = 4  # times the longest that was measured lately
_KEPT = 0.95  # of what was the longest, with each further one: after 60 it counts for nothing


class Patience:
    """What recent steps of the target and rounds of its drafts took, several times: so that a slow machine waits as
    long as its rounds take, and a fast one notices soon that a draft has stopped.

    given: seconds that it is to be in any case; 0: none are given.
    """

    def __init__(self, given: float = 0.0) -> None:
        self._given, self._longest = given, 0.0

    def note(self, seconds: float) -> None:
        """Take note of what a step, or a round of a draft, took, or of how long a proposal was waited for."""
        self._longest = max(min(seconds, MOST_SECONDS), _KEPT * self._longest)

    @property
    def seconds(self) -> float:
        """How long to wait, from now on."""
        return self._given or min(max(LEAST_SECONDS, _GENEROUS * self._longest), MOST_SECONDS)
