"""The target's side: what each of a session's rounds reads, by the method that the session was opened with."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch import LayerLists, ReadMemory, SequenceKeys, SharedBudget, SparseRead
from kernels.selection import compact
from sparsity.announce import shared_room
from sparsity.choice import mandatory
from sparsity.in_advance import RoundView
from sparsity.just_in_time import JustInTime
from sparsity.methods import Method, check_method
from sparsity.plan import Plan
from sparsity.selection import BlockSelection


@dataclass
class Reader:
    """One session's. `read` before a pass, `finish` after it, once a round.

    memory: decayed weights of what was read. chosen: what the last round read; both [layers, kv_heads, blocks], and
    None while the runner keeps them.
    """

    method: Method
    plan: Plan
    shares_budget: bool = False  # whether the runner shares budgets out itself, where the method has one
    memory: Tensor | None = None
    chosen: Tensor | None = None
    summary_tokens: float = 0.0  # that each sparse head read beside its blocks
    _read_memory: ReadMemory | None = field(default=None, repr=False)
    _blocks_read: int | None = None  # in sparse layers, by the runner's count
    _selector: JustInTime | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_method(self.method, self.plan)
        if self.method.just_in_time is not None:
            self._selector = JustInTime(self.plan, self.method.rule_of(self.plan), self.method.just_in_time)

    @property
    def announced_rows(self) -> int:
        """Rows that an announcement must have; 0 if the method takes none."""
        return self.method.announcing.rows(self.plan) if self.method.announcing else 0

    def read(self, announced: list[BlockSelection], base: int, length: int) -> SparseRead | None:
        """What a round reads that builds on `base` committed tokens and ends at `length`; None is everything.

        announced: the draft's selection, or one for each query; empty if there is none: then a method that needs
        one reads everything.
        """
        self._length = length
        self._reads_all = self.method.name == "dense" or (
            self.method.announcing is not None and not announced
        )
        if self._reads_all:
            return None
        self.summary_tokens = self.method.summaries(self.plan, base)
        if self._selector is not None:
            self._selector.begin(base)
            return SparseRead(self.plan.block_size, selector=self._selector)
        if self.shares_budget and self.method.name == "ahead":
            return self._shared(announced[0], base)
        selections: list[BlockSelection | None] = list(announced) or [None]
        rounds = [self._choose(item, base) for item in selections]
        self._planned = torch.stack(rounds).any(0)
        means = self.method.uses_means(self.plan)
        if len(rounds) > 1:
            each = _EachQuery(
                {
                    layer: torch.stack([r[i] for r in rounds])
                    for i, layer in enumerate(self.plan.sparse_layers)
                }
            )
            return SparseRead(self.plan.block_size, selector=each)
        lists = to_lists(self._planned, self.plan)
        return SparseRead(self.plan.block_size, lists, group_means=means, emit=self.method.remembers)

    def _shared(self, announced: BlockSelection, base: int) -> SparseRead | None:
        """`in_advance.ahead`, left to the runner."""
        plan, blocks = self.plan, self.plan.num_blocks(self._length)
        self._reads_all = plan.budget == 1
        if self._reads_all:
            return None
        if announced.num_heads != self.announced_rows:
            raise ValueError(f"ahead: {announced.num_heads} rows announced, expected {self.announced_rows}")
        if self._read_memory is None:
            importance = torch.tensor([plan.head_importance[layer] for layer in plan.sparse_layers])
            self._read_memory = ReadMemory(importance.flatten(), plan.memory_decay)
        first, last = plan.middle(plan.num_blocks(base), self.method.window)
        room = shared_room(plan, base, blocks) - announced.count(first, last)
        sparse = set(plan.sparse_layers)
        dense = tuple(layer for layer in range(plan.target_layers) if layer not in sparse)
        words = announced.resized(blocks).words
        budget = SharedBudget(words, first, last, room, self._read_memory, dense)
        return SparseRead(plan.block_size, group_means=self.method.uses_means(plan), emit=True, budget=budget)

    def _choose(self, announced: BlockSelection | None, base: int) -> Tensor:
        """bool [sparse layers, kv_heads, blocks]"""
        plan, blocks = self.plan, self.plan.num_blocks(self._length)
        sparse = plan.sparse_layers
        view = RoundView(
            plan,
            self.method.rule_of(plan),
            base,
            blocks,
            None if announced is None else self.expand(announced, blocks),
            None if self.memory is None else _fit(self.memory[sparse], blocks),
        )
        assert self.method.in_advance is not None
        return self.method.in_advance(view) | mandatory(plan, base, blocks, self.method.window)

    def expand(self, announced: BlockSelection, blocks: int) -> Tensor:
        """What an announcement says for each target head: bool [sparse layers, kv_heads, blocks]"""
        if announced.num_heads != self.announced_rows:
            raise ValueError(
                f"{self.method.name}: {announced.num_heads} rows announced, expected {self.announced_rows}"
            )
        assert self.method.announcing is not None
        return torch.from_numpy(announced.resized(blocks).matrix())[self.method.announcing.expand(self.plan)]

    def finish(self, read_weights: Tensor | None, blocks_read: int | None = None) -> None:
        """Remember what the pass read, by its SequenceOutput. read_weights: [layers, kv_heads, blocks], if emitted."""
        plan, blocks = self.plan, self.plan.num_blocks(self._length)
        self._blocks_read = blocks_read
        if blocks_read is not None:
            self.chosen = None
            return
        chosen = torch.ones(plan.target_layers, plan.target_kv_heads, blocks, dtype=torch.bool)
        if not self._reads_all and self._selector is not None:
            for layer, mask in enumerate(self._selector.chosen):
                if mask is not None:
                    chosen[layer] = (mask.any(0) if mask.dim() == 3 else mask).cpu()
        elif not self._reads_all:
            chosen[plan.sparse_layers] = self._planned
        self.chosen = chosen
        if read_weights is not None:
            faded = torch.zeros_like(read_weights)
            if self.memory is not None:
                faded = plan.memory_decay * _fit(self.memory, blocks)
            self.memory = torch.maximum(read_weights, faded)

    @property
    def is_sparse(self) -> bool:
        """Whether the last round's blocks were chosen; else it read everything."""
        return not self._reads_all

    @property
    def tokens_read(self) -> tuple[float, int]:
        """Of the last round: tokens of KV that its heads read, summaries included, and tokens that there are."""
        plan = self.plan
        layers, kv_heads, blocks = plan.target_layers, plan.target_kv_heads, plan.num_blocks(self._length)
        if self._blocks_read is not None:
            dense = layers - len(plan.sparse_layers)
            read = float(self._blocks_read + dense * kv_heads * blocks) * plan.block_size
        else:
            assert self.chosen is not None
            read = float(self.chosen.sum()) * plan.block_size
        if not self._reads_all:
            read += self.summary_tokens * len(self.plan.sparse_layers) * kv_heads
        return read, layers * kv_heads * blocks * self.plan.block_size


@dataclass
class _EachQuery:
    """A selector of choices made in advance for each query: layer -> bool [rows, kv_heads, blocks]."""

    chosen: dict[int, Tensor]

    def choose(self, layer: int, queries: Tensor, keys: SequenceKeys, scale: float) -> Tensor | None:
        mask = self.chosen.get(layer)
        return None if mask is None else mask[: len(queries)].to(queries.device)


def to_lists(chosen: Tensor, plan: Plan) -> LayerLists:
    """bool [sparse layers, kv_heads, blocks] to what a SparseRead takes."""
    shape = chosen.shape[:2]
    blocks, counts = compact(chosen.flatten(0, 1))  # of all layers at once: small calls are what this costs
    blocks, counts = blocks.view(*shape, blocks.shape[1]), counts.view(shape)
    lists: LayerLists = [None] * plan.target_layers
    for row, layer in enumerate(plan.sparse_layers):
        lists[layer] = blocks[row], counts[row]
    return lists


def _fit(values: Tensor, blocks: int) -> Tensor:
    """The last dimension cut or filled with zeros to `blocks`."""
    return torch.nn.functional.pad(values, (0, blocks - values.shape[-1]))
