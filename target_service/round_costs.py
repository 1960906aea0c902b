"""What a session's rounds take on this target, measured: from one commit to the next, by how they are made and by load.

So drafting, verification, waits and the host of both sides are in it. Figures are of rounds that most sessions made
alike; one session that is decoded plainly beside others that are drafted says little of a target that drafts for none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

Load = tuple[int, int]  # powers of two: sessions that generate, and tokens of all of them

NEWEST = 1 / 16  # weight of the newest round, once more than 16 are known
OUTLIER = 3.0  # times the mean: more is counted as this (another session's prompt, a graph that is captured)
STALE = 4096  # rounds of all sessions at a load, after which a figure that had no part in them is forgotten
LEAST_OF_STEP = 0.6  # of what a round that reads everything takes to verify: a plain one takes no less


@dataclass(frozen=True)
class Choice:
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

    def add(self, seconds: float, drafting: float, step: float, number: int) -> None:
        if self.rounds:
            seconds = min(seconds, OUTLIER * self.seconds)
        self.rounds, self.newest = self.rounds + 1, number
        weight = max(NEWEST, 1 / self.rounds)
        self.seconds += weight * (seconds - self.seconds)
        self.drafting += weight * (drafting - self.drafting)
        self.step += weight * (step - self.step)


@dataclass
class _AtLoad:
    rounds: int = 0
    figures: dict[Choice, _Figure] = field(default_factory=dict)


class RoundCosts:
    """Owns the figures of one target."""

    def __init__(self) -> None:
        self._loads: dict[Load, _AtLoad] = {}

    def add(self, load: Load, choice: Choice, seconds: float, drafting: float, step: float) -> None:
        """Take note of a round: from the commit before to its own, of which its draft and its step took so much."""
        here = self._loads.setdefault(load, _AtLoad())
        here.rounds += 1
        here.figures.setdefault(choice, _Figure()).add(seconds, drafting, step, here.rounds)

    def rounds(self, load: Load, choice: Choice) -> int:
        """Return how many rounds a figure rests on, 0 where there is none or it is stale."""
        here = self._loads.get(load)
        figure = here.figures.get(choice) if here else None
        return figure.rounds if here and figure and here.rounds - figure.newest < STALE else 0

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

    def least_plain_seconds(self, load: Load) -> float:
        """Return what a plain round takes at least, judged by steps that verify over everything; 0 if none is known."""
        steps = [self._loads[load].figures[c].step for c in self._known(load) if c.gamma and not c.sparse]
        return LEAST_OF_STEP * min(steps, default=0.0)

    def _known(self, load: Load) -> Iterable[Choice]:
        return [c for c in (self._loads[load].figures if load in self._loads else ()) if self.rounds(load, c)]
