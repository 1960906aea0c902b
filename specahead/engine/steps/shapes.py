"""The shapes of passes and of a draft's rounds: all that their launches are specialised for, so the keys of graphs."""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from specahead.engine.kv.pages import PAGE_SIZE


class Choosers(IntEnum):
    """Which tokens of a sequence choose blocks, in a model whose own attention does."""

    NONE = 0
    """None: everything is read."""
    FIRST = 1
    """The first one, whose choice the others share."""
    EACH = 2
    """Each for itself."""


@dataclass(frozen=True)
class ReadShape:
    """The reads of a pass's layers, and the weights that are remembered of them."""

    block_size: int = 0
    """Tokens of a block; 0: all layers read everything."""
    groups: int = 0
    """Group means of a sequence, at most; 0: none stand in for blocks that are not read."""
    dense_layers: tuple[int, ...] = ()
    """The layers that read everything."""
    decay: float = 0.0
    """The factor by which remembered weights fade in a pass."""
    weighs: bool = False
    """Whether the pass reads everything, and the budget's memory takes up what that weighs (SparseRead.drafts)."""
    fetches: bool = False
    """Whether block tables name pages of the backing store. The pass then fetches listed or chosen pages before it
    reads them."""
    reports: bool = False
    """Whether the host reads the lists after the pass (SparseRead.report_blocks)."""

    @property
    def is_sparse(self) -> bool:
        """Whether budgets are shared out."""
        return self.block_size > 0


@dataclass(frozen=True)
class JudgeShape:
    """How a pass judges drafted tokens, which are all tokens of a sequence but the first."""

    support: int = 0
    """Entries of the distribution that a token was drawn from, at most; 0: all sequences are greedy."""
    cuts: int = 0
    """The largest top_k that there is room for; 0: no distribution is cut by top_k or min_p."""
    draws_own: bool = False
    """Whether the target draws its own token at each position, and accepts a drafted one that is the same."""
    alternatives: int = 0
    """Rows of a sequence, at most, that run beside its drafted tokens (SequenceInput.alternatives)."""


@dataclass(frozen=True)
class PassShape:
    """All that the launches of a pass are specialised for."""

    sequences: int
    """How many sequences there is room for."""
    rows: int
    """The tokens of all sequences together."""
    queries: int
    """Tokens of one sequence, at most."""
    pages: int
    """Pages of one sequence, at most."""
    longest: int = 0
    """Rows of one sequence, at most, where alternatives run beside its tokens; 0: as many as `queries`."""
    pinned: bool = False
    """Whether splits of attention do not depend on the batch."""
    light: bool = False
    """Whether the pass runs by the weights for what a later pass judges (SequenceInput.light)."""
    drafts: int = 0
    """Tokens of each sequence that are drafted before; they are all that runs in a pass that fetches."""
    turn: int = 0
    """1 or 2 for a step of the device chain of one token a sequence, or one that drafts: it may begin before the host
    has seen the last step. Such steps take turns between two sets of buffers. 0 for all others."""
    judges_drafts: bool = False
    """Whether it may judge what a draft's rounds leave in the device chain (SequenceInput.draft_row)."""
    choosers: Choosers = Choosers.NONE
    """Which tokens of a sequence choose the blocks that it reads."""
    gives_logits: bool = True
    """Whether a step gives the logits of all rows, where nothing is judged; else it ends after the last layer's KV."""
    read: ReadShape = ReadShape()
    judge: JudgeShape | None = None
    """None: nothing is judged."""

    @property
    def most_rows(self) -> int:
        """Rows of one sequence, at most."""
        return self.longest or self.queries

    @property
    def alternatives(self) -> int:
        """Alternatives of one sequence, at most."""
        return self.judge.alternatives if self.judge else 0

    @property
    def fetches_chosen(self) -> bool:
        """Whether each layer fetches the blocks that it has chosen by itself."""
        return self.read.fetches and self.choosers is not Choosers.NONE

    @property
    def shares_out(self) -> bool:
        """Whether lists are made of a budget; a pass that weighs needs none but to draft."""
        return self.read.is_sparse and (self.drafts > 0 or not self.read.weighs)

    @property
    def drafts_alone(self) -> bool:
        """Whether nothing runs but the passes that draft."""
        return self.drafts > 0 and self.read.fetches

    @property
    def chained(self) -> bool:
        """Whether it leaves its verdicts in the device chain."""
        return self.turn > 0 or self.judges_drafts

    @property
    def blocks(self) -> int:
        """How many blocks a sequence has, at most."""
        return -(-self.pages * PAGE_SIZE // self.read.block_size)

    def sparse_layers(self, num_layers: int) -> list[int]:
        """Return the layers with lists, of all that a model has."""
        return [layer for layer in range(num_layers) if layer not in self.read.dense_layers]

    def reading(self, **changes: Any) -> "PassShape":
        """Return the shape with other fields of `read`."""
        return replace(self, read=replace(self.read, **changes))

    def judging(self, **changes: Any) -> "PassShape":
        """Return the shape with other fields of `judge`, which judges from then on."""
        return replace(self, judge=replace(self.judge or JudgeShape(), **changes))


@dataclass(frozen=True)
class RoundShape:
    """All that the launches of a draft's round are specialised for, beside RoundSettings."""

    sequences: int
    """How many sequences there is room for."""
    queries: int
    """Pending tokens of a sequence, at most."""
    pages: int
    """Pages of a sequence, at most."""
    sampled: bool
    """Whether tokens may be drawn, not only greedy."""
    announces: bool
    """Whether the round announces blocks."""
    gamma: int
    """Tokens that are proposed."""
    branches: int = 1
    """Branches of a sequence; 1: it runs pending tokens."""
    ruled: bool = False
    """Whether rules change logits."""
    chained: bool = False
    """Whether sequences may follow a step that still runs, and a step may judge what they draft before the host has
    seen it. Then they have one branch."""

    @property
    def rows(self) -> int:
        """How many tokens are drafted at once: the branches of all sequences."""
        return self.sequences * self.branches

    def blocks(self, block_size: int) -> int:
        """Return how many blocks a sequence has, at most."""
        return -(-self.pages * PAGE_SIZE // block_size)
