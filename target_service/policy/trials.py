"""Trials: a plan whose costs are not known is made for a few rounds, so seldom that trials are expected to cost half a
per cent of the time. So is one that did not pay before, since acceptance and loads change.
"""

from collections import Counter
from dataclasses import dataclass

from target_service.policy.costs import CostsAtLoad, Ended
from target_service.policy.gains import Gains, kinds_of
from target_service.policy.plans import Load, RoundKind, RoundPlan

TRIED = 4  # rounds of each session that a plan is tried for
TRIAL_LIMIT = 3  # times TRIED rounds of each session, after which a trial ends in any case
TRIAL_SHARE = 0.005  # of the time that trials may cost
FIRST_TRIALS = 4  # rounds of each session that trials may cost at once
HELD_WAIT = 1024  # rounds of each session before holding is tried again that did not pay
SHORTEST_WAIT = 128  # rounds of each session before proposing is tried again that did not pay
LONGEST_WAIT = 8  # times as long, at most, after trials in vain


@dataclass
class _Trial:
    plan: RoundPlan
    bucket: tuple[int, int]
    left: float
    """Rounds of each session that are still to be made so."""
    limit: float
    """Rounds of each session, however made, after which it ends."""

    def is_made_by(self, kind: RoundKind) -> bool:
        return (kind.proposer, kind.gamma) == (self.plan.proposer, self.plan.gamma)


class Trials:
    """The trial of one policy, and how much time trials may cost. Counts trials in `counters`, as drafting_probes."""

    def __init__(self, gains: Gains, counters: Counter[str]) -> None:
        self._gains, self._counters = gains, counters
        self._trial: _Trial | None = None
        self._saved: float | None = None  # seconds that trials may cost; None: nothing is measured yet
        self._rested = 0.0  # rounds of each session since proposing was tried, while nothing is proposed
        self._dense = 0.0  # rounds of each session since holding was tried, while nothing is held
        self._in_vain = 0  # trials of proposing, since it paid
        self._held_in_vain = 0

    @property
    def plan(self) -> RoundPlan | None:
        """The plan that is being tried; None if there is no trial."""
        return None if self._trial is None else self._trial.plan

    def note_step(self, ended: Ended, seconds: float, plan: RoundPlan) -> bool:
        """Take note of a step that took `seconds` by a plan. Returns whether it has ended a trial."""
        sessions = max(1, ended.load.sessions)
        share = ended.rounds / sessions
        self._rested = 0.0 if plan.gamma else self._rested + share
        self._dense = 0.0 if plan.held else self._dense + share
        trial = self._trial
        if trial is None:
            if self._saved is not None:
                self._saved += TRIAL_SHARE * seconds
            return False
        trial.left -= share * any(trial.is_made_by(measured.kind) for measured in ended.measured)
        trial.limit -= share
        if min(trial.left, trial.limit) > 0 and trial.bucket == ended.load.bucket:
            return False
        self._trial = None
        return True

    def note_paid(self, proposing: bool, holding: bool) -> None:
        """Let the next trials of proposing, or of holding, come as soon as the first ones did, since it paid."""
        self._in_vain = 0 if proposing else self._in_vain
        self._held_in_vain = 0 if holding else self._held_in_vain

    def begin_if_due(self, rates: dict[RoundPlan, float], present: RoundPlan, at: CostsAtLoad) -> None:
        """Begin to try a plan of unknown costs that could be the fastest, or one that did not pay before.

        rates: the tokens a second of each session, by plan, that of the present one among them.
        """
        if self._trial is not None:
            return
        others = {plan: rate for plan, rate in rates.items() if plan != present}
        if self._saved is None:
            self._saved = FIRST_TRIALS * at.seconds(kinds_of(present, at.load)[-1])
        doubts = {plan: _doubt(plan, at) for plan in others}
        doubted = {plan: rate * doubts[plan] for plan, rate in others.items() if doubts[plan] > 1}
        best = max(doubted, key=doubted.__getitem__, default=None)
        if best is not None and doubted[best] > rates[present]:
            lost = self._lost(best, rates, present, at)
            if lost <= self._saved:
                self._saved -= lost
                self._begin(best, at.load)
                return
        if not present.gamma and self._rested >= SHORTEST_WAIT:
            again = max(others, key=others.__getitem__)
            lost = self._lost(again, rates, present, at)
            if lost * min(2**self._in_vain, LONGEST_WAIT) <= self._saved:
                self._in_vain, self._saved = self._in_vain + 1, 0.0
                self._gains.doubt_acceptance()
                self._begin(again, at.load)
        elif not present.held and self._dense >= HELD_WAIT * min(2**self._held_in_vain, LONGEST_WAIT):
            self._dense, self._held_in_vain = 0.0, self._held_in_vain + 1
            self._gains.doubt_held()

    def _lost(self, plan: RoundPlan, rates: dict[RoundPlan, float], present: RoundPlan, at: CostsAtLoad) -> float:
        """Return the seconds that trying a plan is expected to lose."""
        seconds = max(at.seconds(kind) for kind in kinds_of(plan, at.load))
        reading = self._gains.reading.seconds_to_read(at.load.undrafted) if plan.drafted else 0.0
        return reading + TRIED * seconds * max(0.0, 1 - rates[plan] / rates[present])

    def _begin(self, plan: RoundPlan, load: Load) -> None:
        self._counters["drafting_probes"] += 1
        self._rested = 0.0
        self._trial = _Trial(plan, load.bucket, TRIED, TRIAL_LIMIT * TRIED)


def _doubt(plan: RoundPlan, at: CostsAtLoad) -> float:
    """Return how many times faster than estimated a plan may be."""
    return max(at.doubt(kind) for kind in kinds_of(plan, at.load))
