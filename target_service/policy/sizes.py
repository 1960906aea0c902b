"""The costs of rounds by the sizes of weights and KV, in tokens of KV that can be read in the same time.

A step reads the weights and KV; one that chooses what it reads takes longer by a share of both (docs/performance.md).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from specahead.kernels.linear import MOST_ROWS
from target_service.policy.plans import Load, Proposer, RoundKind, Verified

BEYOND_BYTES = 0.12  # of a plain step on a GPU, that a pass takes that chooses what to read
LINK = 60  # tokens of KV that a GPU reads from its own memory while one comes from the host's
CONFIRMING = 1.2  # of reading the KV: a pass of many tokens of each session
FULL_ROWS = 160  # of a step: from here on arithmetic takes longer than reading the weights
DRAFT_PASS = 0.15  # of a plain step: a pass of the draft, before any is measured
DRAFT_KV = 0.25  # bytes of a token of the draft's KV, of those of the target's
NEWEST = 1 / 16  # weight of the newest step


def _all_of_them(rows: int) -> float:
    return 1.0


@dataclass
class Sizes:
    """The sizes of one target. Learns from steps only what sizes cannot say: the draft's passes, and what comes over
    the link.
    """

    weight_tokens: float
    """Tokens of KV that take as much memory as the weights."""
    budget: float = 0.1
    """Share of the KV that a sparse layer reads where blocks are announced."""
    least_tokens: int = 0
    """Tokens of a session that a sparse layer reads at least."""
    dense_layers: float = 0.0
    """Share of the layers that read everything."""
    own_share: float = 0.06
    """Share of the KV that is read to screen, or to draft by the target itself."""
    screening_weights: float = 1.0
    """Share of the weights' bytes that a step reads which screens up to MOST_ROWS tokens."""
    drafting_weights: float = 1.0
    """Share of the weights' bytes that a pass reads in which the target drafts by itself."""
    read_share: Callable[[int], float] = _all_of_them
    """Share of the weights that a pass of so many tokens reads: less than 1 of a mixture of experts."""
    draft_pass: float = DRAFT_PASS
    """What a pass of the draft takes, of a plain step whose KV is smaller by DRAFT_KV."""
    fetched: dict[Verified, float] = field(default_factory=dict)
    """Share of all tokens of KV that steps bring from the host."""

    def plain(self, load: Load) -> float:
        """Return what a plain step takes."""
        return self.weights(load.sessions) + load.tokens + self._over_link(Verified.DENSE, load)

    def weights(self, rows: int) -> float:
        """Return the size of the weights that a pass of so many tokens reads."""
        return self.weight_tokens * self.read_share(rows)

    def step(self, kind: RoundKind, load: Load) -> float:
        """Return what the target's step of such a round takes, without what it drafts itself."""
        rows, verified = load.sessions * (kind.gamma + 1), kind.verified
        is_light = verified is Verified.SCREENS and rows <= MOST_ROWS
        weights = (self.screening_weights if is_light else 1.0) * max(1.0, rows / FULL_ROWS)
        read = self._read(verified, load) * (CONFIRMING if verified is Verified.CONFIRMS else 1.0)
        if verified in (Verified.SPARSE, Verified.SCREENS):
            read += BEYOND_BYTES * (self.weights(rows) + load.tokens)
        return weights * self.weights(rows) + read + self._over_link(verified, load)

    def target(self, kind: RoundKind, load: Load) -> float:
        """Return what the target's part of a round takes, with its own drafting."""
        step = self.step(kind, load)
        return step + self.own_drafting(kind.gamma, load) if kind.proposer is Proposer.SELF else step

    def round(self, kind: RoundKind, load: Load) -> float:
        """Return what a round takes, with its drafting."""
        return self.target(kind, load) + self.draft_pass * self.drafting(kind, load)

    def drafting(self, kind: RoundKind, load: Load) -> float:
        """Return the size of the passes of a draft model for a round, each as large as a plain step whose KV is smaller
        by DRAFT_KV.
        """
        passes = kind.gamma + 1 if kind.proposer is Proposer.DRAFT else 0
        return passes * (self.weights(load.sessions) + DRAFT_KV * (load.tokens - load.skipped))

    def own_drafting(self, gamma: int, load: Load) -> float:
        """Return what the passes take in which the target drafts `gamma` tokens of each session by itself.

        They find most of what they read still on the GPU, where the step itself brings KV from the host.
        """
        weights = self.weights(load.sessions)
        beyond = BEYOND_BYTES * (weights + load.tokens)
        return gamma * (self.drafting_weights * weights + self.own_share * load.tokens + beyond)

    def note_drafting(self, seconds: float, step_seconds: float, kind: RoundKind, load: Load) -> None:
        """Take note of what the draft took for a round, beside the target's step."""
        size = self.drafting(kind, load)
        if size:
            share = seconds / max(1e-9, step_seconds) * self.step(kind, load) / size
            share = min(1.0, share)  # more is a graph that was captured
            self.draft_pass = max(1e-3, self.draft_pass + NEWEST * (share - self.draft_pass))

    def note_fetched(self, verified: Verified, share: float) -> None:
        """Take note of the share of all its tokens of KV that a step brought from the host."""
        known = self.fetched.get(verified)
        self.fetched[verified] = share if known is None else known + NEWEST * (share - known)

    def _read(self, verified: Verified, load: Load) -> float:
        """Return the tokens of KV that a step reads."""
        if verified is Verified.SCREENS:
            return self.own_share * load.tokens
        if verified is not Verified.SPARSE or not load.tokens:
            return load.tokens
        share = min(1.0, max(self.budget, self.least_tokens * load.sessions / load.tokens))
        return load.tokens - (1 - self.dense_layers) * (1 - share) * load.announcing

    def _over_link(self, verified: Verified, load: Load) -> float:
        """Return what the KV takes that comes from the host. What a dense step brings says it of others, until one of
        these is seen.
        """
        if not self.fetched:
            return LINK * load.away * self._read(verified, load) / max(1, load.tokens)
        share = self.fetched.get(verified)
        if share is None:
            share = self.fetched.get(Verified.DENSE, max(self.fetched.values()))
            share *= self._read(verified, load) / max(1, load.tokens)
        return LINK * share * load.tokens
