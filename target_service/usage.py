"""The requests and tokens of callers on a target: each orchestrator learns what a key uses through the others."""

import time
from collections import Counter, deque
from collections.abc import Callable

from specahead.wire.messages import CallerUsage, ServedEvent
from target_service.admission import Admission

_WINDOW = 60  # seconds


class CallerTokens:
    """Counts the tokens of callers, in prompts and in answers."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()  # since the start
        self._recent: deque[tuple[int, Counter[str]]] = deque()  # by second

    def add(self, caller: str, tokens: int) -> None:
        """Count tokens of a caller; requests without a key have none."""
        if not caller:
            return
        second = int(time.monotonic())
        if not self._recent or self._recent[-1][0] != second:
            self._recent.append((second, Counter()))
        self._recent[-1][1][caller] += tokens
        self.total[caller] += tokens

    def of_last_minute(self) -> Counter[str]:
        """Return the tokens of the last minute, by caller."""
        oldest = int(time.monotonic()) - _WINDOW
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
        return sum((each for _, each in self._recent), Counter())


class StreamUsage:
    """What callers use through all other orchestrators, for the one orchestrator that owns the sessions of `emit`."""

    def __init__(self, admission: Admission, tokens: CallerTokens, emit: Callable[[ServedEvent], None]) -> None:
        self._admission, self._tokens, self._emit = admission, tokens, emit
        self._own: Counter[str] = Counter()
        self._told = tokens.total - tokens.of_last_minute()  # its first report covers the last minute

    def add(self, caller: str, tokens: int) -> None:
        """Count tokens of this orchestrator's own."""
        self._own[caller] += tokens
        self._tokens.add(caller, tokens)

    def report(self) -> list[CallerUsage]:
        """Return the requests that run through the others, and their tokens since the last report."""
        if not self._tokens.total:
            return []
        everyone = self._admission.everyone()
        requests = Counter(
            each.asked.caller for each in everyone if each.asked.emit != self._emit and not each.asked.choice
        )
        others = self._tokens.total - self._own
        fresh, self._told = others - self._told, others
        return [CallerUsage(caller, requests[caller], fresh[caller]) for caller in sorted({*requests, *fresh} - {""})]
