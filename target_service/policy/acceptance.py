"""How likely proposed tokens are to be accepted, learnt from a prior."""

import math
from collections.abc import Sequence

OF_DRAFT = 0.6  # a draft model's token, before anything is known of the pair
# A token that the target drafts itself, before any is tried: 0.84 to 0.98 with the bundled pair (docs/quality.md).
OF_SELF = 0.9
OF_HELD = 0.985  # a screened token that a dense pass judges (0.989 with the bundled pair, docs/quality.md)
RETRIED = 0.2  # the least that a session begins with, or with which it tries proposing again
PRIOR_ROUNDS = 2  # the judgements of a position that a prior counts as
NEWEST = 1 / 32  # weight of the newest judgement of a position, once 30 are known


class Acceptance:
    """Chances of the tokens of a round: each given that all before it were accepted.

    `chances` and `judged` (how many judgements each rests on; older ones fade) have an entry for each position; tokens
    beyond the last position count as one there.
    """

    __slots__ = ("_newest", "_prior_rounds", "chances", "judged")

    def __init__(
        self, prior: Sequence[float], newest: float = NEWEST, prior_rounds: int = PRIOR_ROUNDS, judged: int = 0
    ) -> None:
        """prior: the chance at each position. newest: the least weight of a judgement. prior_rounds, judged: the prior
        counts as the sum of the two; `judged` of them count as seen.
        """
        self.chances, self.judged = list(prior), [judged] * len(prior)
        self._newest, self._prior_rounds = newest, prior_rounds

    def copy(self, judged: int = 0) -> "Acceptance":
        """Return an estimate that has these chances as its prior, none below RETRIED."""
        return Acceptance([max(RETRIED, chance) for chance in self.chances], judged=judged)

    def note(self, proposed: int, accepted: int, left_out: int = 0, newest: float = 0.0) -> None:
        """Take note of a round that accepted the first `accepted` of the proposed tokens.

        left_out: the last of the proposed tokens, which were not judged. newest: replaces the least weight, if above 0.
        """
        chances, judged, last = self.chances, self.judged, len(self.chances) - 1
        least = newest or self._newest
        for token in range(min(proposed - left_out, accepted + 1)):
            position = min(token, last)
            if self._prior_rounds + judged[position] < 1 / least:
                judged[position] += 1
            weight = max(least, 1 / (self._prior_rounds + judged[position]))
            chances[position] += weight * ((token < accepted) - chances[position])
        for position in range(proposed, last + 1 if proposed else 0):  # untried positions follow the last tried one
            chances[position] += least * (chances[proposed - 1] - chances[position])

    def doubt(self) -> None:
        """Let the next rounds count as much as the first ones did, since the chances may have changed."""
        self.chances = [max(RETRIED, chance) for chance in self.chances]
        self.judged = [0] * len(self.judged)

    def standard_error(self, gamma: int) -> float:
        """Return the relative standard error of `tokens(gamma)`, by the number of rounds that were judged."""
        mean, squares, reached = 0.0, 0.0, 1.0
        for token in range(gamma + 1):
            mean, squares = mean + reached, squares + (2 * token + 1) * reached
            reached *= self.chances[min(token, len(self.chances) - 1)]
        return math.sqrt(max(0.0, squares - mean**2) / (self.judged[0] + self._prior_rounds)) / mean

    def tokens(self, gamma: int, alternatives: int = 0, right: float = 0.0) -> float:
        """Return the expected tokens of a round that proposes `gamma`, the target's own included.

        alternatives: the number of first positions that have an alternative. right: how often one to a rejected token
        is right.
        """
        expected = reached = 1.0
        last = len(self.chances) - 1
        for token in range(gamma):
            chance = self.chances[min(token, last)]
            if token < alternatives:
                expected += right * reached * (1 - chance)
            reached *= chance
            expected += reached
        return expected
