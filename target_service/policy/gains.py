"""What rounds are expected to bring: the tokens a second of each plan, by what was accepted and what rounds take."""

from collections.abc import Callable, Sequence

from target_service.policy.acceptance import OF_HELD, Acceptance
from target_service.policy.costs import CostsAtLoad
from target_service.policy.lookup import Judged, LookedUp
from target_service.policy.plans import PLAIN, Load, Proposer, RoundKind, RoundPlan, Verified
from target_service.policy.reading import DraftReading

ALTERNATIVES_PRIOR = 6  # rejected tokens that the prior of their alternatives counts as
POOLED_NEWEST, POOLED_ROUNDS = 1 / 128, 32  # weight of a round in the acceptance of all, for one session and for many
LOOKED_UP_NEWEST, LOOKED_UP_ROUNDS = 1 / 32, 8  # the same in what prompt lookup alone would bring
USUAL_NEWEST = 1 / 512  # weight of a round in what lookup usually brings
HELD_NEWEST, HELD_PRIOR = 1 / 512, 16  # weight of a judged held token; the number of them that the prior counts as
RETRIED_PRIOR = 16  # judged rounds, at most, that the acceptance of all counts as when proposing is tried again


class Gains:
    """What the rounds of all sessions have shown, and the tokens a second that plans are expected to bring by it.

    Texts differ by much in how often they repeat themselves. So the last rounds decide what prompt lookup is expected
    to bring. When a session begins, this moves towards what lookup usually brings: the new text has shown nothing yet.
    """

    def __init__(self, prior: float, positions: int, alternatives: Callable[[int], int]) -> None:
        """prior: the chance of a proposed token to be accepted, the same at all positions. positions: their number.
        alternatives: returns how many alternatives may run beside γ tokens.
        """
        self.sessions = 1  # that generate now
        self.acceptance = Acceptance([prior] * positions)
        self.held = Acceptance([OF_HELD], HELD_NEWEST, HELD_PRIOR)
        self.reading = DraftReading()  # of prompts, by a draft on the same device; a draft elsewhere leaves it empty
        # Of what prompt lookup finds where the text does not copy at length: lookup comes first there in any case.
        self.looked_up, self._usually_looked_up = LookedUp(), LookedUp()
        self._copying, self._tokens_between = 0.0, 1.0  # share of such rounds, tokens of a round of the others
        self._alternatives = alternatives
        # Of alternatives to rejected tokens.
        self._right = Acceptance([0.0], POOLED_NEWEST, prior_rounds=ALTERNATIVES_PRIOR)

    def begin_sessions(self, count: int) -> None:
        """Take note that `count` of the sessions that generate now begin: they get what lookup usually brings."""
        self.looked_up.approach(self._usually_looked_up, count / self.sessions)

    def note_round(self, proposed: int, accepted: int, left_out: int) -> None:
        """Take note of a round with proposals. left_out: as in Acceptance.note."""
        newest = min(POOLED_NEWEST, 1 / (POOLED_ROUNDS * self.sessions))
        self.acceptance.note(proposed, accepted, left_out, newest)

    def note_lookup(self, judged: Judged, copies: bool, tokens: int) -> None:
        """Take note of what prompt lookup had found for a round that brought so many tokens. copies: whether it was
        found in a text that copies at length.
        """
        self._copying += POOLED_NEWEST * (copies - self._copying)
        if not copies:
            self._tokens_between += POOLED_NEWEST * (tokens - self._tokens_between)
            self.looked_up.note(judged, min(LOOKED_UP_NEWEST, 1 / (LOOKED_UP_ROUNDS * self.sessions)))
            self._usually_looked_up.note(judged, USUAL_NEWEST)

    def note_alternative(self, gamma: int, accepted: int, right: bool) -> None:
        """Take note of a round that rejected a proposed token: whether an alternative to it was accepted."""
        if accepted < self._alternatives(gamma):
            self._right.note(1, int(right))

    def doubt_acceptance(self) -> None:
        """Let the next rounds count for more, since proposing is tried again."""
        self.acceptance.judged = [min(RETRIED_PRIOR, judged) for judged in self.acceptance.judged]

    def doubt_held(self) -> None:
        """Expect of held tokens at least what was expected first, since holding is tried again."""
        self.held = Acceptance([max(OF_HELD, self.held.chances[0])], HELD_NEWEST, HELD_PRIOR)

    def rates(self, plans: Sequence[RoundPlan], at: CostsAtLoad) -> dict[RoundPlan, float]:
        """Return the tokens a second of each session, on average, by plan.

        A draft on the same device reads the prompts too.
        """
        reading, rates = self.reading.seconds_a_token(at.load), dict[RoundPlan, float]()
        for plan in plans:
            seconds = 1 / self._rate_of_rounds(plan, at) + self._seconds_of_copying(plan, at)
            rates[plan] = 1 / (seconds + reading if plan.drafted else seconds)
        return rates

    def _seconds_of_copying(self, plan: RoundPlan, at: CostsAtLoad) -> float:
        """Return what a text's rounds take in which it copies at length, for each token that it generates otherwise.

        Sessions wait for each other: such a round of one lasts as long as what is drafted for the others.
        """
        rounds = self._copying / max(1e-3, 1 - self._copying) / self._tokens_between
        waits = plan.gamma > 0 and at.load.sessions > 1
        guessing = at.load.guessing / max(1, at.load.sessions)
        return guessing * rounds * at.seconds(kinds_of(plan if waits else PLAIN, at.load)[-1])

    def _looked_up(self, load: Load) -> float:
        """Return the tokens of a round, beyond the target's own, that lookup brings to a session of a load while the
        plan proposes nothing for it.
        """
        return load.guessing / max(1, load.sessions) * (self.looked_up.tokens - 1)

    def _rate_of_rounds(self, plan: RoundPlan, at: CostsAtLoad) -> float:
        load, kinds = at.load, kinds_of(plan, at.load)
        if not plan.gamma:
            return (1 + self._looked_up(load)) / at.seconds(kinds[0])
        pausing = load.pausing / max(1, load.sessions)
        tokens = self.acceptance.tokens(plan.gamma, self._alternatives(plan.gamma), self._right.chances[0])
        tokens = 1 + (1 - pausing) * (tokens - 1) + pausing * self._looked_up(load)
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


def kinds_of(plan: RoundPlan, load: Load) -> list[RoundKind]:
    """Return the kinds of rounds that a plan has under a load: one, or screening and then confirming rounds."""
    if not plan.gamma:
        return [RoundKind(Proposer.NOBODY, 0, Verified.DENSE)]
    if plan.held and load.screened:
        verified = [Verified.SCREENS, Verified.CONFIRMS]
    else:
        verified = [Verified.SPARSE if plan.sparse and load.announcing else Verified.DENSE]
    return [RoundKind(plan.proposer, plan.gamma, each) for each in verified]
