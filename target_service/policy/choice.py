"""The choice of the plan by which all sessions of a target make their next rounds: the one of most tokens a second.

All sessions share one plan: where only some are drafted, they and the others wait for each other, and a step of the
draft takes the passes of its longest round. A plan whose costs are not known is tried for a few rounds, so seldom that
trials cost half a per cent of the time. A session whose proposals are hardly ever accepted pauses by itself.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from target_service.policy.acceptance import OF_DRAFT, OF_HELD, OF_SELF, Acceptance
from target_service.policy.costs import CostsAtLoad, CostTable
from target_service.policy.pace import TRIAL, Pace
from target_service.policy.plans import PLAIN, Load, Options, Proposer, RoundKind, RoundPlan, Verified
from target_service.policy.reading import DraftReading

log = logging.getLogger(__name__)

MARGIN, PLAIN_MARGIN = 0.02, 0.01  # by which another plan must be faster than the present one; by which plain must be
# By which sparse verification must be faster than exact rounds, for the quality that it costs: where its rounds were
# measured under such a load, and by their sizes alone, which say less of it.
SPARSE_MARGIN, UNMEASURED_MARGIN = 0.05, 0.25
DECIDED_EVERY = 8  # rounds of sessions between two choices, at least
DECIDED_APART = 0.03  # seconds between them: a choice takes the host a tenth of a short step
MOST_UNDECIDED = 32  # rounds after which a choice is due however little time has passed
TOKEN_COST = 0.06  # of a plain round: what a proposed token has to bring for a session to go on with proposals
POOLED_NEWEST, POOLED_ROUNDS = 1 / 64, 16  # weight of a round in the acceptance of all, for one session and for many
HELD_NEWEST, HELD_PRIOR = 1 / 512, 16  # weight of a judged held token; the number of them that the prior counts as
SESSION_PRIOR = 6  # rounds that the acceptance of all counts as in a session that begins
RETRIED_PRIOR = 16  # judged rounds, at most, that the acceptance of all counts as when proposing is tried again
BENEFIT_OF_DOUBT = 1.5  # standard errors of the expected tokens by which plain rounds must win before proposing ends
TRIED = 6  # rounds of each session that a plan is tried for
TRIAL_LIMIT = 8  # times TRIED rounds of each session, after which a trial ends in any case
USUAL_NEWEST = 1 / 64  # weight of the newest step in the usual load
LONGEST_STEP = 1.0  # seconds: what goes by beyond it is a pause between requests
TRIAL_SHARE = 0.005  # of the time that trials may cost
FIRST_TRIALS = 4  # rounds of each session that trials may cost at once
HELD_WAIT = 1024  # rounds of each session before holding is tried again that did not pay
SHORTEST_WAIT = 128  # rounds of each session before proposing is tried again that did not pay
LONGEST_WAIT = 8  # times as long, at most, after trials in vain


class Choice(NamedTuple):
    """A choice as it is explained to people."""

    plan: RoundPlan
    tokens_a_second: float
    """Of all sessions, as expected; in arbitrary units until a step is measured."""
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
    tokens: int
    """Tokens that they brought."""
    load: Load
    measured: tuple[Measured, ...] = ()
    """What its rounds took, of each kind; empty if that does not say what others will take."""


@dataclass
class _Trial:
    plan: RoundPlan
    bucket: tuple[int, int]
    left: float
    """Rounds of each session that are still to be made so."""
    limit: float
    """Rounds of each session, however made, after which it ends."""
    rate: float
    """Tokens a second of each session by the plan before it."""
    lost: float
    """Seconds that it was expected to lose, less the seconds that it has lost so far."""

    def is_made_by(self, kind: RoundKind) -> bool:
        return (kind.proposer, kind.gamma) == (self.plan.proposer, self.plan.gamma)


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
        self.acceptance = Acceptance([assumed if prior is None else prior] * max(1, *options.gammas, 1))
        self.held = Acceptance([OF_HELD], HELD_NEWEST, HELD_PRIOR)
        self._right = Acceptance([0.0], POOLED_NEWEST, prior_rounds=TRIED)  # of alternatives to rejected tokens
        self._alternatives = alternatives
        self._present = options.plans(Load(0, 0))[-1]
        self._trial: _Trial | None = None
        self._sessions = 1  # that generate
        self._usual: tuple[float, ...] | None = None  # sessions, tokens, skippable tokens of a step
        self._since = 0  # rounds since the last choice
        self._chosen = 0.0  # when the last step was committed before it
        self._rested = 0.0  # rounds of each session since proposing was tried, while nothing is proposed
        self._dense = 0.0  # rounds of each session since holding was tried, while nothing is held
        self.reading = DraftReading()  # of prompts, by a draft on the same device; a draft elsewhere leaves it empty
        self._ended = 0.0  # when the last step was committed
        self._saved: float | None = None  # seconds that trials may cost; None: nothing is measured yet
        self._in_vain = 0  # trials of proposing, since it paid
        self._held_in_vain = 0
        self.choice = Choice(self._present, 0.0, None, 0.0)

    @property
    def plan(self) -> RoundPlan:
        """The plan by which rounds are made now."""
        return self._present if self._trial is None else self._trial.plan

    # Sessions.

    def new_acceptance(self) -> Acceptance:
        """Return the acceptance of a session that begins: that of all sessions, as a prior."""
        return self.acceptance.copy(SESSION_PRIOR if self.acceptance.judged[0] else 0)

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
        newest = min(POOLED_NEWEST, 1 / (POOLED_ROUNDS * self._sessions))
        self.acceptance.note(proposed, accepted, left_out, newest)

    def note_alternative(self, gamma: int, accepted: int, right: bool) -> None:
        """Take note of a round that rejected a proposed token: whether an alternative to it was accepted."""
        if accepted < self._alternatives(gamma):
            self._right.note(1, int(right))

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
        elif not self.options.adaptive or self.acceptance.tokens(proposed) - 1 > 2 * least:
            self.counters["drafting_pauses"] += 1
            pace.acceptance.doubt()
            pace.trial = TRIAL
            pace.pause.begin(committed)

    # Steps.

    def note_step(self, ended: Ended) -> None:
        """Take note of a step, and choose anew if it is time to."""
        load, sessions = ended.load, max(1, ended.load.sessions)
        seconds, self._ended = min(LONGEST_STEP, max(0.0, ended.now - self._ended)), ended.now
        share = ended.rounds / sessions
        self._note_usual(load)
        self._since += ended.rounds
        self._rested = 0.0 if self.plan.gamma else self._rested + share
        self._dense = 0.0 if self.plan.held else self._dense + share
        for measured in ended.measured:
            self.costs.note(measured.kind, load, measured.seconds, measured.sessions)
        if self._trial is not None:
            trial = self._trial
            trial.lost -= seconds - ended.tokens / (sessions * trial.rate)
            trial.left -= share * any(trial.is_made_by(measured.kind) for measured in ended.measured)
            trial.limit -= share
            if min(trial.left, trial.limit) > 0 and trial.bucket == load.bucket:
                return
            self._saved = (self._saved or 0.0) + min(0.0, trial.lost)
            if not self._present.gamma:  # a trial is too short to show that proposing does not pay
                self._present = trial.plan
            self._trial, self._since = None, sessions + DECIDED_EVERY
        elif self._saved is not None:
            self._saved += TRIAL_SHARE * seconds
        apart = ended.now >= self._chosen + DECIDED_APART or self._since >= MOST_UNDECIDED
        if apart and self._since >= max(DECIDED_EVERY, sessions):
            self._chosen = ended.now
            self.choose(load)

    def choose(self, load: Load) -> None:
        """Choose the plan of most tokens a second under a load, or one to try."""
        self._since, self._sessions = 0, max(1, load.sessions)
        at = self.costs.at(load)
        rates = self._rates(at)
        best = max(rates, key=rates.__getitem__)
        present = self._present if self._present in rates else best
        margin = (MARGIN if best.gamma else PLAIN_MARGIN) + at.uncertainty(kinds_of(present, load)[-1])
        if best.gamma:
            self._in_vain = 0
        else:
            margin += BENEFIT_OF_DOUBT * self.acceptance.standard_error(present.gamma)
        if rates[best] > rates[present] * (1 + margin):
            present = best
        before, self._present = self.choice.plan, present  # a plan that was only tried since does not count
        changes = present != before
        if changes:
            self._held_in_vain = 0 if present.held else self._held_in_vain
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
        if others and self._trial is None and kinds_of(present, load)[-1] in at.known:
            self._try(rates, others, at)

    @property
    def serves_exactly(self) -> bool:
        """Whether approximate requests that come now are better served as exact ones, because rounds under the usual
        load bring about as many tokens a second or more if all sessions are exact.
        """
        if self._usual is None:
            return True
        sessions, tokens, skippable = map(round, self._usual)
        exact = Load(sessions, tokens, screened=sessions, skipped=skippable)
        approximate = Load(sessions, tokens, announcing=tokens)
        sparsely = self.costs.at(approximate)
        rates = self._rates(sparsely)
        best = max(rates, key=rates.__getitem__)
        is_measured = all(kind in sparsely.known for kind in kinds_of(best, approximate))
        margin = SPARSE_MARGIN if is_measured else UNMEASURED_MARGIN
        return max(self._rates(self.costs.at(exact)).values()) * (1 + margin) >= rates[best]

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

    def _rates(self, at: CostsAtLoad) -> dict[RoundPlan, float]:
        """Return the tokens a second of each session, on average, by plan.

        A draft on the same device reads the prompts too.
        """
        reading, rates = self.reading.seconds_a_token(at.load), dict[RoundPlan, float]()
        for plan in self.options.plans(at.load):
            rate = self._rate_of_rounds(plan, at)
            rates[plan] = 1 / (1 / rate + reading) if plan.drafted else rate
        return rates

    def _rate_of_rounds(self, plan: RoundPlan, at: CostsAtLoad) -> float:
        load, kinds = at.load, kinds_of(plan, at.load)
        if not plan.gamma:
            return 1 / at.seconds(kinds[0])
        proposed = 1 - load.pausing / max(1, load.sessions)
        tokens = self.acceptance.tokens(plan.gamma, self._alternatives(plan.gamma), self._right.chances[0])
        tokens = 1 + proposed * (tokens - 1)
        if len(kinds) == 1:
            return tokens / at.seconds(kinds[0])
        # From one dense pass to the next. Where held tokens are rejected, the round drafted behind them is lost too.
        chance, most = self.held.chances[0], max(tokens, plan.held - plan.gamma / 2)
        kept = chance**most
        confirmed = (1 - chance ** round(most)) / (1 - chance) if chance < 1 else most
        rounds = most / tokens + (1 - kept)
        screened = load.screened / load.sessions
        gained = screened * (kept * tokens + confirmed) + (1 - screened) * tokens * (rounds + 1)
        return gained / (rounds * at.seconds(kinds[0]) + at.seconds(kinds[1]))

    # Trials.

    def _try(self, rates: dict[RoundPlan, float], others: dict[RoundPlan, float], at: CostsAtLoad) -> None:
        """Begin to try a plan of unknown costs that could be the fastest, or one that did not pay before."""
        present, seconds = self._present, at.seconds(kinds_of(self._present, at.load)[-1])
        if self._saved is None:
            self._saved = FIRST_TRIALS * seconds
        doubts = {plan: _doubt(plan, at) for plan in others}
        doubted = {plan: rate * doubts[plan] for plan, rate in others.items() if doubts[plan] > 1}
        best = max(doubted, key=doubted.__getitem__, default=None)
        if best is not None and doubted[best] > rates[present]:
            lost = self._lost(best, rates, at)
            if lost <= self._saved:
                self._saved -= lost
                self._begin_trial(best, at.load, rates[present], lost)
                return
        if not present.gamma and self._rested >= SHORTEST_WAIT:
            again = max(others, key=others.__getitem__)
            lost = self._lost(again, rates, at)
            if lost * min(2**self._in_vain, LONGEST_WAIT) <= self._saved:
                self._in_vain, self._saved = self._in_vain + 1, 0.0
                self.acceptance = self.acceptance.copy(min(RETRIED_PRIOR, self.acceptance.judged[0]))
                self._begin_trial(again, at.load, rates[present], lost)
        elif not present.held and self._dense >= HELD_WAIT * min(2**self._held_in_vain, LONGEST_WAIT):
            self._dense, self._held_in_vain = 0.0, self._held_in_vain + 1
            self.held = Acceptance([max(OF_HELD, self.held.chances[0])], HELD_NEWEST, HELD_PRIOR)

    def _lost(self, plan: RoundPlan, rates: dict[RoundPlan, float], at: CostsAtLoad) -> float:
        """Return the seconds that trying a plan is expected to lose."""
        seconds = max(at.seconds(kind) for kind in kinds_of(plan, at.load))
        reading = self.reading.seconds_to_read(at.load.undrafted) if plan.drafted else 0.0
        return reading + TRIED * seconds * max(0.0, 1 - rates[plan] / rates[self._present])

    def _begin_trial(self, plan: RoundPlan, load: Load, rate: float, lost: float) -> None:
        self.counters["drafting_probes"] += 1
        self._rested = 0.0
        self._trial = _Trial(plan, load.bucket, TRIED, TRIAL_LIMIT * TRIED, rate, lost)


def kinds_of(plan: RoundPlan, load: Load) -> list[RoundKind]:
    """Return the kinds of rounds that a plan has under a load: one, or screening and then confirming rounds."""
    if not plan.gamma:
        return [RoundKind(Proposer.NOBODY, 0, Verified.DENSE)]
    if plan.held and load.screened:
        verified = [Verified.SCREENS, Verified.CONFIRMS]
    else:
        verified = [Verified.SPARSE if plan.sparse and load.announcing else Verified.DENSE]
    return [RoundKind(plan.proposer, plan.gamma, each) for each in verified]


def _doubt(plan: RoundPlan, at: CostsAtLoad) -> float:
    """Return how many times faster than estimated a plan may be."""
    return max(at.doubt(kind) for kind in kinds_of(plan, at.load))
