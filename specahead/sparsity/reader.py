"""Which blocks each round of a session reads: one budget over all layers and heads, by the target's memory."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specahead.engine.steps.inputs import ReadMemory, SequenceOutput, SharedBudget, SparseRead
from specahead.sparsity.announce import announced_rows, summary_tokens
from specahead.sparsity.budgets import dense_layers, new_memory, shared_budget
from specahead.sparsity.plan import Plan
from specahead.sparsity.selection import BlockSelection


@dataclass
class Reader:
    """Chooses what one session reads. Call `read` before a pass and `finish` after it, once a round."""

    plan: Plan
    report_blocks: bool = False
    """Whether `chosen` is wanted of sparse rounds, for measurements."""
    is_announced: bool = True
    """Whether a draft announces blocks, which are read in any case. Otherwise the memory alone decides, of what rounds
    that read everything have weighed: so tokens of exact sessions are screened."""
    summary_tokens: float = 0.0
    """Tokens of KV that each sparse head read beside its blocks in the last round."""
    _memory: ReadMemory | None = field(default=None, repr=False)
    _weighs: bool = False
    """Whether the last round weighed everything."""
    _has_weighed: bool = False
    """Whether any round did."""
    _length: int = 0
    """Tokens with KV at the end of the last round."""
    _reads_all: bool = True
    """Whether the last round read everything."""
    _blocks_read: int = 0
    """Blocks that the last round read in sparse layers."""
    _chosen: Tensor | None = None
    """The blocks that the last round read, where it reported them."""

    def anew(self) -> "Reader":
        """Return a reader like this one that remembers nothing."""
        return type(self)(self.plan, self.report_blocks, self.is_announced)

    @property
    def announced_rows(self) -> int:
        """The number of rows that an announcement must have; 0 if none is taken."""
        return announced_rows(self.plan) if self.is_announced else 0

    def read(
        self, announced: BlockSelection | None, base: int, length: int, everything: bool = False, weighs: bool = True
    ) -> SparseRead | None:
        """Return the read of a round that builds on `base` committed tokens and ends at `length`; None: everything.

        announced: the draft's selection, if there is one. Without it a reader that is announced to reads everything,
            and so does another in its first round
        everything: whether the round must read everything
        weighs: whether a reader by its memory alone takes up the weights of such a round, as it always does the first
            time
        Raises ValueError for a selection with another number of rows than `announced_rows`.
        """
        plan = self.plan
        nothing_chosen = self.is_announced and (announced is None or everything)
        if nothing_chosen or not plan.sparse_layers or plan.reads_wholly(length):
            self.read_all(length)
            return None
        if self.is_to_weigh or everything:
            self.read_all(length)
            if self._has_weighed and not weighs:
                return None
            self._weighs = True
            return self._read_of(SharedBudget.of_everything(self._own_memory(), dense_layers(plan)))
        self._length, self._reads_all, self._weighs = length, False, False
        if announced is not None and announced.num_heads != self.announced_rows:
            raise ValueError(f"{announced.num_heads} rows announced, expected {self.announced_rows}")
        self.summary_tokens = summary_tokens(plan, base)
        return self._read_of(shared_budget(plan, self._own_memory(), base, length, announced))

    def _read_of(self, budget: SharedBudget) -> SparseRead:
        return SparseRead(self.plan.block_size, budget, self.plan.uses_means, self.report_blocks)

    def read_all(self, length: int) -> None:
        """Take note of a round that ends at `length` and reads everything, in place of `read`."""
        self._length, self._reads_all, self._weighs = length, True, False

    @property
    def reads_all_alone(self) -> bool:
        """Whether rounds without an announcement read everything."""
        return self.is_announced or not self.plan.sparse_layers

    @property
    def is_to_weigh(self) -> bool:
        """Whether it reads by its memory alone and remembers nothing yet, so that its next round reads everything."""
        return not self.is_announced and not self._has_weighed

    def _own_memory(self) -> ReadMemory:
        self._memory = self._memory or new_memory(self.plan, self.plan.memory_decay)
        return self._memory

    def finish(self, output: SequenceOutput) -> None:
        """Take note of the blocks that the pass read."""
        self._has_weighed |= self._weighs
        self._blocks_read = output.blocks_read or 0
        self._chosen = output.blocks

    @property
    def chosen(self) -> Tensor | None:
        """The blocks that the last round read, bool [layers, kv_heads, blocks].

        None where only the device knows them and `report_blocks` is False.
        """
        if not self._reads_all:
            return self._chosen
        plan = self.plan
        sizes = plan.target_layers, plan.target_kv_heads, plan.num_blocks(self._length)
        return torch.ones(sizes, dtype=torch.bool)

    @property
    def is_sparse(self) -> bool:
        """Whether the last round's blocks were chosen; else it read everything."""
        return not self._reads_all

    @property
    def tokens_read(self) -> tuple[float, int]:
        """Tokens of KV that the heads read in the last round, summaries included, and all tokens of KV."""
        plan = self.plan
        kv_heads, blocks, sparse = plan.target_kv_heads, plan.num_blocks(self._length), len(plan.sparse_layers)
        everything = plan.target_layers * kv_heads * blocks * plan.block_size
        if self._reads_all:
            return float(everything), everything
        dense = plan.target_layers - sparse
        read = float(self._blocks_read + dense * kv_heads * blocks) * plan.block_size
        return read + self.summary_tokens * sparse * kv_heads, everything
