"""How each session's next rounds are made: how many tokens are drafted, if any, and whether announcements are read.

The decision is `choose`, a pure function of what tokens cost by the figures there are: the session's own acceptance
(acceptance.py) and what rounds take on this target at the present load (round_costs.py). With `--gamma auto` these are
measured, and what nothing is known of is tried now and then by all sessions together, for a few rounds. With a number
every round drafts so many tokens, and a session whose draft is of hardly any use is decoded plainly for a while, by
a cost that is assumed.

After drafting that did not pay a session does without for 16 tokens, and each time for twice as many, up to 512; with
measured costs for so many more that trying again costs a hundredth of the time.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from target_service.acceptance import Acceptance
from target_service.round_costs import PLAIN, Choice, Load, RoundCosts

MARGIN = 0.05  # by which another way of drafting must be faster than the present one
PLAIN_MARGIN = 0.01  # by which going without a draft must be
ASSUMED_COST = 0.06  # of a drafted token, in plain rounds, where costs are not measured
FIRST_PAUSE, LONGEST_PAUSE = 16, 512  # tokens
TRIAL = 4  # rounds that drafting gets after a pause, before it is judged
TRIAL_SHARE = 0.01  # of the time, that trials may cost where costs are measured
PROBED = 4  # rounds of each session that a figure needs to count
FIRST_GAMMA = 4  # where nothing is known yet
TYPICAL_NEWEST = 1 / 64  # weight of the newest round in what is typical of all sessions
TYPICAL_ROUNDS = 6  # rounds that what is typical counts as in a session that begins
TRIED_SESSIONS = 16  # of so many sessions one begins with a draft even where that typically does not pay


@dataclass(frozen=True)
class Pace:
    """What is decided for a session, and what it is decided by.

    choice: how its rounds are made while it is not paused. trial: rounds that are still to be drafted before that is
    judged. next_pause: tokens that the next pause lasts. paused_until: the number of committed tokens at which the last
    pause ends. kind: how its last round was made, None before the first.
    """

    choice: Choice
    acceptance: Acceptance
    trial: int = 0
    next_pause: int = FIRST_PAUSE
    paused_until: int = 0
    kind: Choice | None = None

    def paused(self, committed: int, least: int = 0) -> "Pace":
        """Return the pace at the start of a pause of at least so many tokens, when `committed` tokens are committed."""
        longer = min(2 * self.next_pause, LONGEST_PAUSE)
        prior, until = self.acceptance.as_prior(), committed + max(self.next_pause, least)
        return replace(self, acceptance=prior, trial=TRIAL, next_pause=longer, paused_until=until)

    def is_paused(self, committed: int) -> bool:
        """Return whether a session of so many committed tokens goes without a draft."""
        return committed < self.paused_until


UNDECIDED = Pace(PLAIN, Acceptance((), ()))


def choose(present: Choice, rates: Mapping[Choice, float]) -> Choice:
    """Return the choice of most tokens a second.

    The present one stays where no other one is faster by its margin. It also stays where its own rate is not known, so
    that it gets to be.
    """
    if present not in rates:
        return present
    faster = {
        choice: rate
        for choice, rate in rates.items()
        if rate > rates[present] * (1 + (MARGIN if choice.gamma else PLAIN_MARGIN))
    }
    return max(faster, key=faster.__getitem__, default=present)


def gammas(most: int) -> list[int]:
    """Return the numbers of tokens that a round may draft: powers of two, and the most."""
    return sorted({*(1 << i for i in range(most.bit_length())), most})


@dataclass(frozen=True)
class RoundSeen:
    """What the controller is told of a round.

    kind: how it was made; gamma is the number of proposed tokens. accepted: of these. committed: tokens of the session
    after it. seconds: since the commit before; None where something else than rounds lay between. drafting, step: what
    its draft and its step took. announces: whether its session takes announcements. cost: plain rounds that
    drafting adds to it, where that is known without measuring.
    """

    kind: Choice
    accepted: int
    committed: int
    seconds: float | None
    drafting: float
    step: float
    announces: bool
    cost: float = 0.0


class Controller:
    """Decides for all sessions of a target. most: tokens that a round drafts, at most. adaptive: whether by measured
    costs; else every round drafts `most`.
    """

    def __init__(self, most: int, adaptive: bool, counters: Counter[str]) -> None:
        self.costs = RoundCosts()
        self.probe: Choice | None = None  # what all sessions try
        self._probe_left, self._probe_load = 0, (0, 0)
        self._most, self._adaptive, self._counters = most, adaptive, counters
        self._typical = Acceptance.assumed(most)
        self._opened = 0

    def first_pace(self, load: Load, committed: int, announces: bool) -> Pace:
        """Return how a session begins: in the way that is the fastest by what is typical of the others.

        Where no figure tells of drafting it is drafted, so that there will be one.
        """
        self._opened += 1
        if not self._adaptive:
            return Pace(Choice(self._most, announces), Acceptance.assumed(self._most))
        pace = Pace(Choice(min(self._most, FIRST_GAMMA), announces), self._typical.as_prior(TYPICAL_ROUNDS))
        rates = self._rates(load, pace, announces)
        plain = rates.pop(PLAIN, 0.0)
        if not rates:
            return pace
        pace = replace(pace, choice=max(rates, key=rates.__getitem__))
        if rates[pace.choice] >= plain or self._opened % TRIED_SESSIONS == 0:
            return pace
        return replace(pace, next_pause=LONGEST_PAUSE).paused(committed, self._least_pause(pace, load))

    def effective(self, pace: Pace, committed: int) -> Choice:
        """Return how a session's next round is to be made."""
        if pace.is_paused(committed):
            return PLAIN
        return pace.choice if self.probe is None else self.probe

    def after_round(self, pace: Pace, seen: RoundSeen, load: Load, others: Counter[Choice]) -> Pace:
        """Return the pace after a round. others: how many sessions' last rounds were made in each way, its own among
        them.
        """
        kind, before = seen.kind, pace.kind
        pace = replace(pace, kind=kind)
        if kind.gamma:
            known = pace.acceptance.after_round(kind.gamma, seen.accepted)
            self._typical = self._typical.after_round(kind.gamma, seen.accepted, TYPICAL_NEWEST)
            pace = replace(pace, acceptance=known, trial=max(0, pace.trial - 1))
        if not self._adaptive:
            gained, cost = pace.acceptance.tokens(self._most) - 1, seen.cost or ASSUMED_COST * self._most
            useless = kind.gamma and gained < cost and not pace.trial
            return self._pause(pace, seen.committed, 0) if useless else pace
        if kind == before and seen.seconds and 2 * others[kind] >= others.total():
            self.costs.add(load, kind, seen.seconds, seen.drafting, seen.step)
        self._advance_probe(pace, seen, load, others.total())
        if pace.is_paused(seen.committed) or pace.trial or self.probe is not None:
            return pace
        return self._decide(pace, seen, load)

    def _decide(self, pace: Pace, seen: RoundSeen, load: Load) -> Pace:
        choice = choose(pace.choice, self._rates(load, pace, seen.announces))
        if choice == PLAIN:
            return self._pause(pace, seen.committed, self._least_pause(pace, load))
        settled = pace.acceptance.judged[0] > 2 * TRIAL
        return replace(pace, choice=choice, next_pause=FIRST_PAUSE if settled else pace.next_pause)

    def _pause(self, pace: Pace, committed: int, least: int) -> Pace:
        self._counters["drafting_pauses"] += 1
        return pace.paused(committed, least)

    def _least_pause(self, pace: Pace, load: Load) -> int:
        """Return the tokens without a draft after which trying it again, in vain, costs no more than TRIAL_SHARE."""
        drafted, plain = self.costs.seconds(load, pace.choice), self.costs.seconds(load, PLAIN)
        return round(TRIAL * max(0.0, drafted / plain - 1) / TRIAL_SHARE) if drafted and plain else 0

    def _rates(self, load: Load, pace: Pace, announces: bool) -> dict[Choice, float]:
        """Return the tokens a second of each choice of which the seconds are known."""
        options = [Choice(gamma, sparse) for gamma in gammas(self._most) for sparse in {False, announces}]
        seconds = {option: self.costs.seconds(load, option) for option in [PLAIN, *options]}
        tokens = pace.acceptance.tokens
        return {option: tokens(option.gamma) / cost for option, cost in seconds.items() if cost}

    # What is tried.

    def _advance_probe(self, pace: Pace, seen: RoundSeen, load: Load, sessions: int) -> None:
        """Begin to try what nothing is known of, go on, or end."""
        if self.probe is not None:
            self._probe_left -= 1
            if self._probe_left <= 0 or load != self._probe_load:
                self.probe = None
            return
        present = pace.choice
        if self.costs.rounds(load, present) < PROBED * max(1, sessions) or seen.kind != present:
            return
        for option in self._unknown(pace, seen.announces, load):
            self._counters["drafting_probes"] += 1
            self.probe, self._probe_left, self._probe_load = option, (PROBED + 2) * sessions, load
            return

    def _unknown(self, pace: Pace, announces: bool, load: Load) -> Iterable[Choice]:
        """Yield the ways without a figure that could be faster than the present one."""
        seconds = self.costs.seconds(load, pace.choice)
        assert seconds is not None
        rate = pace.acceptance.tokens(pace.choice.gamma) / seconds
        if not self.costs.rounds(load, PLAIN) and self.costs.least_plain_seconds(load) * rate < 1:
            yield PLAIN
        other = Choice(pace.choice.gamma, not pace.choice.sparse)
        if announces and self.costs.seconds(load, other) is None:
            yield other
