"""Who sends wrong keys again and again has to wait, longer each time: a key cannot be found by trying many."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from specahead.wire.errors import ResourceExhausted

FREE = 10  # wrong keys from an address that cost nothing
LONGEST = 60.0  # seconds that one more of them costs at most
_FORGOTTEN_AFTER = 600.0  # seconds without a wrong key
_MOST_ADDRESSES = 10_000


@dataclass
class _Wrong:
    count: int = 0
    last: float = 0.0
    until: float = 0.0


class WrongKeys:
    """Counts the wrong keys of each address. Of very many addresses those are remembered that sent one last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_address: OrderedDict[str, _Wrong] = OrderedDict()

    def check(self, address: str) -> None:
        """Raise ResourceExhausted while an address has to wait."""
        found = self._by_address.get(address)
        if found is not None and (left := found.until - self._clock()) > 0:
            seconds = math.ceil(left)
            raise ResourceExhausted(
                f"{found.count} wrong API keys came from this address; try again in {seconds} s", retry_after=seconds
            )

    def add(self, address: str) -> None:
        """Count a wrong key. From the eleventh on the address has to wait: 1 s, 2 s, 4 s and so on, up to LONGEST."""
        now = self._clock()
        found = self._by_address.setdefault(address, _Wrong())
        self._by_address.move_to_end(address)
        if now - found.last > _FORGOTTEN_AFTER:
            found.count = 0
        found.count, found.last = found.count + 1, now
        if found.count > FREE:
            found.until = now + min(LONGEST, 2.0 ** min(found.count - FREE - 1, 10))
        if len(self._by_address) > _MOST_ADDRESSES:
            self._by_address.popitem(last=False)
