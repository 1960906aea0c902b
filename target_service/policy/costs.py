"""The costs of rounds on one target: by sizes before anything is measured, then as measured under each load.

A round's time is from one commit of a session to its next, so drafting, verification, waits and the host of both sides
are in it. A figure is kept as a multiple of what the target's step takes by its sizes, since the loads of a bucket
differ by up to twice.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from specahead.kernels.linear import MOST_ROWS
from target_service.policy.plans import Load, RoundKind
from target_service.policy.sizes import Sizes

NEWEST = 1 / 16  # weight of the newest round of all sessions, once more than 16 are known
OUTLIER = 3.0  # times the mean: more counts as this (another session's prompt, a graph that is captured)
SETTLED = 2  # rounds of each session before a figure counts; one that is such an outlier is forgotten
STALE = 1024  # rounds of each session in a bucket without a new one of a kind, after which its figure does not count
# How many times faster than estimated a round may turn out to be: one of a kind that was never measured, one that was
# measured under other loads alone, and one of another number of tokens than was measured here.
NEVER_SEEN, SEEN_ELSEWHERE, SEEN_NEAR = 1.5, 1.15, 1.06
MOST_SESSIONS_APART = 4  # times: with far more sessions arithmetic may decide what a step takes, with few memory
UNSETTLED = 0.4  # how much faster another plan must be than one of two rounds; by more rounds less


class Measured(NamedTuple):
    """What the rounds of one step took, of the sessions whose last two were made alike."""

    kind: RoundKind
    seconds: float
    """From one commit to the next, on average."""
    sessions: int
    """Sessions whose rounds these are."""


class Ended(NamedTuple):
    """A step that has been committed."""

    now: float
    """When, in seconds."""
    rounds: int
    """Rounds that it had."""
    load: Load
    measured: tuple[Measured, ...] = ()
    """What its rounds took, of each kind; empty if that does not say what others will take."""


@dataclass(slots=True)
class _Figure:
    """Means over the rounds of a kind in a bucket of loads."""

    seconds: float = 0.0
    """What a round takes."""
    target: float = 0.0
    """The size of the target's part of these rounds (Sizes.target)."""
    drafting: float = 0.0
    """The size of the draft's passes of these rounds (Sizes.drafting)."""
    rounds: float = 0.0
    """Rounds of each session that it rests on."""
    newest: float = 0.0
    """The number of the newest one among all rounds of each session in the bucket."""

    def add(self, seconds: float, target: float, drafting: float, rounds: float, number: float) -> None:
        if self.rounds:
            usual = self.seconds * target / self.target
            if self.rounds <= SETTLED and OUTLIER * seconds < usual:
                self.rounds = 0.0  # a graph was captured in the first ones
            else:
                seconds = min(seconds, OUTLIER * usual)
        self.rounds, self.newest = self.rounds + rounds, number
        weight = max(min(1.0, rounds * NEWEST), rounds / self.rounds)
        self.seconds += weight * (seconds - self.seconds)
        self.target += weight * (target - self.target)
        self.drafting += weight * (drafting - self.drafting)

    def per_size(self, draft_pass: float) -> float:
        """Return the seconds for a unit of size. draft_pass: what a unit of the draft's passes takes."""
        return self.seconds / (self.target + draft_pass * self.drafting)


class _Newest(NamedTuple):
    """What rounds of a kind took under the last load at which they were measured."""

    figure: _Figure
    sessions: int
    """Sessions of that load."""

    def says_of(self, sessions: int) -> bool:
        """Return whether it holds for rounds of `sessions` sessions as well."""
        return max(self.sessions, sessions) < MOST_SESSIONS_APART * min(self.sessions, sessions)


@dataclass(slots=True)
class _Bucket:
    rounds: float = 0.0
    figures: dict[RoundKind, _Figure] = field(default_factory=dict)


