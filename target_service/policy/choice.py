"""The choice of the plan by which all sessions of a target make their next rounds: the one of most tokens a second.

All sessions share one plan: where only some are drafted, they and the others wait for each other, and a step of the
draft takes the passes of its longest round. A session whose proposals are hardly ever accepted pauses by itself.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from target_service.policy.acceptance import OF_DRAFT, OF_SELF, Acceptance
from target_service.policy.costs import CostTable, Ended
from target_service.policy.gains import Gains, kinds_of
from target_service.policy.pace import TRIAL, Pace
from target_service.policy.plans import PLAIN, Load, Options, Proposer, RoundKind, RoundPlan, Verified
from target_service.policy.trials import Trials

log = logging.getLogger(__name__)

MARGIN = 0.005  # by which another plan must be faster than the present one
# By which sparse verification must be faster than exact rounds, for the quality that it costs: where its rounds were
# measured under such a load, and by their sizes alone, which say less of it.
SPARSE_MARGIN, UNMEASURED_MARGIN = 0.05, 0.25
DECIDED_EVERY = 8  # rounds of sessions between two choices, at least
DECIDED_APART = 0.03  # seconds between them: a choice takes the host a tenth of a short step
MOST_UNDECIDED = 32  # rounds after which a choice is due however little time has passed
TOKEN_COST = 0.06  # of a plain round: what a proposed token has to bring for a session to go on with proposals
SESSION_PRIOR = 6  # rounds that the acceptance of all counts as in a session that begins
BENEFIT_OF_DOUBT = 1.5  # standard errors of the expected tokens by which plain rounds must win before proposing ends
USUAL_NEWEST = 1 / 64  # weight of the newest step in the usual load
LONGEST_STEP = 1.0  # seconds: what goes by beyond it is a pause between requests


class Choice(NamedTuple):
    """A choice as it is explained to people."""

    plan: RoundPlan
    tokens_a_second: float
    """Of all sessions, as expected, without what prompt lookup copies at length; in arbitrary units until a step is
    measured.
    """
    runner_up: RoundPlan | None
    """The next best plan; None if there is no other."""
    runner_up_tokens: float

    @property
    def gauges(self) -> dict[str, float]:
        """The choice in numbers, by the names that a service's status has for them."""
        other = self.runner_up or self.plan
        return {
            "plan_proposer": self.plan.proposer,
            "plan_gamma": self.plan.gamma,
            "plan_sparse": self.plan.sparse,
            "plan_held": self.plan.held,
            "plan_tokens_per_second": self.tokens_a_second,
            "runner_up_proposer": other.proposer,
            "runner_up_gamma": other.gamma,
            "runner_up_sparse": other.sparse,
            "runner_up_held": other.held,
            "runner_up_tokens_per_second": self.runner_up_tokens,
        }

    def __str__(self) -> str:
        said = f"{self.plan}: {self.tokens_a_second:,.0f} tokens a second expected"
        return said if self.runner_up is None else f"{said}; next {self.runner_up}: {self.runner_up_tokens:,.0f}"


