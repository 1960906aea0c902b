"""The target's side: the blocks that each round of a session reads, by the session's method."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specahead.engine.steps.inputs import LayerLists, ReadMemory, SequenceOutput, SharedBudget, SparseRead
from specahead.kernels.selection import compact
from specahead.sparsity.budgets import dense_layers, new_memory, shared_budget
from specahead.sparsity.choice import mandatory
from specahead.sparsity.in_advance import RoundView
from specahead.sparsity.methods import Method, check_method
from specahead.sparsity.plan import Plan
from specahead.sparsity.selection import BlockSelection


@dataclass
class Reader:
    """Chooses the blocks that one session reads. Call `read` before a pass and `finish` after it, once a round."""

    method: Method
    plan: Plan
    report_blocks: bool = False  # whether `chosen` is wanted, for measurements
    summary_tokens: float = 0.0  # tokens of KV that each sparse head read beside its blocks in the last round
    _memory: Tensor | None = None  # faded weights of blocks, [layers, kv_heads, blocks], where lists are made
    _read_memory: ReadMemory | None = field(default=None, repr=False)  # where the pass shares out a budget
    _weighs: bool = False  # whether the last round weighed everything
    _has_weighed: bool = False  # whether any round did
    _length: int = 0  # tokens with KV at the end of the last round
    _reads_all: bool = True  # whether the last round read everything
    _planned: Tensor | None = None  # the lists of the last round, bool [sparse layers, kv_heads, blocks]
    _blocks_read: int | None = None  # blocks read in sparse layers, where the pass shared out a budget
    _chosen: Tensor | None = None  # the blocks that the last round read, where it did not read all

    def __post_init__(self) -> None:
        check_method(self.method, self.plan)

    def anew(self) -> "Reader":
        """Return a reader like this one that remembers nothing."""
        return type(self)(self.method, self.plan, self.report_blocks)

    @property
    def announced_rows(self) -> int:
        """The number of rows that an announcement must have; 0 if the method takes none."""
        return self.method.announcing.rows(self.plan) if self.method.announcing else 0

    def read(
        self, announced: BlockSelection | None, base: int, length: int, everything: bool = False, weighs: bool = True
    ) -> SparseRead | None:
        """Return the read of a round that builds on `base` committed tokens and ends at `length`; None: everything.

        announced: the draft's selection, if there is one. Without it a method that needs one reads everything, and so
            does a method that reads by its memory alone in its first round
        everything: whether the round must read everything
        weighs: whether a method that reads by its memory alone takes up the weights of such a round, as it always does
            the first time
        Raises ValueError for a selection with another number of rows than the method's.
        """
        method, plan = self.method, self.plan
        needs_all = plan.reads_wholly(length) or self._needs_all(announced is not None)
        if needs_all or (everything and not method.reads_by_memory):
            self.read_all(length)
            return None
        if method.reads_by_memory and (everything or not self._has_weighed):
            self.read_all(length)
            if self._has_weighed and not weighs:
                return None
            self._weighs = True
            return self._read_of(budget=SharedBudget.of_everything(self._own_memory(), dense_layers(plan)))
        self._length, self._planned, self._reads_all, self._weighs = length, None, False, False
        if announced is not None and announced.num_heads != self.announced_rows:
            raise ValueError(f"{method.name}: {announced.num_heads} rows announced, expected {self.announced_rows}")
        self.summary_tokens = method.summaries(plan, base)
        if method.shares_budget:
            return self._read_of(budget=shared_budget(plan, self._own_memory(), base, length, announced))
        self._planned = self._choose(announced, base)
        return self._read_of(lists=to_lists(self._planned, plan))

    def _read_of(self, lists: LayerLists | None = None, budget: SharedBudget | None = None) -> SparseRead:
        method = self.method
        emits = method.remembers, self.report_blocks
        return SparseRead(self.plan.block_size, lists, budget, method.uses_means(self.plan), *emits)

    def read_all(self, length: int) -> None:
        """Take note of a round that ends at `length` and reads everything, in place of `read`."""
        self._length, self._planned, self._reads_all, self._weighs = length, None, True, False

    @property
    def reads_all_alone(self) -> bool:
        """Whether rounds without an announcement read everything."""
        return self._needs_all(is_announced=False)

    def _needs_all(self, is_announced: bool) -> bool:
        method = self.method
        return (
            (method.in_advance is None and not method.shares_budget)
            or (method.announcing is not None and not is_announced)
            or not self.plan.sparse_layers
        )

    def _own_memory(self) -> ReadMemory:
        self._read_memory = self._read_memory or new_memory(self.plan, self.plan.memory_decay)
        return self._read_memory

    def _choose(self, announced: BlockSelection | None, base: int) -> Tensor:
        """Return the blocks to read, bool [sparse layers, kv_heads, blocks]."""
        plan, blocks = self.plan, self.plan.num_blocks(self._length)
        view = RoundView(
            plan,
            self.method.rule_of(plan),
            base,
            blocks,
            None if announced is None else self._expand(announced, blocks),
            None if self._memory is None else _fit(self._memory[plan.sparse_layers], blocks),
        )
        assert self.method.in_advance is not None
        return self.method.in_advance(view) | mandatory(plan, base, blocks, self.method.window)

    def _expand(self, announced: BlockSelection, blocks: int) -> Tensor:
        """Return the announced blocks of each target head: bool [sparse layers, kv_heads, blocks]."""
        assert self.method.announcing is not None
        return torch.from_numpy(announced.resized(blocks).matrix())[self.method.announcing.expand(self.plan)]

    def finish(self, output: SequenceOutput) -> None:
        """Take note of the blocks that the pass read, and remember the weights that it gave."""
        plan, blocks = self.plan, self.plan.num_blocks(self._length)
        self._has_weighed |= self._weighs
        self._blocks_read = None if self._reads_all else output.blocks_read
        self._chosen = output.blocks
        if self._planned is not None:
            self._chosen = torch.ones(plan.target_layers, plan.target_kv_heads, blocks, dtype=torch.bool)
            self._chosen[plan.sparse_layers] = self._planned
        if output.read_weights is not None:
            faded = torch.zeros_like(output.read_weights)
            if self._memory is not None:
                faded = plan.memory_decay * _fit(self._memory, blocks)
            self._memory = torch.maximum(output.read_weights, faded)

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
        layers, kv_heads, blocks = plan.target_layers, plan.target_kv_heads, plan.num_blocks(self._length)
        everything = layers * kv_heads * blocks * plan.block_size
        if self._reads_all:
            return float(everything), everything
        if self._blocks_read is not None:
            dense = layers - len(plan.sparse_layers)
            read = float(self._blocks_read + dense * kv_heads * blocks) * plan.block_size
        else:
            assert self._chosen is not None
            read = float(self._chosen.sum()) * plan.block_size
        return read + self.summary_tokens * len(plan.sparse_layers) * kv_heads, everything


def to_lists(chosen: Tensor, plan: Plan) -> LayerLists:
    """Return bool [sparse layers, kv_heads, blocks] as the lists of a SparseRead."""
    shape = chosen.shape[:2]
    blocks, counts = compact(chosen.flatten(0, 1))  # of all layers at once: small calls are what this costs
    blocks, counts = blocks.view(*shape, blocks.shape[1]), counts.view(shape)
    lists: LayerLists = [None] * plan.target_layers
    for row, layer in enumerate(plan.sparse_layers):
        lists[layer] = blocks[row], counts[row]
    return lists


def _fit(values: Tensor, blocks: int) -> Tensor:
    """Return values with the last dimension cut to `blocks`, or filled up with zeros."""
    return torch.nn.functional.pad(values, (0, blocks - values.shape[-1]))