class CostTable:
    """Owns the figures of one target."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._buckets: defaultdict[tuple[int, int], _Bucket] = defaultdict(_Bucket)
        self._newest: dict[RoundKind, _Newest] = {}
        self._unit = 1.0  # seconds for a unit of size, of the rounds that were measured last

    def note(self, kind: RoundKind, load: Load, seconds: float, rounds: int) -> None:
        """Take note of the rounds of a step, which took `seconds` on average. rounds: of how many sessions."""
        here, share = self._buckets[load.bucket], rounds / max(1, load.sessions)
        here.rounds += share
        figure = here.figures.setdefault(kind, _Figure())
        figure.add(seconds, self.sizes.target(kind, load), self.sizes.drafting(kind, load), share, here.rounds)
        if figure.rounds > SETTLED:
            self._unit = figure.per_size(self.sizes.draft_pass)
            self._newest[kind] = _Newest(figure, load.sessions)

    def at(self, load: Load) -> "CostsAtLoad":
        """Return what rounds take under a load."""
        here = self._buckets.get(load.bucket, _Bucket())
        known = {
            kind: figure
            for kind, figure in here.figures.items()
            if figure.rounds > SETTLED and here.rounds - figure.newest < STALE
        }
        scales = {
            kind: newest.figure.per_size(self.sizes.draft_pass)
            for kind, newest in self._newest.items()
            if newest.says_of(load.sessions)
        }
        return CostsAtLoad(self.sizes, load, known, scales, self._unit)


@dataclass(frozen=True)
class CostsAtLoad:
    """What rounds take under one load."""

    sizes: Sizes
    load: Load
    known: dict[RoundKind, _Figure]
    """The figures of the load's bucket."""
    scales: dict[RoundKind, float]
    """Seconds for what sizes say, as measured under loads with about as many sessions."""
    unit: float = 1.0
    """The same of all kinds where `scales` is empty; 1 while nothing is measured."""
    estimates: dict[RoundKind, float] = field(default_factory=dict)
    """What `seconds` has returned; plans share kinds."""

    def seconds(self, kind: RoundKind) -> float:
        """Return the seconds of a round: measured, or by how its size differs from that of a measured kind.

        In tokens of KV that can be read meanwhile while nothing is measured.
        """
        if kind not in self.estimates:
            self.estimates[kind] = self._estimate(kind)
        return self.estimates[kind]

    def _estimate(self, kind: RoundKind) -> float:
        size = self.sizes.round(kind, self.load)
        if not self.known:
            return size * self._scale(kind)
        nearest = min(self.known, key=lambda other: _distance(kind, other))
        measured = size * self.known[nearest].per_size(self.sizes.draft_pass)
        return measured if nearest == kind else measured * self._scale(kind) / self._scale(nearest)

    def doubt(self, kind: RoundKind) -> float:
        """Return how many times faster than estimated a round may be."""
        if kind in self.known:
            return 1.0
        if kind in self.scales:
            return SEEN_ELSEWHERE
        near, far = (any(kind[::2] == other[::2] for other in seen) for seen in (self.known, self.scales))
        doubt = SEEN_NEAR if near else SEEN_ELSEWHERE if far else NEVER_SEEN
        # Reading the weights takes the same however few rows a step has, but many rows take longer with each.
        most = max((other.gamma for other in self.known), default=0)
        rows, measured = self.load.sessions * (kind.gamma + 1), self.load.sessions * (most + 1)
        return doubt * max(1.0, measured / max(MOST_ROWS, rows))

    def uncertainty(self, kind: RoundKind) -> float:
        """Return by which share another plan must be faster beyond the usual margin, since few rounds of this kind were
        measured.
        """
        if not self.scales:
            return 0.0
        return UNSETTLED / (SETTLED + (self.known[kind].rounds if kind in self.known else 0.0))

    def _scale(self, kind: RoundKind) -> float:
        if not self.scales:
            return self.unit
        return self.scales[min(self.scales, key=lambda other: _distance(kind, other))]


def _distance(kind: RoundKind, other: RoundKind) -> tuple[bool, bool, int]:
    """Return how much two kinds differ; kinds that verify alike are the nearest."""
    return kind.verified is not other.verified, kind.proposer is not other.proposer, abs(kind.gamma - other.gamma)
