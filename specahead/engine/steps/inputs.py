"""What a runner is given and what it gives back, a sequence each. Knows no tensors of a batch."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.distributions import Support
from specahead.engine.sampling.judging import Drafted
from specahead.engine.sampling.logprobs import TokenLogprobs

NO_MEMORY = -1  # the index of a sequence of which nothing is remembered
Logits = Literal["none", "last", "all"]
# Per layer: None (dense) or block lists [kv_heads, width] int32 and counts [kv_heads] int32, on the CPU.
LayerLists = list[tuple[Tensor, Tensor] | None]


@dataclass
class ReadMemory:
    """The weights that each block of one sequence got when it was last read, faded since. The runner keeps them.

    importance: [rows] float32, a factor of each row's weights; rows are (sparse layer, KV head). decay: the factor by
    which weights fade in a pass. index: the sequence's index among the memories that the runner keeps, None before its
    first pass; NO_MEMORY: nothing is remembered of it.
    """

    importance: Tensor
    decay: float
    index: int | None = None


@dataclass
class SharedBudget:
    """Blocks that are read in any case, and `room` for so many from `first` up to `last` - 1, in all layers and heads.

    bitmap: uint64 [rows, words], a bit a block, lowest first: read in any case, as are blocks before `first` and from
    `last` on. Those between these count. The other blocks are those that `memory` holds the highest weights for.
    everything: all blocks are read.
    """

    bitmap: np.ndarray
    first: int
    last: int
    room: int
    memory: ReadMemory
    dense_layers: tuple[int, ...]
    everything: bool = False

    @staticmethod
    def of_everything(memory: ReadMemory, dense_layers: tuple[int, ...]) -> "SharedBudget":
        """Return what reads all blocks, and has `memory` take up what they weigh."""
        return SharedBudget(np.empty((len(memory.importance), 0), np.uint64), 0, 0, 0, memory, dense_layers, True)


@dataclass
class SparseRead:
    """What a sequence's queries read: lists that are known before the pass, or a budget that the pass shares out.

    group_means: let means stand in for what is not read (KVCache.means). emit_weights: return what weight each listed
    block got. report_blocks: return which blocks were read. drafts: it is not the pass that reads so, which reads
    everything and has the budget's memory take up what it weighs. Its tokens behind the first are drafted before by
    passes that read so, one token each (specahead.engine.steps.passes.drafting).
    """

    block_size: int
    lists: LayerLists | None = None
    budget: SharedBudget | None = None
    group_means: bool = False
    emit_weights: bool = False
    report_blocks: bool = False
    drafts: bool = False

    def __post_init__(self) -> None:
        if (self.lists is None) == (self.budget is None):
            raise ValueError("a sparse read has either lists or a budget")
        if self.drafts and self.budget is None:
            raise ValueError("drafting passes read by a budget: give one in place of lists")

    @property
    def reads_all(self) -> bool:
        """Whether it is known before the pass that every block is read."""
        return self.budget is not None and self.budget.first >= self.budget.last

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers that are read wholly."""
        if self.budget is not None:
            return self.budget.dense_layers
        return tuple(layer for layer, entry in enumerate(self.lists or []) if entry is None)


@dataclass(frozen=True)
class SparsePrompt:
    """How a part of a prompt is read sparsely (specahead.kernels.sparse_prompt_attention).

    share: of the tokens before them, that its tokens read. dense_layers: the layers that read everything.
    """

    share: float
    dense_layers: tuple[int, ...] = ()


@dataclass
class SequenceInput:
    """`tokens` to run at positions kv.length …; their KV is written and kv.length moves on.

    read, prompt: how queries read sparsely; with neither, they read everything. drafted: of `tokens` all but the first,
    to be judged; then logits must be "all", and the output is a verdict instead of them. Where the read drafts, tokens
    behind the first are put in the place of those given, in `drafted` as well. follows: the place that the sequence had
    in the step before, which still runs (Runner.launch): its first token is the one which that step leaves, not the one
    given. It had as many tokens there, and may begin before kv.length: behind those which that step accepts.
    behind: its place in a draft's rounds, which still run (Runner.take_rounds): its last tokens, and the bitmap of its
    budget if it has one, are those that its round leaves, not those given. held: how many tokens behind the first come
    before these. alternatives: beside how many of the drafted tokens, the first ones, runs what else its round found
    likeliest there, if it is behind one. Where the token that follows those accepted is such an alternative, it counts
    as accepted, and the one behind it follows. light: whether it runs by the weights that the runner has for what a
    later pass judges, if it has such.
    """

    kv: SequenceKV
    tokens: list[int]
    logits: Logits = "none"
    read: SparseRead | None = None
    drafted: Drafted | None = None
    prompt: SparsePrompt | None = None
    follows: int | None = None
    behind: int | None = None
    held: int = 0
    alternatives: int = 0
    light: bool = False

    @property
    def screens(self) -> bool:
        """Whether a later pass judges what it leaves."""
        return self.drafted is not None and self.drafted.screens

    @property
    def rows(self) -> int:
        """How many tokens run, alternatives included; behind `tokens` their KV lies for this pass alone."""
        return len(self.tokens) + self.alternatives

    @property
    def logits_rows(self) -> int:
        """How many of the tokens, the last ones, give logits."""
        return {"none": 0, "last": 1, "all": len(self.tokens)}[self.logits]

    @property
    def first_position(self) -> int:
        """The position of its first token; where it follows, the lowest that may be."""
        return self.kv.length - (0 if self.follows is None else len(self.tokens) - 1)


@dataclass
class SequenceOutput:
    """What one sequence of a pass gives.

    logits: [rows, vocab] float32 for the rows asked for, or None. read_weights: [layers, kv_heads, blocks] float32 on
    the CPU, what each block that was read got: the sum over a KV head's query heads of the mean over the queries; 0 for
    what was not read and in dense layers; None if not asked for. blocks_read: over all sparse layers and heads, where a
    budget was shared out. blocks: bool [layers, kv_heads, blocks] on the CPU, those that were read, if asked for.
    tokens_fetched: (layer, KV head, token) triples that came from the backing store. verdict: tokens accepted and the
    next token, where the input was drafted and the runner judges; then there are no logits. finite: whether
    the logits of the verdict were numbers; if not, it means nothing. alternative: the last accepted token, if it is
    none of those drafted but an alternative to one. logprobs, supports: of the tokens of the verdict, if asked for.
    """

    logits: Tensor | None = None
    read_weights: Tensor | None = None
    blocks_read: int | None = None
    blocks: Tensor | None = None
    tokens_fetched: int = 0
    verdict: tuple[int, int] | None = None
    finite: bool = True
    alternative: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    supports: list[Support] = field(default_factory=list)
