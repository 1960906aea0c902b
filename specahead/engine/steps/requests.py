"""Settings, requests and outputs of a draft's rounds. Knows no tensors of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.steps.announcing import Announcer
from specahead.engine.steps.rules import RoundRules
from specahead.kernels.backends import power_of_two

ROUND_QUERIES = 2  # tokens that a round begins with: one, or two where the target's own was not foreseen
MOST_ROWS = 128  # tokens that a pass drafts at once before its products take longer than reading the weights


@dataclass(frozen=True)
class RoundSettings:
    """How all rounds of a runner are drafted."""

    gamma: int
    """Tokens that a round proposes, at most."""
    support: int
    """Entries of a sampled token's distribution that are kept."""
    block_size: int
    """Tokens of a block."""
    read_share: float = 1.0
    """The share of the blocks that passes after the first read; 1: they are dense."""
    sink_blocks: int = 1
    """First blocks that these passes always read."""
    window_blocks: int = 4
    """Newest blocks that these passes always read."""
    announcer: Announcer | None = None
    """How rounds announce blocks; None: they never do."""
    branches: int = 1
    """Branches of a round, at most (`branches_of`)."""
    alternatives: int = 0
    """How many of the likeliest tokens an output has for each position."""
    runs_last: bool = True
    """Whether a round also runs the last token that it proposes, and so knows the next one, with which a draft that
    goes on without a verdict begins. Otherwise it costs a pass less."""
    reads_states: bool = False
    """Whether the model is a head (engine.model.head). Its rounds run all tokens committed since the last one, and the
    KV of those that they draft is written again."""

    def __post_init__(self) -> None:
        if self.branches > 1 and not self.runs_last:
            raise ValueError(f"{self.branches} branches go on after the last token proposed: let rounds run it, too")

    @property
    def queries(self) -> int:
        """Pending tokens of a session that a captured round has room for; what is before is read first."""
        return self.gamma + 1 if self.reads_states else ROUND_QUERIES

    def passes(self, gamma: int) -> int:
        """Return how often the model runs to propose `gamma` tokens: once for each, once more if the last is run."""
        return gamma + self.runs_last

    def to(self, device: torch.device) -> "RoundSettings":
        """Return the same settings with their tensors on a device."""
        return self if self.announcer is None else replace(self, announcer=self.announcer.to(device))


@dataclass(frozen=True)
class AnnouncementRequest:
    """Which blocks a round may announce (Announcer)."""

    first: int
    """Blocks are chosen from this one on,"""
    last: int
    """up to but not including this one."""
    count: int
    """How many blocks are chosen."""
    before: np.ndarray | None
    """uint64 [rows, words], the blocks announced last round, if these are known."""
    words: int
    """Words of a row."""


@dataclass(frozen=True)
class StepBefore:
    """A step of a target on the same device that judges the round before, and still runs.

    The lists have an entry for each number of tokens that the step may accept: none, one, up to all that it judges.
    """

    row: int
    """The row of the session's verdict in the device chain."""
    previous: list[int]
    """The token before the one that the step adds."""
    uniforms: np.ndarray
    """[judged + γ + 1] float64, one for each position after the committed tokens at which the round may draw a
    token.
    """
    announce: list[AnnouncementRequest | None]

    @property
    def judged(self) -> int:
        """How many tokens the step judges."""
        return len(self.previous) - 1


@dataclass(frozen=True)
class Branch:
    """A continuation of a session's tokens that is drafted beside others.

    It leaves them after the first `length` tokens, all of which have KV, and goes on with `token`. uniforms: [γ + 1]
    float64.
    """

    length: int
    token: int
    uniforms: np.ndarray


@dataclass(frozen=True)
class MovedKV:
    """KV of `count` tokens that a branch wrote at position `source`, and that belongs at position `target`.

    The two stretches do not overlap, unless they are the same.
    """

    source: int
    target: int
    count: int


# Returns which tokens may come next, a mask as of engine.grammars, given a branch and the tokens drafted after it.
AllowedTokens = Callable[[int, Sequence[int]], np.ndarray]


