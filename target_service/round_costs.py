"""What a session's rounds take on this target, measured: from one commit to the next, by how they are made and by load.

So drafting, verification, waits and the host of both sides are in it. Figures are of rounds that most sessions made
alike; one session that is decoded plainly beside others that are drafted says little of a target that drafts for none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from specahead.kernels.linear import MOST_ROWS

Load = tuple[int, int]  # powers of two: sessions that generate, and tokens of all of them

NEWEST = 1 / 16  # weight of the newest round of all sessions, once more than 16 are known
OUTLIER = 3.0  # times the mean: more is counted as this (another session's prompt, a graph that is captured)
SETTLED = 2  # rounds of each session that a figure needs to count; of these, one that is such an outlier is forgotten
STALE = 4096  # rounds of all sessions at a load, after which a figure that had no part in them is forgotten,
TRIED_IN = 600  # or as many of each session that trying it again, six rounds each, costs a hundredth of their time
# Of what a round that reads everything takes to verify: a plain one takes no less, unless the step runs more than
# MOST_ROWS, beyond which it takes longer with each.
LEAST_OF_STEP = 0.6


class Choice(NamedTuple):
    """How rounds are made. gamma: tokens drafted, 0: none. sparse: whether only what the draft announces is read."""

    gamma: int
    sparse: bool = False


PLAIN = Choice(0)


@dataclass
class _Figure:
    """Means over rounds, in seconds. newest: the number of the newest one at its load."""

    rounds: int = 0
    seconds: float = 0.0
    drafting: float = 0.0
    step: float = 0.0
    newest: int = 0

    def add(self, seconds: float, drafting: float, step: float, number: int, sessions: int, rounds: int) -> None:
        """Take note of so many rounds of as many of the sessions."""
        if self.rounds <= SETTLED * sessions and OUTLIER * seconds < self.seconds:
            self.rounds = 0  # a draft in another process captured a graph in the first ones
        if self.rounds:
            seconds, step = min(seconds, OUTLIER * self.seconds), min(step, OUTLIER * self.step)
        self.rounds, self.newest = self.rounds + rounds, number
        weight = max(min(1.0, rounds * NEWEST / sessions), rounds / self.rounds)
        self.seconds += weight * (seconds - self.seconds)
        self.drafting += weight * (drafting - self.drafting)
        self.step += weight * (step - self.step)


@dataclass
class _AtLoad:
    """Figures at one load. fastest: seconds of the one that takes least."""

    rounds: int = 0
    figures: dict[Choice, _Figure] = field(default_factory=dict)
    fastest: float = 0.0


class RoundCosts:
    """Owns the figures of one target."""

    def __init__(self) -> None:
        self._loads: dict[Load, _AtLoad] = {}

    def add(self, load: Load, choice: Choice, seconds: float, drafting: float, step: float, rounds: int = 1) -> None:
        """Take note of a round: from the commit before to its own, of which its draft and its step took so much; and of
        others of its step that were like it, `rounds` in all.
        """
        here = self._loads.setdefault(load, _AtLoad())
        here.rounds += rounds
        of_round = seconds, drafting, step, here.rounds, sessions_of(load), rounds
        here.figures.setdefault(choice, _Figure()).add(*of_round)
        here.fastest = min(each.seconds for each in here.figures.values())

    def rounds(self, load: Load, choice: Choice) -> int:
        """Return how many rounds a figure rests on; 0 where there is none, or one that is too new or stale."""
        here = self._loads.get(load)
        figure = here.figures.get(choice) if here else None
        if here is None or figure is None:
            return 0
        sessions = sessions_of(load)
        lasts = max(STALE, TRIED_IN * sessions * figure.seconds / here.fastest)
        counts = figure.rounds > SETTLED * sessions and here.rounds - figure.newest < lasts
        return figure.rounds if counts else 0

    def last(self, load: Load, choice: Choice) -> float | None:
        """Return what a round took when it was last made so at a load, however long ago; else as `estimate` does."""
        figure = self._loads[load].figures.get(choice) if load in self._loads else None
        return figure.seconds if figure is not None else self.estimate(load, choice)

    def seconds(self, load: Load, choice: Choice) -> float | None:
        """Return what a round takes: as measured, or for another γ than was measured by what a pass of the draft takes.

        None where nothing is known that it follows from.
        """
        if self.rounds(load, choice):
            return self._loads[load].figures[choice].seconds
        known = [other for other in self._known(load) if other.gamma and other.sparse == choice.sparse]
        if not choice.gamma or not known:
            return None
        nearest = min(known, key=lambda other: abs(other.gamma - choice.gamma))
        figure = self._loads[load].figures[nearest]
        a_pass = figure.drafting / (nearest.gamma + 1)
        return max(figure.step, figure.seconds + (choice.gamma - nearest.gamma) * a_pass)

    def estimate(self, load: Load, choice: Choice) -> float | None:
        """Return what a round takes, as `seconds` does; where that is not known here, by a load beside this one.

        That is twice or half as large, so that its figure is scaled by how another one differs that both have.
        """
        seconds = self.seconds(load, choice)
        if seconds is not None:
            return seconds
        for other in filter(self._loads.__contains__, _beside(load)):
            there = self.seconds(other, choice)
            both = [known for known in self._known(load) if self.rounds(other, known)]
            if there is not None and both:
                here, known = self._loads[load], self._loads[other]
                return there * here.figures[both[0]].seconds / known.figures[both[0]].seconds
        return None

    def least_plain_seconds(self, load: Load) -> float:
        """Return what a plain round takes at least, judged by steps that verify over everything; 0 if none is known."""
        least = [
            self._loads[load].figures[c].step * min(1.0, MOST_ROWS / (sessions_of(load) * (c.gamma + 1)))
            for c in self._known(load)
            if c.gamma and not c.sparse
        ]
        return LEAST_OF_STEP * min(least, default=0.0)

    def _known(self, load: Load) -> Iterable[Choice]:
        return [c for c in (self._loads[load].figures if load in self._loads else ()) if self.rounds(load, c)]


def sessions_of(load: Load) -> int:
    """Return about how many sessions generate at a load."""
    return max(1, 1 << load[0] >> 1)


def _beside(load: Load) -> list[Load]:
    """Return the loads with about as many sessions and tokens, the nearest first."""
    sessions, tokens = load
    return [(sessions + a, tokens + b) for a, b in _NEAR]


_NEAR = sorted(
    ((a, b) for a in (0, -1, 1) for b in (0, -1, 1) if (a, b) != (0, 0)), key=lambda each: abs(each[0]) + abs(each[1])
)
