"""Tokens of an exact session that sparse attention has screened, held back until a dense pass confirms them.

The chain of TriForce (arXiv 2404.11912): a draft proposes, the target's sparse attention screens, its dense attention
confirms. Each level accepts by speculative sampling (Leviathan et al. 2023, Algorithm 1), for which the level before it
is the draft: a screened token has the distribution of sparse attention at its place, whether it was proposed or not, so
what is confirmed has that of dense attention. Knows no sessions and no KV.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

from specahead.config import TargetSettings
from specahead.engine.sampling.distributions import Support
from specahead.sparsity.methods import BY_MEMORY
from specahead.sparsity.plan import Plan
from specahead.sparsity.reader import Reader
from specahead.wire.messages import Commit, FinishReason

WEIGHED_EVERY = 4  # confirmations, of which one weighs what is read, as that takes a third of a dense pass's time


class Confirms(Enum):
    """Whether the rounds of a step confirm what their sessions hold, and weigh what they read for it."""

    NO = 0
    YES = 1
    WEIGHING = 2


# Fields of a commit whose sums are those of several rounds.
_SUMMED = (
    *("stale_rounds", "announced_bytes", "kv_tokens_read", "kv_tokens_total", "kv_tokens_fetched"),
    *("sparse_prompt_tokens", "queue_seconds", "preemptions"),
    *("prefill_seconds", "wait_seconds", "draft_seconds", "verify_seconds"),
)


def screening_reader(plan: Plan, settings: TargetSettings, report_blocks: bool) -> Reader:
    """Return how a session reads that is screened: by what its dense passes have weighed."""
    return Reader(BY_MEMORY, replace(plan, budget=settings.self_read_share, least_tokens=0, rule=""), report_blocks)


@dataclass
class Screening:
    """What a session holds back.

    most: tokens that it holds, at most. widest: tokens that a round runs, at most, held ones and the last confirmed one
    among them. confirmed: how many of the session's tokens are confirmed; those behind them are held. supports: what
    each of these was drawn from, none in a greedy session. rounds: the commits of the rounds since the last
    confirmation, which nobody was told of. ends: whether the text ends with the held tokens, if they are confirmed.
    unweighed: confirmations since the last that weighed what it read; of a session that has weighed nothing as many as
    make the next one weigh. deterministic: whether the target draws its own tokens where it confirms, whatever was
    screened, so that there are no supports, and reads everything in passes apart from those that screen.
    """

    most: int
    widest: int
    confirmed: int
    supports: list[Support] = field(default_factory=list)
    rounds: list[Commit] = field(default_factory=list)
    ends: bool = False
    unweighed: int = WEIGHED_EVERY - 1
    deterministic: bool = False

    @property
    def settled(self) -> int:
        """How many of the session's first tokens no later pass writes the KV of: not that of the last confirmed one,
        which a round that screens may have written."""
        return self.confirmed - 1

    @property
    def is_to_weigh(self) -> bool:
        """Whether the next confirmation is to weigh what it reads."""
        return self.most > 0 and self.unweighed + 1 >= WEIGHED_EVERY

    @property
    def is_stale(self) -> bool:
        """Whether what was weighed is too old to screen by, since nothing was held for long."""
        return self.unweighed >= WEIGHED_EVERY

    @property
    def is_used(self) -> bool:
        """Whether tokens are held, or may be from the next round on."""
        return self.most > 0 or bool(self.rounds)

    def hold(self, commit: Commit, supports: list[Support]) -> None:
        """Hold the tokens of a screening round back. supports: what each of them was drawn from, and maybe more."""
        self.rounds.append(commit)
        self.supports += supports[: len(commit.tokens)]
        self.ends = commit.finish_reason is not FinishReason.NONE

    def drop(self, tokens: list[int]) -> None:
        """Take the held tokens back, the last of a session's `tokens`; nothing that was weighed counts any more. What
        their rounds took is still to be told.
        """
        del tokens[self.confirmed :], self.supports[:]
        self.ends, self.unweighed = False, WEIGHED_EVERY - 1

    def release(self, commit: Commit, weighed: bool) -> Commit:
        """Return the commit of a dense round with what the rounds before it took; nothing is held then.

        weighed: whether the round weighed what it read.
        """
        rounds = [*self.rounds, commit]
        told = replace(
            commit,
            screening_drafted=[each.drafted for each in self.rounds],
            screening_accepted=[each.accepted for each in self.rounds],
            cached_tokens=max(each.cached_tokens for each in rounds),
            prompt_logprobs=[told for each in rounds for told in each.prompt_logprobs],
            **{name: sum(getattr(each, name) for each in rounds) for name in _SUMMED},
        )
        self.confirmed = commit.at.base + len(commit.tokens)
        self.rounds, self.supports, self.ends = [], [], False
        self.unweighed = 0 if weighed else self.unweighed + 1
        return told
