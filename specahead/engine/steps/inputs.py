"""The inputs and outputs of a runner, one of each for a sequence. Knows no tensors of a batch."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.distributions import Support
from specahead.engine.sampling.judging import Drafted
from specahead.engine.sampling.logprobs import TokenLogprobs

NO_MEMORY = -1  # the index of a sequence that has no memory
Logits = Literal["none", "last", "all"]


@dataclass
class ReadMemory:
    """The weights that each block of one sequence got when it was last read, faded since. The runner keeps them."""

    importance: Tensor
    """[rows] float32, a factor of each row's weights; rows are (sparse layer, KV head)."""
    decay: float
    """The factor by which weights fade in a pass."""
    index: int | None = None
    """The sequence's index among the memories of the runner; None before its first pass; NO_MEMORY: it has none."""


@dataclass
class SharedBudget:
    """Which blocks a pass reads: some in any case, and others by their remembered weights, as the budget allows."""

    bitmap: np.ndarray
    """uint64 [rows, words], a bit for each block, lowest first: blocks that are read in any case. Bits from `first` up
    to `last` - 1 count."""
    first: int
    """Blocks before this one are read in any case."""
    last: int
    """Blocks from this one on are read in any case."""
    room: int
    """How many blocks between `first` and `last` are read, over all layers and heads."""
    memory: ReadMemory
    """Blocks that are not read in any case compete by its weights."""
    dense_layers: tuple[int, ...]
    """Layers that read everything and have no rows."""
    everything: bool = False
    """Whether all blocks are read."""

    @staticmethod
    def of_everything(memory: ReadMemory, dense_layers: tuple[int, ...]) -> "SharedBudget":
        """Return the budget of a pass that reads all blocks, and has `memory` take up their weights."""
        return SharedBudget(np.empty((len(memory.importance), 0), np.uint64), 0, 0, 0, memory, dense_layers, True)


@dataclass
class SparseRead:
    """What a sequence's queries read of its KV."""

    block_size: int
    """Tokens of a block."""
    budget: SharedBudget
    """The pass shares it out. To read exactly some blocks, give these as its bitmap, and no room."""
    group_means: bool = False
    """Whether means stand in for what is not read (KVCache.means)."""
    report_blocks: bool = False
    """Whether the output has the blocks that were read."""
    drafts: bool = False
    """Whether the sequence drafts for itself: passes of one token that read by the budget draft its tokens after the
    first. The pass that judges these reads everything and has the budget's memory take up the weights."""

    @property
    def reads_all(self) -> bool:
        """Whether it is known before the pass that every block is read."""
        return self.budget.first >= self.budget.last

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers that are read wholly."""
        return self.budget.dense_layers


@dataclass
class Audit:
    """What an audited sequence reads sparsely, and what that gave (specahead.engine.steps.auditing)."""

    read: SparseRead
    """The read of the sparse pass."""
    logits: Tensor | None = None
    """[rows, vocab] on the device, from the sparse pass to the dense one."""


@dataclass
class SequenceInput:
    """Tokens of a sequence to run; their KV is written and kv.length moves on."""

    kv: SequenceKV
    tokens: list[int]
    """They stand at positions kv.length …"""
    logits: Logits = "none"
    """Which tokens give logits: none, the last one, or all."""
    read: SparseRead | None = None
    """How queries read sparsely; None: they read everything."""
    drafted: Drafted | None = None
    """The last of `tokens`, to be judged; then logits must be "all", which are those of the token before them and
    theirs, and the output is a verdict in place of them. Where the read drafts, the tokens that it drafts replace those
    given, here and in `tokens`."""
    follows: int | None = None
    """The row of the sequence's verdict in the device chain, where it follows a step that still runs: its first token
    is the one that this step adds. It had as many tokens there, and may begin before kv.length: after those that the
    step accepts."""
    draft_row: int | None = None
    """The row of its drafts in the device chain, where it judges rounds that still run: its last tokens, and the bitmap
    of its budget if it has one, are those of its round."""
    held: int = 0
    """How many tokens after the first come before those of the round."""
    alternatives: int = 0
    """How many of the drafted tokens, the first ones, run with an alternative: the other token that the round found
    likeliest there. If the token that follows the accepted ones is one, it is accepted, too, and the next follows."""
    light: bool = False
    """Whether it runs by the weights that the runner has for what a later pass judges, if it has such."""
    audit: Audit | None = None
    """Where it is audited: how it runs before it reads everything. Then it is drafted, has no `read`, and its output
    has the divergence."""

    @property
    def screens(self) -> bool:
        """Whether a later pass judges what it leaves."""
        return self.drafted is not None and self.drafted.screens

    @property
    def rows(self) -> int:
        """How many tokens run, alternatives included; after `tokens` their KV lies for this pass alone."""
        return len(self.tokens) + self.alternatives

    @property
    def drafted_from(self) -> int:
        """The place of the first drafted token among the tokens; after all of them where nothing is drafted."""
        return len(self.tokens) - (len(self.drafted.tokens) if self.drafted is not None else 0)

    @property
    def ends_prompt(self) -> bool:
        """Whether it reads the end of a prompt, and its last token's logits are judged."""
        return self.drafted is not None and self.drafted_from > 1

    @property
    def logits_rows(self) -> int:
        """How many of the tokens, the last ones, give logits."""
        if self.drafted is not None:
            return 1 + len(self.drafted.tokens)
        return {"none": 0, "last": 1, "all": len(self.tokens)}[self.logits]

    @property
    def first_position(self) -> int:
        """The position of its first token; where it follows, the lowest that may be."""
        return self.kv.length - (0 if self.follows is None else len(self.tokens) - 1)


@dataclass
class SequenceOutput:
    """What one sequence of a pass gives."""

    logits: Tensor | None = None
    """[rows, vocab] float32 for the rows that give logits; None if there are none or the pass judges."""
    blocks_read: int | None = None
    """Blocks read over all sparse layers and heads, where a budget was shared out."""
    blocks: Tensor | None = None
    """bool [layers, kv_heads, blocks] on the pass's device, the blocks that were read, if asked for."""
    tokens_fetched: int = 0
    """(layer, KV head, token) triples that came from the backing store."""
    verdict: tuple[int, int] | None = None
    """Tokens accepted and the next token, where the input was drafted."""
    finite: bool = True
    """Whether the logits of the verdict were numbers; if not, the verdict means nothing."""
    alternative: int | None = None
    """The last accepted token, if it is an alternative to the one that was drafted."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the verdict's tokens, if asked for."""
    supports: list[Support] = field(default_factory=list)
    """What the verdict's tokens were drawn from, if asked for."""
    divergence: np.ndarray | None = None
    """[rows, 3] float32, as specahead.engine.sampling.divergence has it, of each row that gives logits, if audited."""
