"""Tokens of an exact session that sparse attention has screened, held back until a dense pass confirms them.

The chain of TriForce (arXiv 2404.11912): a draft proposes, the target's sparse attention screens, its dense attention
confirms. Each level accepts by speculative sampling (Leviathan et al. 2023, Algorithm 1), for which the level before it
is the draft: a screened token has the distribution of sparse attention at its place, whether it was proposed or not, so
what is confirmed has that of dense attention. Knows no sessions and no KV.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import reduce

from specahead.engine.sampling.distributions import Support
from specahead.sparsity.plan import Plan
from specahead.sparsity.reader import Reader
from specahead.wire.messages import Commit, FinishReason, RoundFigures

WEIGHED_EVERY = 4  # every fourth confirmation weighs the KV, since that takes a third of a dense pass's time


class Confirms(Enum):
    """Whether the rounds of a step confirm what their sessions hold, and whether they weigh the KV that they read."""

    NO = 0
    YES = 1
    WEIGHING = 2


def screening_reader(plan: Plan, share: float) -> Reader:
    """Return how a session reads `share` of its KV to screen: by what its dense passes have weighed."""
    return Reader(replace(plan, budget=share, least_tokens=0), is_announced=False)


@dataclass
class Screening:
    """What a session holds back."""

    most: int
    """Tokens that it holds, at most."""
    widest: int
    """Tokens that a round runs, at most, with the held ones and the last confirmed one."""
    confirmed: int
    """How many of the session's tokens are confirmed; the later ones are held."""
    supports: list[Support] = field(default_factory=list)
    """The distribution that each held token was drawn from; none in a greedy session, or of a deterministic target."""
    rounds: list[Commit] = field(default_factory=list)
    """The commits of the rounds since the last confirmation, which the session's owner has not received."""
    ends: bool = False
    """Whether the text ends with the held tokens, if they are confirmed."""
    unweighed: int = WEIGHED_EVERY - 1
    """Confirmations since the last one that weighed the KV that it read. A session that has weighed none yet has as
    many as make the next one weigh.
    """

    @property
    def settled(self) -> int:
        """How many of the session's first tokens have KV that no later pass writes. The last confirmed token does not
        count, since a screening round may have written its KV."""
        return self.confirmed - 1

    @property
    def is_to_weigh(self) -> bool:
        """Whether the next confirmation weighs the KV that it reads."""
        return self.most > 0 and self.unweighed + 1 >= WEIGHED_EVERY

    @property
    def is_stale(self) -> bool:
        """Whether the weights are too old to screen by, since nothing was held for long."""
        return self.unweighed >= WEIGHED_EVERY

    @property
    def is_used(self) -> bool:
        """Whether tokens are held, or may be from the next round on."""
        return self.most > 0 or bool(self.rounds)

    def hold(self, commit: Commit, supports: list[Support]) -> None:
        """Hold the tokens of a screening round back. supports: the distribution of each of them, and maybe more."""
        self.rounds.append(commit)
        self.supports += supports[: len(commit.tokens)]
        self.ends = commit.finish_reason is not FinishReason.NONE

    def drop(self, tokens: list[int]) -> None:
        """Remove the held tokens from the end of a session's `tokens`, and forget the weights. The next commit still
        includes the times of their rounds.
        """
        del tokens[self.confirmed :], self.supports[:]
        self.ends, self.unweighed = False, WEIGHED_EVERY - 1

    def release(self, commit: Commit, weighed: bool) -> Commit:
        """Return the commit of a dense round together with the figures of the rounds before it; nothing is held then.

        weighed: whether the round weighed the KV that it read.
        """
        whole, rounds = commit, [*self.rounds, commit]
        if self.rounds:
            whole = replace(
                commit,
                screening_drafted=[each.drafted for each in self.rounds],
                screening_accepted=[each.accepted for each in self.rounds],
                cached_tokens=max(each.cached_tokens for each in rounds),
                proposer=max(each.proposer for each in rounds),
                prompt_logprobs=[of_token for each in rounds for of_token in each.prompt_logprobs],
                figures=reduce(RoundFigures.plus, (each.figures for each in rounds)),
            )
        self.confirmed = commit.at.base + len(commit.tokens)
        self.rounds, self.supports, self.ends = [], [], False
        self.unweighed = 0 if weighed else self.unweighed + 1
        return whole
