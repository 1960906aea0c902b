"""How rounds are drafted, what is asked of one, and what it gives. Knows no tensors of a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.steps.announcing import Announcer
from specahead.engine.steps.rounds.rules import RoundRules
from specahead.kernels.backends import power_of_two

MOST_ROWS = 128  # tokens that a pass drafts at once before its products take longer than reading the weights


@dataclass(frozen=True)
class RoundSettings:
    """How all rounds of a runner are drafted.

    gamma: tokens of a round. support: entries of a sampled token's distribution that are kept. block_size: tokens of a
    block. read_share: share of the blocks that later passes read; 1: they are dense. sink_blocks, window_blocks: always
    read by them. announcers: by the name of a method, how it announces. refresh_every: rounds from one dense first
    pass of a session to its next, at most; 1: every round has one. memories: sessions that are remembered where that is
    more than 1. branches: that a round drafts at once, at most (`branches_of`). alternatives: how many of the likeliest
    tokens are told at each position. runs_last: whether a round also runs the last token that it proposes, which tells
    the next: who drafts ahead goes on with it. Else it costs a pass less, and the next round begins with it.
    """

    gamma: int
    support: int
    block_size: int
    read_share: float = 1.0
    sink_blocks: int = 1
    window_blocks: int = 4
    announcers: Mapping[str, Announcer] = field(default_factory=dict)
    refresh_every: int = 1
    memories: int = 64
    branches: int = 1
    alternatives: int = 0
    runs_last: bool = True

    def __post_init__(self) -> None:
        if self.branches > 1 and not self.runs_last:
            raise ValueError(f"{self.branches} branches go on behind the last token proposed: let rounds run it, too")
        if self.refresh_every < 1:
            raise ValueError(
                f"refresh_every is {self.refresh_every}, expected at least 1 (1: every round is refreshed)"
            )
        if self.refresh_every > 1 and self.read_share >= 1:
            raise ValueError(
                f"refresh_every is {self.refresh_every} and read_share {self.read_share}: rounds without a dense first "
                "pass read lists; give a read_share below 1, or refresh_every 1"
            )

    def to(self, device: torch.device) -> "RoundSettings":
        """Return the same settings with their tensors on a device."""
        return replace(self, announcers={name: each.to(device) for name, each in self.announcers.items()})


@dataclass(eq=False)
class RoundMemory:
    """What the last dense first pass of one session weighed, where not every round refreshes. The runner keeps it.

    index: of the weights among those that the runner keeps ([layers * heads, blocks] float32, over the passes of a
    round as they count in evidence), None before the first such pass. length: tokens that they are of and that still
    stand. rounds: drafted since that one.
    """

    index: int | None = None
    length: int = 0
    rounds: int = 0

    def refresh_due(self, every: int) -> bool:
        """Whether the next round is one of those, `every` rounds apart, that refresh."""
        return self.index is None or self.rounds + 1 >= every

    def cut(self, length: int) -> None:
        """Forget the tokens from `length` on: what comes in their place was never weighed."""
        self.length = min(self.length, length)


@dataclass(frozen=True)
class AnnouncementRequest:
    """Choose blocks by the announcer named `method`, from `first` up to `last` - 1, `count` of them (Announcer).

    before: uint64 [rows, words], what was announced last round, if it is known. words: of a row.
    """

    method: str
    first: int
    last: int
    count: int
    before: np.ndarray | None
    words: int


@dataclass(frozen=True)
class StepBefore:
    """A step of a target on the same device that judges the tokens which a round goes on behind, and still runs.

    place: of the session in the step. Of each number of tokens that the step may reject, from none to all that it
    judges: before: the token behind which it adds one; uniforms, announce: as in the request.
    """

    place: int
    before: list[int]
    uniforms: list[np.ndarray]
    announce: list[AnnouncementRequest | None]

    @property
    def judged(self) -> int:
        """How many tokens the step judges."""
        return len(self.uniforms) - 1


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
    """KV of `count` tokens that a branch has left at position `source`, and that belongs at position `target`.

    The two stretches do not overlap, unless they are the same.
    """

    source: int
    target: int
    count: int


# Returns which tokens may come next, a mask as of engine.grammars, given a branch and the tokens drafted behind it.
AllowedTokens = Callable[[int, Sequence[int]], np.ndarray]


@dataclass(frozen=True)
class RoundRequest:
    """A round of one session.

    tokens: pending ones, the last of them committed or guessed. temperature 0: greedy. uniforms: [γ + 1] float64.
    refresh: let the first pass be dense, and `memory` stand for what it weighed; otherwise the pass reads by what
    `memory` stands for. Both only count where settings.refresh_every > 1; without a memory nothing is remembered.

    branches: in place of `tokens`, which are then empty, and of `uniforms`: continuations that are drafted at once, at
    most settings.branches. Their KV lies behind the first kv.length tokens, γ + 1 tokens for each branch in order. They
    share the evidence and the announcement. moved: KV that is put in its place before anything is read.

    gamma: tokens to draft; 0: as many as the settings say. top_k, min_p: as of `Sampling`. rules: what
    changes the logits. allowed: which tokens may be drafted; the host is asked before each is drawn, and waits for each
    pass. None: all, at no cost.

    behind: the step that the round is launched behind (Runner.take_verdicts). All else is then as where that rejects no
    token; `tokens` are two, in the place of the second of which comes the one that the step adds.
    """

    kv: SequenceKV
    tokens: list[int]
    temperature: float
    top_p: float
    uniforms: np.ndarray
    announce: AnnouncementRequest | None
    memory: RoundMemory | None = None
    refresh: bool = True
    branches: tuple[Branch, ...] = ()
    moved: MovedKV | None = None
    gamma: int = 0
    top_k: int = 0
    min_p: float = 0.0
    rules: RoundRules | None = None
    allowed: AllowedTokens | None = None
    behind: StepBefore | None = None

    def __post_init__(self) -> None:
        if bool(self.tokens) == bool(self.branches):
            raise ValueError("a round runs either pending tokens or branches: give one of the two")
        if any(not 0 < branch.length <= self.kv.length for branch in self.branches):
            raise ValueError(f"a branch leaves the {self.kv.length} tokens with KV elsewhere than behind one of them")
        if self.branches and self.branches[0].length != self.kv.length:
            raise ValueError(
                f"the first branch leaves after {self.branches[0].length} tokens, expected {self.kv.length}: it goes "
                "on behind all tokens with KV, so that no KV is moved onto what another branch has left"
            )
        if self.behind and (len(self.tokens) != 2 or self.branches or self.moved or self.rules or self.allowed):
            raise ValueError(
                "a round behind a step runs two tokens, the second the step's, without branches, rules or grammar"
            )
        if not self.refresh and (self.memory is None or self.memory.index is None):
            raise ValueError("a round without refresh needs a memory with weights: refresh the session's first round")

    def tokens_written(self, most: int) -> int:
        """Return how many tokens of KV the round adds: the pending ones or the branches, and the drafted ones.

        most: tokens that a round drafts unless it is to draft fewer.
        """
        gamma = self.gamma or most
        branches = max(1, len(self.branches)) * (gamma + 1)
        return max(branches, len(self.tokens) + gamma)


@dataclass(frozen=True)
class DraftedTokens:
    """What a round drafts behind its pending tokens or behind one of its branches.

    tokens: the proposed ones, and one more if the last of these was run (runs_last). ids, probs: [tokens, support] of
    each token's distribution, None if greedy. alternatives: [tokens, settings.alternatives], the likeliest tokens at
    each position in falling order; None if no alternatives were asked for.
    """

    tokens: list[int]
    ids: np.ndarray | None = None
    probs: np.ndarray | None = None
    alternatives: np.ndarray | None = None
    runs_last: bool = True

    @property
    def proposed(self) -> int:
        """How many of the tokens are proposed."""
        return len(self.tokens) - self.runs_last

    @property
    def run(self) -> int:
        """How many of them have KV for sure: all but the last."""
        return len(self.tokens) - 1

    def first(self, count: int) -> "DraftedTokens":
        """Return what is left if only so many tokens are proposed."""
        kept = count + self.runs_last
        ids, probs, others = (
            None if each is None else each[:kept] for each in (self.ids, self.probs, self.alternatives)
        )
        return DraftedTokens(self.tokens[:kept], ids, probs, others, self.runs_last)


@dataclass(frozen=True)
class CodedBitmap:
    """In what a bitmap is different from AnnouncementRequest.before, as `specahead/wire/selection_codec.py` sends it.

    body: all that stands behind the header there. checksum: of the bitmap.
    """

    body: bytes
    checksum: int


@dataclass(frozen=True)
class RoundOutput:
    """What a round gives. The KV then holds what was pending and those tokens that it ran (DraftedTokens.run);
    kv.length is left to the caller.

    branches: what was drafted behind each branch, or behind the pending tokens. bitmap: uint64 [rows, words] of the
    blocks to announce, if asked for. coded: the same in the form that is sent, if the runner made it. blocks_read: over
    passes, layers and KV heads; None where all passes are dense. began_behind: of a round behind a step, the
    tokens that this accepted, and the one that it added. alternative: the last of those that it accepted, if it is
    another than was drafted there.
    """

    branches: list[DraftedTokens]
    bitmap: np.ndarray | None
    blocks_read: int | None = None
    coded: CodedBitmap | None = None
    began_behind: tuple[int, int] | None = None
    alternative: int | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens drafted behind the first branch, or behind the pending tokens."""
        return self.branches[0].tokens


def branches_of(sequences: int, most: int) -> int:
    """Return how many branches each of so many sequences may have in a round: 1 if `most` is, else at least 2, and no
    more than MOST_ROWS of all together.
    """
    return 1 if most == 1 else max(2, min(most, MOST_ROWS // power_of_two(sequences)))


def gammas(most: int) -> list[int]:
    """Return the numbers of tokens that a round may draft, where a target chooses: powers of two, and the most."""
    return sorted({*(1 << i for i in range(most.bit_length())), most})
