"""Whether drafting is of use to a session, judged by the tokens of its proposals that were accepted of late.

A round that accepts nothing commits one token, as plain decoding does, and costs the draft's time and the wait for it
besides. A draft that takes a tenth of the target's time for a round, which is little, must bring a tenth of a token a
round to pay for itself; below that a session is decoded plainly for a while.
"""

from dataclasses import dataclass, replace

LEAST = 0.1  # accepted tokens a round, on average, below which a session is better off without a draft
START = 0.25  # the average that a session starts with: 15 rounds without a token lead to the first pause
RETRY = 0.125  # the average after a pause: 4 rounds without a token lead to the next one
NEWEST = 1 / 16  # weight of the newest round in the average
FIRST_PAUSE = 16  # tokens
LONGEST_PAUSE = 512  # tokens


@dataclass(frozen=True)
class Usefulness:
    """What a session's proposals were worth.

    average: accepted tokens a round, the newest rounds weighing most. next_pause: tokens that the next pause lasts.
    paused_until: the number of committed tokens at which the last pause ends; 0 before the first.
    """

    average: float = START
    next_pause: int = FIRST_PAUSE
    paused_until: int = 0

    def after_round(self, accepted: float, committed: int) -> "Usefulness":
        """Return the state after a round that accepted so many drafted tokens, when `committed` tokens are committed.

        Where proposals cost more, tokens count less, so that LEAST of them still pay.
        Each pause is twice as long as the one before, up to LONGEST_PAUSE, unless drafting was worth START in between.
        """
        average = self.average + NEWEST * (accepted - self.average)
        if average < LEAST:
            return self.paused(committed)
        return replace(self, average=average, next_pause=FIRST_PAUSE if average >= START else self.next_pause)

    def paused(self, committed: int) -> "Usefulness":
        """Return the state at the start of a pause, when `committed` tokens are committed."""
        longer = min(2 * self.next_pause, LONGEST_PAUSE)
        return Usefulness(RETRY, next_pause=longer, paused_until=committed + self.next_pause)

    def is_paused(self, committed: int) -> bool:
        """Return whether a session of so many committed tokens is decoded without a draft."""
        return committed < self.paused_until
