"""How many screened tokens of a session to hold before a dense pass confirms them (target_service.screening).

A dense pass costs what sparse attention leaves out, once for all tokens that are held: the more, the cheaper a token.
But behind one that it rejects all are lost, and their rounds with them. So the best length follows from how many tokens
are confirmed, and from what passes cost, in tokens of KV that take as long to read.
"""

from dataclasses import dataclass, replace

from config import TargetSettings
from target_service.self_drafting import BEYOND_BYTES

LIKELY = 0.97  # of a session's screened tokens: confirmed, before any has been judged
NEWEST_TOKEN = 1 / 32  # weight of the newest judged one
FORGOTTEN = 1 / 256  # of what has been seen, in a round of a session that holds nothing: so it is tried again
NEWEST_ROUND = 1 / 64  # weight of the newest round of all sessions
DEAREST = 4.0  # steps that drafting takes: more is counted as this (a graph that is captured)
GAIN = 0.02  # by which screening must be faster than going without


@dataclass
class ConfirmLengths:
    """The costs by which lengths are chosen.

    gamma: drafted tokens of a round. most: tokens that may be held. share: of the KV, that screening reads.
    weight_tokens: tokens of KV that take as long to read as the weights do. rounds: that were seen. drafting: what a
    round costs before the target's step, in tokens of KV. committed: tokens of a round, by all sessions.
    screening_weights: the share of the weights' bytes that a step reads which screens.
    """

    gamma: int
    most: int
    share: float
    weight_tokens: float
    rounds: int = 0
    drafting: float = 0.0
    committed: float = 0.0
    screening_weights: float = 1.0

    def step_cost(self, tokens: int, read: float, screens: bool) -> float:
        """Return what a step over so many tokens of KV costs, of which it reads so many."""
        weights = self.weight_tokens * (self.screening_weights if screens else 1.0)
        return weights + read + BEYOND_BYTES * (self.weight_tokens + tokens)

    def note_round(
        self, tokens: int, read: float, screens: bool, seconds: float, drafting: float, committed: int
    ) -> None:
        """Take note of a session's round, in a step over so many tokens of KV of which it read so many: whether it
        screened; seconds of the step, and of what went by before it for the draft; tokens that the session committed or
        held.
        """
        step = self.step_cost(tokens, read, screens)
        cost = min(DEAREST, drafting / max(seconds, 1e-6)) * step
        self.rounds += 1
        weight = max(NEWEST_ROUND, 1 / self.rounds)
        self.drafting += weight * (cost - self.drafting)
        self.committed += weight * (committed - self.committed)

    def best(self, chance: float, tokens: int) -> int:
        """Return how many tokens a session is to hold at most, of which each is confirmed by this chance; 0: none.

        tokens: of KV, of all sessions that generate, which share their steps.
        """
        if not self.rounds:
            return self.most
        rates = {most: self._rate(most, chance, tokens) for most in range(self.gamma + 1, self.most + 1)}
        best = max(rates, key=rates.__getitem__)
        return best if rates[best] > (1 + GAIN) * self._rate(0, chance, tokens) else 0

    def _rate(self, most: int, chance: float, tokens: int) -> float:
        """Return the tokens that a session gets for what all steps cost from one dense pass to the next.

        A round of the draft that was made for what is taken back is lost with it.
        """
        a_round = max(1.0, self.committed)
        held = max(a_round, most - self.gamma / 2) if most else 0.0
        kept = chance**held
        gained = kept * a_round + sum(chance**i for i in range(round(held)))
        rounds = held / a_round + (1 - kept)
        screens = self.drafting + self.step_cost(tokens, self.share * tokens, True)
        confirms = self.drafting + self.step_cost(tokens, tokens, False)
        return gained / (rounds * screens + confirms)


def chance_behind(chance: float, held: int, confirmed: int) -> float:
    """Return a session's chance of a screened token to be confirmed, behind a round that held so many and confirmed so
    many of them.
    """
    judged = min(held, confirmed + 1)
    if not judged:
        return chance + FORGOTTEN * max(0.0, LIKELY - chance)
    return chance + (1 - (1 - NEWEST_TOKEN) ** judged) * (confirmed / judged - chance)


def confirm_lengths(settings: TargetSettings, weight_tokens: float) -> ConfirmLengths | None:
    """Return how a target chooses lengths; None: they are given."""
    if settings.confirm_every >= 0:
        return None
    lengths = ConfirmLengths(settings.most_drafted, settings.most_held, settings.self_read_share, weight_tokens)
    return replace(lengths, screening_weights=0.5) if settings.screens_lightly else lengths
