"""A clock for tests, which stands still."""


class Clock:
    """Stands in for the `time` of a module."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now
