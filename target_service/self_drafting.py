"""Drafting by the target itself (`--draft self`): how many tokens pay in a step, and what the drafting passes read.

The model drafts γ tokens one by one over a small share of the KV, and then runs them all over the whole of it, in one
step (engine.passes.drafting). Sessions draft as many together or none, since all take part in each pass of a step.
"""

from dataclasses import dataclass, replace

from specahead.config import TargetSettings
from specahead.engine.steps.inputs import ReadMemory, SparseRead
from specahead.engine.steps.rounds.requests import gammas
from specahead.sparsity.budgets import new_memory, shared_budget
from specahead.sparsity.plan import Plan

DECAY = 0.9  # of remembered weights, a round
LIKELY = (
    0.9  # of the drafted tokens: accepted, before any is tried (0.84 to 0.98 with the bundled pair, docs/quality.md)
)
ENOUGH = 0.7  # of a fixed number of drafted tokens: must pay for it, if they are accepted
NEWEST = 1 / 128  # weight of the newest judged token, once more are known,
ASSUMED_TOKENS = 16  # as so many of which counts what is assumed
FORGOTTEN = 1 / 8192  # of what has been seen, in a round of a session in which nothing is drafted
MARGIN = 0.05  # by which drafting must be faster than going without, and another number of tokens than the present one
BEYOND_BYTES = 0.12  # of a plain step on a GPU, that a drafting pass takes beyond what it reads (docs/performance.md)
LINK = 60  # tokens of KV that a GPU reads from its own memory while one comes from the host's


@dataclass
class SelfDrafting:
    """How a target drafts for itself.

    plan: its budget is the share that drafting passes read. gamma: tokens that a round drafts. weight_tokens: tokens of
    KV that take as long to read as the weights do. least_tokens: tokens of the sessions of a step from which on they
    draft; negative: where it pays. adaptive: whether rounds draft as many tokens, up to gamma, as are the fastest by
    what has been accepted. chance: of a drafted token to be accepted, by all sessions. judged: how many were since
    something was decoded plainly. present: how many tokens were drafted last. pass_weights: the share of the weights'
    bytes that a drafting pass reads.
    """

    plan: Plan
    gamma: int
    weight_tokens: float
    least_tokens: int
    adaptive: bool = False
    chance: float = LIKELY
    judged: int = 0
    present: int = 0
    pass_weights: float = 1.0

    @property
    def gammas(self) -> list[int]:
        """The numbers of tokens that a round may draft."""
        return gammas(self.gamma) if self.adaptive else [self.gamma]

    def cost(self, gamma: int, tokens: int, away: int = 0) -> float:
        """Return what drafting so many tokens adds to a step over so many tokens of KV, in plain steps: so many tokens
        of each session have to be accepted. A step takes the time of reading weights and KV.

        away: those of sessions whose KV has partly left the GPU. A plain step brings it from the host as well, and the
        drafting passes find most of what they read still on the GPU, so that they add little to such a step.
        """
        step_tokens = self.weight_tokens + tokens
        pass_tokens = self.pass_weights * self.weight_tokens + self.plan.budget * tokens + BEYOND_BYTES * step_tokens
        return gamma * pass_tokens / (step_tokens + LINK * away)

    def drafted_in_step(self, tokens: int, away: int = 0) -> int:
        """Return how many tokens a step over so many tokens of KV drafts for each session; 0: drafting does not pay.

        As many as in the step before where another number is hardly faster, since a step of another number does not go
        ahead.
        """
        if self.least_tokens >= 0 and tokens < self.least_tokens:
            return 0
        rates = {gamma: self._committed(gamma) / (1 + self.cost(gamma, tokens, away)) for gamma in self.gammas}
        best = max(rates, key=rates.__getitem__)
        if rates[best] <= (1 + MARGIN) * rates.get(self.present, 0.0):
            best = self.present
        if self.least_tokens >= 0:
            self.present = best
            return best
        pays = rates[best] > 1 + MARGIN if self.adaptive else self.cost(best, tokens, away) < ENOUGH * best
        self.present = best if pays else 0
        return self.present

    def _committed(self, gamma: int) -> float:
        """Return how many tokens a round that drafts so many is expected to commit, the last one included."""
        return sum(self.chance**accepted for accepted in range(gamma + 1))

    def note_round(self, drafted: int, accepted: int) -> None:
        """Take note of a session's round. What was seen of drafted tokens is forgotten while none are drafted, so that
        drafting is tried again.
        """
        judged = min(drafted, accepted + 1)
        if judged:
            weight = max(NEWEST, 1 / (ASSUMED_TOKENS + self.judged))
            self.chance += (1 - (1 - weight) ** judged) * (accepted / judged - self.chance)
            self.judged += judged
        else:
            self.judged = 0
            self.chance += FORGOTTEN * max(0.0, LIKELY - self.chance)

    def new_memory(self) -> ReadMemory:
        """Return what a session that drafts for itself begins with, where nothing was weighed."""
        return new_memory(self.plan, DECAY)

    def can_draft(self, weighed: int, base: int) -> bool:
        """Return whether a round behind `base` committed tokens can draft: its KV was weighed in the last round, which
        `weighed` tokens had been committed before; 0: never.
        """
        return weighed > 0 and base - weighed <= self.gamma + 1

    def read(self, memory: ReadMemory, base: int, drafted: int) -> SparseRead:
        """Return what the passes read that draft so many tokens behind `base` committed ones: the sinks, the newest
        tokens, and the blocks that were weighed most, under one budget for all heads. Group means stand in for the
        rest.
        """
        plan, budget = self.plan, shared_budget(self.plan, memory, base, base + drafted)
        return SparseRead(plan.block_size, budget=budget, group_means=plan.group_size > 0, drafts=True)


def self_drafting(settings: TargetSettings, plan: Plan, weight_tokens: float) -> SelfDrafting | None:
    """Return how a target drafts for itself; None if it does not."""
    if not settings.drafts_for_itself or not plan.sparse_layers:
        return None
    plan = replace(plan, budget=settings.self_read_share, least_tokens=0)
    drafting = SelfDrafting(plan, settings.most_drafted, weight_tokens, settings.self_from, settings.adaptive)
    return replace(drafting, pass_weights=0.5) if settings.speculation.draft_quantization == "fp8" else drafting
