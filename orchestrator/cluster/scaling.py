"""How many targets there are to be, by how loaded those are that serve. Pure: the clock is the caller's.

The settings are Ray Serve's: a least and a most number, the load of a target, and how long more or fewer must be wanted
before anything changes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specahead.config import ClusterSettings


class TargetLoad(NamedTuple):
    """How loaded a target is. kv_use: share of its KV room that is taken. wait: seconds that a new session waits."""

    kv_use: float
    wait: float


@dataclass(frozen=True)
class Scaling:
    """The least and the most targets; the share of KV room that is to be in use and the seconds that a session may
    wait, on average over the targets; and for how many seconds more, or fewer, targets must be wanted until there are.
    """

    least: int
    most: int
    kv_use: float
    wait: float
    out_delay: float
    in_delay: float


def scaling_of(settings: ClusterSettings) -> Scaling | None:
    """Return how a launch scales; None if it always has as many targets as it begins with."""
    asked, least = settings.autoscaling, max(1, settings.targets)
    if asked.max_targets <= least:
        return None
    return Scaling(least, asked.max_targets, asked.kv_use, asked.wait, asked.out_delay, asked.in_delay)


def wanted(loads: Sequence[TargetLoad], scaling: Scaling) -> int:
    """Return how many targets should share this load: as many as its KV needs, and while sessions wait not fewer than
    there are, or more in proportion, twice as many at most."""
    present = len(loads)
    by_kv = math.ceil(sum(load.kv_use for load in loads) / scaling.kv_use - 1e-9)
    wait = sum(load.wait for load in loads) / max(1, present) / scaling.wait
    by_wait = math.ceil(present * min(2.0, wait)) if wait > 1 else present if wait > 0.5 else 0
    return min(scaling.most, max(scaling.least, by_kv, by_wait))


@dataclass
class Scaler:
    """Decides how many targets there should be; owns the number that is wanted, and since when.

    Of all numbers above (below) the present one that were wanted during a delay, the nearest to it is chosen.
    """

    scaling: Scaling
    _wanted: int = field(default=0, init=False)
    _direction: int = field(default=0, init=False)
    _since: float = field(default=0.0, init=False)

    def decide(self, loads: Sequence[TargetLoad], present: int, now: float) -> int:
        """Return how many targets there are to be from now on.

        loads: of the serving targets. present: targets, starting ones included. now: in seconds.
        """
        number = wanted(loads, self.scaling) if loads else max(present, self.scaling.least)
        direction = (number > present) - (number < present)
        if direction != self._direction:
            self._direction, self._wanted, self._since = direction, number, now
        self._wanted = (max if direction < 0 else min)(self._wanted, number)
        delay = self.scaling.in_delay if direction < 0 else self.scaling.out_delay
        if direction == 0 or now - self._since < delay:
            return present
        self._direction = 0
        return self._wanted
