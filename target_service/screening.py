"""Tokens of an exact session that sparse attention has screened, held back until a dense pass confirms them.

The chain of TriForce (arXiv 2404.11912): a draft proposes, the target's sparse attention screens, its dense attention
confirms. Each level accepts by speculative sampling (Leviathan et al. 2023, Algorithm 1), for which the level before it
is the draft: a screened token has the distribution of sparse attention at its place, whether it was proposed or not, so
what is confirmed has that of dense attention. Knows no sessions and no KV.
"""

from dataclasses import dataclass, field, replace

from engine.sampling import Support
from wire.messages import Commit, FinishReason

# Fields of a commit whose sums are those of several rounds.
_SUMMED = (
    *("stale_rounds", "announced_bytes", "kv_tokens_read", "kv_tokens_total", "kv_tokens_fetched"),
    *("sparse_prompt_tokens", "queue_seconds", "preemptions"),
    *("prefill_seconds", "wait_seconds", "draft_seconds", "verify_seconds"),
)


@dataclass
class Screening:
    """What a session holds back.

    most: tokens that it holds, at most. confirmed: how many of the session's tokens are confirmed; those behind them
    are held. supports: what each of these was drawn from, none in a greedy session. rounds: the commits of the rounds
    since the last confirmation, which nobody was told of. ends: whether the text ends with the held tokens, if they
    are confirmed.
    """

    most: int
    confirmed: int
    supports: list[Support] = field(default_factory=list)
    rounds: list[Commit] = field(default_factory=list)
    ends: bool = False

    def hold(self, commit: Commit, supports: list[Support]) -> None:
        """Hold the tokens of a screening round back. supports: what each of them was drawn from, and maybe more."""
        self.rounds.append(commit)
        self.supports += supports[: len(commit.tokens)]
        self.ends = commit.finish_reason is not FinishReason.NONE

    def drop(self, tokens: list[int]) -> None:
        """Take the held tokens back, the last of a session's `tokens`; what their rounds took is still to be told."""
        del tokens[self.confirmed :], self.supports[:]
        self.ends = False

    def release(self, commit: Commit) -> Commit:
        """Return the commit of a dense round with what the rounds before it took; nothing is held then."""
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
        return told
