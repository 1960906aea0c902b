"""How likely the next drafted tokens of a session are to be accepted, measured by their position in a round."""

from dataclasses import dataclass

ASSUMED = 0.6  # chance of a token to be accepted, before anything is known
RETRIED = 0.2  # the least that is assumed where drafting is tried again
ASSUMED_ROUNDS = 2  # rounds that an assumed chance counts as
NEWEST = 1 / 32  # weight of the newest round, once 30 are known


@dataclass(frozen=True)
class Acceptance:
    """chances: of the token at each position to be accepted where all those before it were. judged: rounds in which
    that was seen, of each position.
    """

    chances: tuple[float, ...]
    judged: tuple[int, ...]

    @staticmethod
    def assumed(positions: int) -> "Acceptance":
        """Return what is assumed of so many positions."""
        return Acceptance((ASSUMED,) * positions, (0,) * positions)

    def after_round(self, proposed: int, accepted: int, newest: float = NEWEST, left_out: int = 0) -> "Acceptance":
        """Return what is known after a round that accepted so many of the proposed tokens.

        newest: the least weight of a round, which the first ones exceed. left_out: the last of the proposed tokens,
        which were not judged.
        """
        chances, judged = list(self.chances), list(self.judged)
        for position in range(min(proposed - left_out, accepted + 1)):
            judged[position] += 1
            weight = max(newest, 1 / (ASSUMED_ROUNDS + judged[position]))
            chances[position] += weight * ((position < accepted) - chances[position])
        for position in range(proposed, len(chances) if proposed else 0):  # what is not tried becomes like what is
            chances[position] += newest * (chances[proposed - 1] - chances[position])
        return Acceptance(tuple(chances), tuple(judged))

    def as_prior(self, rounds: int = 0) -> "Acceptance":
        """Return these chances, none below RETRIED, as what is assumed; it counts as so many rounds more than else."""
        return Acceptance(tuple(max(chance, RETRIED) for chance in self.chances), (rounds,) * len(self.judged))

    def tokens(self, gamma: int, beside: int = 0, right: float = 0.0) -> float:
        """Return how many tokens a round of `gamma` drafted ones is expected to commit, the target's own included.

        beside: how many of them, the first ones, have an alternative; right: how often one to a rejected token is.
        """
        expected = reached = 1.0
        for position, chance in enumerate(self.chances[:gamma]):
            if position < beside:
                expected += right * reached * (1 - chance)
            reached *= chance
            expected += reached
        return expected