class Policy:
    """Chooses the plan of all sessions. One for each target."""

    def __init__(
        self,
        options: Options,
        costs: CostTable,
        counters: Counter[str],
        alternatives: Callable[[int], int] = lambda gamma: 0,
        prior: float | None = None,
    ) -> None:
        """counters: drafting_probes and drafting_pauses are counted here. alternatives: how many alternatives may run
        beside γ tokens. prior: the chance of a proposed token to be accepted; None: the one assumed of the proposer.
        """
        self.options, self.costs, self.counters = options, costs, counters
        assumed = OF_SELF if options.proposer is Proposer.SELF else OF_DRAFT
        self.gains = Gains(assumed if prior is None else prior, max(1, *options.gammas, 1), alternatives)
        self._trials = Trials(self.gains, counters)
        self._present = options.plans(Load(0, 0))[-1]
        self._usual: tuple[float, ...] | None = None  # sessions, tokens, skippable tokens of a step
        self._since = 0  # rounds since the last choice
        self._chosen = 0.0  # when the last step was committed before it
        self._ended = 0.0  # when the last step was committed
        self.choice = Choice(self._present, 0.0, None, 0.0)

    @property
    def plan(self) -> RoundPlan:
        """The plan by which rounds are made now."""
        return self._trials.plan or self._present

    # Sessions.

    def new_acceptance(self) -> Acceptance:
        """Return the acceptance of a session that begins: that of all sessions, as a prior."""
        acceptance = self.gains.acceptance
        return acceptance.copy(SESSION_PRIOR if acceptance.judged[0] else 0)

    def plan_of(self, pace: Pace, committed: int, announces: bool) -> RoundPlan:
        """Return how a session makes its next round. committed: the number of its tokens. announces: whether it takes
        announcements.
        """
        plan = self.plan
        if not plan.gamma or pace.pause.lasts(committed):
            return PLAIN
        return plan if announces or not plan.sparse else RoundPlan(plan.proposer, plan.gamma, held=plan.held)

    def note_round(self, pace: Pace, proposed: int, accepted: int, left_out: int = 0) -> None:
        """Take note of a session's round with proposals.

        accepted: proposed tokens, without an alternative. left_out: the last proposed tokens, which were not judged.
        """
        pace.acceptance.note(proposed, accepted, left_out)
        self.gains.note_round(proposed, accepted, left_out)

    def pause_if_useless(self, pace: Pace, proposed: int, committed: int, cost: float = 0.0) -> None:
        """Have a session pause if its own proposals are hardly ever accepted.

        If those of all sessions are, the policy ends proposing for all of them instead. A session that reads announced
        blocks does not pause, since it would read everything without them.
        cost: the time that proposing takes, in plain rounds; 0: TOKEN_COST for each proposed token.
        """
        pace.trial = max(0, pace.trial - 1)
        if pace.trial or (pace.next_round.sparse and self.options.adaptive):
            return
        gained, least = pace.acceptance.tokens(proposed) - 1, cost or TOKEN_COST * proposed
        if gained >= least:
            if pace.acceptance.judged[0] > 2 * TRIAL:
                pace.pause.paid()
        elif not self.options.adaptive or self.gains.acceptance.tokens(proposed) - 1 > 2 * least:
            self.counters["drafting_pauses"] += 1
            pace.acceptance.doubt()
            pace.trial = TRIAL
            pace.pause.begin(committed)

    # Steps.

    def note_step(self, ended: Ended) -> None:
        """Take note of a step, and choose anew if it is time to."""
        load, sessions = ended.load, max(1, ended.load.sessions)
        seconds, self._ended = min(LONGEST_STEP, max(0.0, ended.now - self._ended)), ended.now
        self._note_usual(load)
        self._since += ended.rounds
        for measured in ended.measured:
            self.costs.note(measured.kind, load, measured.seconds, measured.sessions)
        if self._trials.note_step(ended, seconds, self.plan):
            self._since = sessions + DECIDED_EVERY
        if self._trials.plan is not None:
            return
        apart = ended.now >= self._chosen + DECIDED_APART or self._since >= MOST_UNDECIDED
        if apart and self._since >= max(DECIDED_EVERY, sessions):
            self._chosen = ended.now
            self.choose(load)

    def choose(self, load: Load, beginning: int = 0) -> None:
        """Choose the plan of most tokens a second under a load, or one to try. beginning: its sessions that begin."""
        self._since, self.gains.sessions = 0, max(1, load.sessions)
        self.gains.begin_sessions(beginning)
        at = self.costs.at(load)
        rates = self.gains.rates(self.options.plans(load), at)
        best = max(rates, key=rates.__getitem__)
        present = self._present if self._present in rates else best
        margin = MARGIN + at.uncertainty(kinds_of(present, load)[-1])
        if not best.gamma:
            margin += BENEFIT_OF_DOUBT * self.gains.acceptance.standard_error(present.gamma)
        if rates[best] > rates[present] * (1 + margin):
            present = best
        before, self._present = self.choice.plan, present  # a plan that was only tried since does not count
        changes = present != before
        self._trials.note_paid(proposing=present.gamma > 0, holding=changes and present.held > 0)
        if changes:
            self.counters["drafting_pauses"] += bool(before.gamma) and not present.gamma
        others = {plan: rate for plan, rate in rates.items() if plan != present}
        second = max(others, key=others.__getitem__, default=None)
        self.choice = Choice(
            present,
            load.sessions * rates[present],
            second,
            load.sessions * others[second] if second is not None else 0.0,
        )
        if changes:
            log.debug("rounds are made otherwise from now on: %s", self.choice)
        if others and kinds_of(present, load)[-1] in at.known:
            self._trials.begin_if_due(rates, present, at)

    @property
    def serves_exactly(self) -> bool:
        """Whether approximate requests that come now are better served as exact ones, because rounds under the usual
        load bring about as many tokens a second or more if all sessions are exact.
        """
        if self._usual is None:
            return True
        sessions, tokens, skippable = map(round, self._usual)
        guessing = sessions if self.options.guesses else 0
        exact = Load(sessions, tokens, screened=sessions, skipped=skippable, guessing=guessing)
        approximate = Load(sessions, tokens, announcing=tokens)
        sparsely = self.costs.at(approximate)
        rates = self.gains.rates(self.options.plans(approximate), sparsely)
        best = max(rates, key=rates.__getitem__)
        is_measured = all(kind in sparsely.known for kind in kinds_of(best, approximate))
        margin = SPARSE_MARGIN if is_measured else UNMEASURED_MARGIN
        exactly = self.gains.rates(self.options.plans(exact), self.costs.at(exact))
        return max(exactly.values()) * (1 + margin) >= rates[best]

    def dense_per_sparse(self, load: Load) -> float:
        """Return how many times as long a round of the present plan takes under a load if it reads everything, as one
        that reads sparsely.
        """
        at, plan = self.costs.at(load), self.plan
        dense, sparse = (RoundKind(plan.proposer, plan.gamma, each) for each in (Verified.DENSE, Verified.SPARSE))
        return at.seconds(dense) / at.seconds(sparse)

    def _note_usual(self, load: Load) -> None:
        now = float(load.sessions), float(load.tokens), float(load.skippable)
        before = self._usual or now
        self._usual = tuple(old + USUAL_NEWEST * (new - old) for old, new in zip(before, now, strict=True))
