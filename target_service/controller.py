"""How each session's next rounds are made: how many tokens are drafted, if any, and whether announcements are read.

By the figures there are: acceptance (acceptance.py) and what rounds take on this target at the present load
(round_costs.py). Without a stated γ these are measured. Whether to draft, and how many tokens, all sessions decide
together, by what is typical of them: a few that are drafted beside others that are not cost both, the ones a wait for
the others' steps, the others a pause between theirs; and a step of the draft takes as many passes as the session has
that drafts most. A session that differs much from the others may go without a draft alone, or alone with one. What
nothing is known of is tried now and then by all together, for a few rounds.

With a number every round drafts so many tokens, and a session whose draft is of hardly any use is decoded plainly for a
while, by a cost that is assumed. After drafting that did not pay it does without for 16 tokens, and each time for twice
as many, up to 512; with measured costs for so many more that trying again costs a hundredth of the time.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from specahead.engine.steps.rounds.requests import gammas
from target_service.acceptance import Acceptance
from target_service.round_costs import PLAIN, Choice, Load, RoundCosts, sessions_of

MARGIN = 0.05  # by which another way of drafting must be faster than the present one
PLAIN_MARGIN = 0.01  # by which going without a draft must be
ODD = 0.25  # by which a session's tokens a round must differ from what is typical, to decide by itself over drafting
ODD_ROUNDS = 16  # after so many rounds
ALIKE = 7 / 8  # of the sessions, which must draft as many tokens for the time of their rounds to be a figure
ASSUMED_COST = 0.06  # of a drafted token, in plain rounds, where costs are not measured
FIRST_PAUSE, LONGEST_PAUSE = 16, 512  # tokens
TRIAL = 4  # rounds that drafting gets after a pause, before it is judged
TRIAL_SHARE = 0.01  # of the time, that trials may cost where costs are measured
HOPED = 0.7  # of the tokens that were accepted before, which are counted on then
ASSUMED_TRIAL = 2.0  # plain rounds that a drafted one takes, where loads like the present one have no figure of it
PROBED = 4  # rounds of each session that a figure needs to count
FIRST_GAMMA = 4  # where nothing is known yet
TYPICAL_NEWEST = 1 / 64  # weight of the newest round in what is typical of all sessions
TYPICAL_ROUNDS = 6  # rounds that what is typical counts as in a session that begins
READING_FORGOTTEN = 1 / 512  # of what the draft has read for, in a round of each session
SETTLED = 8  # times as many are seen before what can be estimated is tried, or drafting where nothing is drafted
SHORTEST_PAUSE = 128  # rounds of each session that draft nothing, before drafting is tried again
LONGEST_WAIT = 8  # times as long, at most, before it is tried the next time without gain
PROBE_LIMIT = 8  # times the rounds that a probe needs, after which it ends in any case


@dataclass(frozen=True)
class Pace:
    """What is decided for a session, and what it is decided by.

    choice: how its rounds are made while it is not paused. trial: rounds that are still to be drafted before that is
    judged. next_pause: tokens that the next pause lasts. paused_until: the number of committed tokens at which the last
    pause ends. alone: whether that pause is for its own acceptance's sake; else all sessions pause. kind: how its last
    round was made, None before the first.
    """

    choice: Choice
    acceptance: Acceptance
    trial: int = 0
    next_pause: int = FIRST_PAUSE
    paused_until: int = 0
    alone: bool = True
    kind: Choice | None = None

    def judged(self, acceptance: Acceptance) -> "Pace":
        """Return the pace after a round that was drafted, by which the acceptance is this."""
        # Said of each session in each step: replace() takes several times as long.
        trial = max(0, self.trial - 1)
        return Pace(self.choice, acceptance, trial, self.next_pause, self.paused_until, self.alone, self.kind)

    def paused(self, committed: int, least: int = 0) -> "Pace":
        """Return the pace at the start of a pause of at least so many tokens, when `committed` tokens are committed."""
        longer = min(2 * self.next_pause, LONGEST_PAUSE)
        prior, until = self.acceptance.as_prior(), committed + max(self.next_pause, least)
        return replace(self, acceptance=prior, trial=TRIAL, next_pause=longer, paused_until=until, alone=True)

    def paused_with_all(self, committed: int) -> "Pace":
        """Return the pace in a pause of all sessions, which lasts on as long as this is said after each round."""
        until = committed + FIRST_PAUSE
        return Pace(self.choice, self.acceptance, 0, self.next_pause, until, alone=False, kind=self.kind)

    def resumed(self, committed: int) -> "Pace":
        """Return the pace at the end of a pause."""
        goes_on = not self.trial and self.paused_until <= committed
        return self if goes_on else replace(self, trial=0, paused_until=min(self.paused_until, committed))

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


class RoundSeen(NamedTuple):
    """What the controller is told of a round.

    kind: how it was made; gamma is the number of proposed tokens. accepted: of these. committed: tokens of the session
    after it. seconds: since the commit before; None where something else than rounds lay between. drafting, step: what
    its draft and its step took. All of them for each time that weights and KV of its step are as large as the weights,
    so that loads which count as the same compare. announces: whether its session takes announcements. cost: plain
    rounds that drafting adds to it, where that is known without measuring. alternative: whether the last token that was
    accepted is an alternative to what was drafted. left_out: proposed tokens that were not judged, for want of room.
    """

    kind: Choice
    accepted: int
    committed: int
    seconds: float | None
    drafting: float
    step: float
    announces: bool
    cost: float = 0.0
    alternative: bool = False
    left_out: int = 0


class Controller:
    """Decides for all sessions of a target. most: tokens that a round drafts, at most. adaptive: whether by measured
    costs; else every round drafts `most`. beside: how many alternatives may run beside so many drafted tokens.
    """

    def __init__(
        self, most: int, adaptive: bool, counters: Counter[str], beside: Callable[[int], int] = lambda gamma: 0
    ) -> None:
        self.costs = RoundCosts()
        self.probe: Choice | None = None  # what all sessions try
        self._probe_left, self._probe_limit, self._probe_load = 0, 0, (0, 0)
        self._most, self._adaptive, self._counters = most, adaptive, counters
        self._typical = Acceptance.assumed(most)
        # How often an alternative was right, of the rejected tokens that may have one. In many rounds none run (beside
        # prompts, without a draft on the same device), which counts as wrong.
        self._beside, self._right, self._rejected = beside, 0.0, 0
        # Of sessions that take announcements, and of those that do not: how they are drafted, and whether none is.
        self._choice = {announces: Choice(min(most, FIRST_GAMMA), announces) for announces in (False, True)}
        self._plain = {False: False, True: False}
        self._until_decided = {False: 0, True: 0}  # rounds of such sessions until that is decided again, once a step
        # How often drafting has been tried again since, without gain, by load.
        self._in_vain: defaultdict[Load, int] = defaultdict(int)
        self._read_for = 0.0  # what a draft on the same device has read for of late, at most since it was tried again
        self._rested = {False: 0.0, True: 0.0}  # rounds of each such session without a draft since
        # Rounds of the present step for which that of the next such session speaks as well.
        self._like_it = {False: 0, True: 0}

    def first_pace(self, committed: int, announces: bool) -> Pace:
        """Return how a session begins: as the others go on, by what is typical of them."""
        if not self._adaptive:
            return Pace(Choice(self._most, announces), Acceptance.assumed(self._most))
        pace = Pace(self._choice[announces], self._typical.as_prior(TYPICAL_ROUNDS))
        return pace.paused_with_all(committed) if self._plain[announces] else pace

    def effective(self, pace: Pace, committed: int) -> Choice:
        """Return how a session's next round is to be made."""
        if pace.is_paused(committed):
            return PLAIN
        return pace.choice if self.probe is None else self.probe

    def note_reading(self, seconds: float) -> None:
        """Take note that a draft on the same device has read prompts for so long, in the measure of RoundSeen."""
        self._read_for += max(0.0, seconds)

    def goes_on_resting(self, pace: Pace, announces: bool) -> bool:
        """Return whether a session whose round was plain goes on without a draft as all others do: one session of a
        step speaks for all these (`after_round`), since deciding for each takes the host long where there are many.
        """
        rests = self._adaptive and self.probe is None and self._plain[announces] and not pace.alone
        if not rests or pace.kind != PLAIN or pace.acceptance.judged[0] >= ODD_ROUNDS:
            return False
        self._until_decided[announces] -= 1
        goes_on = self._until_decided[announces] > 0
        self._like_it[announces] += goes_on
        return goes_on

    def after_round(self, pace: Pace, seen: RoundSeen, load: Load, others: Counter[Choice]) -> Pace:
        """Return the pace after a round. others: how many sessions' last rounds were made in each way, its own among
        them.
        """
        kind, before, rounds = seen.kind, pace.kind, 1 + self._like_it[seen.announces]
        self._like_it[seen.announces] = 0
        pace = pace if kind == before else replace(pace, kind=kind)
        if kind.gamma:
            accepted = max(0, seen.accepted - seen.alternative)
            if accepted < kind.gamma - seen.left_out:  # else none was rejected
                self._note_alternative(kind.gamma, accepted, seen.alternative)
            known = pace.acceptance.after_round(kind.gamma, accepted, left_out=seen.left_out)
            self._typical = self._typical.after_round(kind.gamma, accepted, TYPICAL_NEWEST, seen.left_out)
            pace = pace.judged(known)
        if not self._adaptive:
            gained, cost = self._tokens(pace.acceptance, kind.gamma) - 1, seen.cost or ASSUMED_COST * kind.gamma
            useless = kind.gamma and gained < cost and not pace.trial
            return self._pause(pace, seen.committed, 0) if useless else pace
        # Beside others that are drafted a plain round takes longer than where nothing is, since then steps go ahead. A
        # draft's step takes as many passes as the one of its rounds that drafts most.
        sessions = others.total()
        alike = sum(count for other, count in others.items() if other.gamma == kind.gamma)
        is_typical = alike >= (ALIKE if kind.gamma else 1) * sessions
        if kind == before and seen.seconds and is_typical:
            # The sessions share their steps: what one chooses to read costs the others as well.
            sparse = any(other.sparse for other in others)
            self.costs.add(load, Choice(kind.gamma, sparse), seen.seconds, seen.drafting, seen.step, rounds)
        rested = self._rested[seen.announces]
        self._rested[seen.announces] = 0.0 if kind.gamma else rested + rounds / max(1, sessions)
        self._read_for *= 1 - READING_FORGOTTEN * rounds / max(1, sessions)
        self._advance_probe(pace, seen, load, sessions)
        if self.probe is None:
            return self._decide(pace, seen, load, sessions)
        if pace.alone and pace.is_paused(seen.committed):
            return pace
        # A draft that went on beside plain rounds would take its part of their time: for these it ends.
        return pace.resumed(seen.committed) if self.probe.gamma else pace.paused_with_all(seen.committed)

    def _decide(self, pace: Pace, seen: RoundSeen, load: Load, sessions: int) -> Pace:
        is_odd = self._is_odd(pace)
        self._until_decided[seen.announces] -= 1
        if self._until_decided[seen.announces] <= 0:
            self._decide_for_all(load, seen.announces)
            self._until_decided[seen.announces] = sessions
        if self._plain[seen.announces] and not (is_odd and self._pays_alone(pace, load)):
            self._counters["drafting_pauses"] += not pace.is_paused(seen.committed)
            return pace.paused_with_all(seen.committed)
        if pace.is_paused(seen.committed) and pace.alone:
            return pace
        if not self._plain[seen.announces]:
            pace, choice = pace.resumed(seen.committed), self._choice[seen.announces]
            pace = pace if choice == pace.choice else replace(pace, choice=choice)
        if pace.trial:
            return pace
        if is_odd:
            rates = self._rates(load, pace.acceptance, seen.announces)
            choices = rates if self._plain[seen.announces] else {pace.choice, PLAIN}
            choice = choose(pace.choice, {each: rate for each, rate in rates.items() if each in choices})
            if choice == PLAIN:
                return self._pause(pace, seen.committed, self._least_pause(pace, load))
            pace = replace(pace, choice=choice)
        is_settled = pace.acceptance.judged[0] > 2 * TRIAL and pace.next_pause != FIRST_PAUSE
        return replace(pace, next_pause=FIRST_PAUSE) if is_settled else pace

    def _decide_for_all(self, load: Load, announces: bool) -> None:
        """Decide whether such sessions draft, where there are figures for both, and how."""
        rates = self._rates(load, self._typical, announces)
        plain, drafted = rates.pop(PLAIN, 0.0), max(rates.values(), default=0.0)
        if plain and drafted:
            margin = MARGIN if self._plain[announces] else -PLAIN_MARGIN
            self._plain[announces] = drafted <= plain * (1 + margin)
            if not self._plain[announces]:
                self._in_vain.clear()
        self._choice[announces] = choose(self._choice[announces], rates)

    def _tokens(self, acceptance: Acceptance, gamma: int) -> float:
        """Return how many tokens a round is expected to commit, by alternatives as well."""
        return acceptance.tokens(gamma, self._beside(gamma), self._right)

    def _note_alternative(self, gamma: int, accepted: int, right: bool) -> None:
        """Take note of a round that accepted so many drafted tokens, and maybe an alternative to the next one."""
        if accepted < self._beside(gamma):
            self._rejected += 1
            self._right += max(TYPICAL_NEWEST, 1 / (TYPICAL_ROUNDS + self._rejected)) * (right - self._right)

    def _is_odd(self, pace: Pace) -> bool:
        """Return whether a session is known to differ much from the others."""
        if pace.acceptance.judged[0] < ODD_ROUNDS:
            return False
        own, typical = pace.acceptance.tokens(self._most), self._typical.tokens(self._most)
        return abs(own / typical - 1) > ODD

    def _pays_alone(self, pace: Pace, load: Load) -> bool:
        """Return whether all sessions together gain by one that is drafted while the others are not: these wait for it,
        as their steps do not go ahead then.
        """
        plain, drafted = (self.costs.estimate(load, choice) for choice in (PLAIN, pace.choice))
        if not plain or not drafted:
            return False
        sessions, own = sessions_of(load), self._tokens(pace.acceptance, pace.choice.gamma)
        return (sessions - 1 + own) / drafted > (1 + MARGIN) * sessions / plain

    def _pause(self, pace: Pace, committed: int, least: int) -> Pace:
        self._counters["drafting_pauses"] += 1
        return pace.paused(committed, least)

    def _least_pause(self, pace: Pace, load: Load) -> int:
        """Return the tokens without a draft after which trying it again, in vain, costs no more than TRIAL_SHARE."""
        drafted, plain = self.costs.seconds(load, pace.choice), self.costs.seconds(load, PLAIN)
        return round(TRIAL * max(0.0, drafted / plain - 1) / TRIAL_SHARE) if drafted and plain else 0

    def _rates(self, load: Load, acceptance: Acceptance, announces: bool) -> dict[Choice, float]:
        """Return the tokens a second of each choice of which the seconds are known."""
        options = [Choice(gamma, sparse) for gamma in gammas(self._most) for sparse in {False, announces}]
        seconds = {option: self.costs.estimate(load, option) for option in [PLAIN, *options]}
        for option in options if not announces else ():  # beside others that read sparsely
            seconds[option] = seconds[option] or self.costs.estimate(load, option._replace(sparse=True))
        return {option: self._tokens(acceptance, option.gamma) / cost for option, cost in seconds.items() if cost}

    # What is tried.

    def _advance_probe(self, pace: Pace, seen: RoundSeen, load: Load, sessions: int) -> None:
        """Begin to try what nothing is known of, go on, or end."""
        if self.probe is not None:
            self._probe_left -= bool(seen.kind.gamma) == bool(self.probe.gamma)
            self._probe_limit -= 1
            if min(self._probe_left, self._probe_limit) <= 0 or load != self._probe_load:
                self.probe = None
            return
        is_paused = pace.is_paused(seen.committed)
        if is_paused and not pace.alone and self._until_decided[seen.announces] > 1:
            return  # one of the step's sessions says it for all that pause
        present = PLAIN if is_paused else pace.choice
        known = self.costs.rounds(load, present) / (PROBED * sessions_of(load))
        if known < 1 or seen.kind != present:
            return
        for option in self._unknown(pace, present, seen.announces, load):
            if known < SETTLED and (present == PLAIN or self.costs.estimate(load, option) is not None):
                continue  # sessions that come and go pass through many loads
            self._counters["drafting_probes"] += 1
            if present == PLAIN:
                self._in_vain[load], self._typical = self._in_vain[load] + 1, self._typical.as_prior()
                self._read_for, self._rested = 0.0, {False: 0.0, True: 0.0}
            rounds = (PROBED + 2) * sessions
            self.probe, self._probe_left, self._probe_load = option, rounds, load
            self._probe_limit = PROBE_LIMIT * rounds
            return

    def _unknown(self, pace: Pace, present: Choice, announces: bool, load: Load) -> Iterable[Choice]:
        """Yield the ways without a figure that could be faster than the present one."""
        if present == PLAIN:
            if not pace.alone and self._is_due(load, pace.choice, announces):
                yield pace.choice
            return
        seconds = self.costs.seconds(load, present)
        assert seconds is not None
        rate = self._tokens(self._typical, present.gamma) / seconds
        if not self.costs.rounds(load, PLAIN) and self.costs.least_plain_seconds(load) * rate < 1:
            yield PLAIN
        other = Choice(present.gamma, not present.sparse)
        if announces and self.costs.seconds(load, other) is None:
            yield other

    def _is_due(self, load: Load, choice: Choice, announces: bool) -> bool:
        """Return whether sessions that draft nothing are to try it again, since what they say may have changed.

        As seldom as trying it in vain costs TRIAL_SHARE of their time, what the draft reads for it included, and
        seldomer each time in vain. Soon where what is accepted says that it pays and it never was tried: that it does
        not pay was seen at another load then.
        """
        plain = self.costs.seconds(load, PLAIN)
        if not plain or self._rested[announces] < SHORTEST_PAUSE:
            return False
        drafted = self.costs.last(load, choice)
        if drafted is None:
            drafted = ASSUMED_TRIAL * plain
            if self._tokens(self._typical, choice.gamma) / drafted > (1 + MARGIN) / plain and not self._in_vain[load]:
                return True
        lost = max(0.0, drafted / plain - HOPED * self._tokens(self._typical, choice.gamma))
        tried = (PROBED + 2) * lost + self._read_for / plain
        return self._rested[announces] >= tried / TRIAL_SHARE * min(2 ** self._in_vain[load], LONGEST_WAIT)