@dataclass(frozen=True)
class RoundRequest:
    """A round of one session."""

    kv: SequenceKV
    tokens: list[int]
    """Pending tokens, the last of them committed or guessed; empty where there are branches."""
    temperature: float
    """0: greedy."""
    top_p: float
    uniforms: np.ndarray
    """[γ + 1] float64; unused where there are branches."""
    announce: AnnouncementRequest | None
    """None: the round announces nothing."""
    branches: tuple[Branch, ...] = ()
    """Continuations that are drafted at once, at most settings.branches. Their KV lies after the first kv.length
    tokens, γ + 1 tokens for each branch in order. They share the evidence and the announcement."""
    moved: MovedKV | None = None
    """KV that is put in its place before anything is read."""
    gamma: int = 0
    """Tokens to draft; 0: as many as the settings say."""
    top_k: int = 0
    """As in `Sampling`."""
    min_p: float = 0.0
    """As in `Sampling`."""
    rules: RoundRules | None = None
    """Rules that change the logits."""
    allowed: AllowedTokens | None = None
    """Which tokens may be drafted: the host is asked before each is drawn, and waits for each pass. None: all, at no
    cost."""
    follows: StepBefore | None = None
    """The step that the round follows in the device chain. kv, announce and tokens are then as if the step accepted all
    tokens; there are two tokens, and the one that the step adds takes the place of the second. A head's tokens are as
    if it accepted none, and one more than it judges; the last two give way to the last accepted and the added one."""

    def __post_init__(self) -> None:
        if bool(self.tokens) == bool(self.branches):
            raise ValueError("a round runs either pending tokens or branches: give one of the two")
        if any(not 0 < branch.length <= self.kv.length for branch in self.branches):
            raise ValueError(f"a branch leaves the {self.kv.length} tokens with KV elsewhere than after one of them")
        if self.branches and self.branches[0].length != self.kv.length:
            raise ValueError(
                f"the first branch leaves after {self.branches[0].length} tokens, expected {self.kv.length}: it goes "
                "on after all tokens with KV, so that no KV is moved onto what another branch has left"
            )
        if self.follows and (len(self.tokens) < 2 or self.branches or self.moved or self.rules or self.allowed):
            raise ValueError(
                "a round that follows a step runs two tokens or more, the last the step's, without branches, rules or "
                "grammar"
            )

    def tokens_written(self, most: int) -> int:
        """Return how many tokens of KV the round adds: the pending ones or the branches, and the drafted ones.

        most: tokens that a round drafts unless it is to draft fewer.
        """
        gamma = self.gamma or most
        branches = max(1, len(self.branches)) * (gamma + 1)
        return max(branches, len(self.tokens) + gamma)


@dataclass(frozen=True)
class DraftedTokens:
    """The tokens that a round drafts after its pending tokens or after one of its branches."""

    tokens: list[int]
    """The proposed ones, and one more if the last of these was run (runs_last)."""
    ids: np.ndarray | None = None
    """[tokens, support], the tokens that each was drawn from; None if greedy."""
    probs: np.ndarray | None = None
    """[tokens, support], their probabilities."""
    alternatives: np.ndarray | None = None
    """[tokens, settings.alternatives], the likeliest tokens at each position in falling order, if asked for."""
    runs_last: bool = True
    reads_states: bool = False
    """As in `RoundSettings`."""

    @property
    def proposed(self) -> int:
        """How many of the tokens are proposed."""
        return len(self.tokens) - self.runs_last

    @property
    def run(self) -> int:
        """How many tokens have KV for sure: all but the last."""
        return 0 if self.reads_states else len(self.tokens) - 1

    def first(self, count: int) -> "DraftedTokens":
        """Return the same where only `count` tokens are proposed."""
        kept = count + self.runs_last
        if kept == len(self.tokens):
            return self
        ids, probs, others = (
            None if each is None else each[:kept] for each in (self.ids, self.probs, self.alternatives)
        )
        return DraftedTokens(self.tokens[:kept], ids, probs, others, self.runs_last, self.reads_states)


@dataclass(frozen=True)
class CodedBitmap:
    """The difference of a bitmap to AnnouncementRequest.before, as `specahead/wire/selection_codec.py` sends it."""

    body: bytes
    """All that stands after the header there."""
    checksum: int
    """Of the bitmap."""


@dataclass(frozen=True)
class RoundOutput:
    """What a round gives. The KV then holds the pending tokens and those that it ran (DraftedTokens.run); kv.length is
    left to the caller.
    """

    branches: list[DraftedTokens]
    """The tokens drafted after each branch, or after the pending tokens."""
    bitmap: np.ndarray | None
    """uint64 [rows, words] of the blocks to announce, if asked for."""
    coded: CodedBitmap | None = None
    """The bitmap in the form that is sent, if the runner made it."""
    began: tuple[int, int] | None = None
    """Of a round that follows a step, the number of tokens that this accepted, and the token that it added."""
    alternative: int | None = None
    """The last of the tokens that the step accepted, if it is another than was drafted there."""

    @property
    def tokens(self) -> list[int]:
        """The tokens drafted after the first branch, or after the pending tokens."""
        return self.branches[0].tokens


def branches_of(sequences: int, most: int) -> int:
    """Return how many branches each sequence of a round may have: 1 if `most` is 0 or 1, else at least 2, and at
    most MOST_ROWS over all sequences.
    """
    return 1 if most <= 1 else max(2, min(most, MOST_ROWS // power_of_two(sequences)))


def gammas(most: int) -> list[int]:
    """Return the numbers of tokens that a round may draft, where a target chooses: powers of two, and the most."""
    return sorted({*(1 << i for i in range(most.bit_length())), most})
