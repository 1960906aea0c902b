"""One forward pass over several sequences of different lengths, flattened to [1, tokens].

The sequences are ordered by how they attend: plainly (dense), dense with block weights, over block lists, over
blocks that are chosen layer by layer while the pass runs.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.judging import Drafted
from engine.kv.cache import KVCache
from engine.kv.pages import PAGE_SIZE, SequenceKV
from kernels.paged_attention import BlockLists, GroupMeans, gather_pages

Logits = Literal["none", "last", "all"]
# Per layer: None (dense) or block lists [kv_heads, width] int32 and counts [kv_heads] int32, on the CPU.
LayerLists = list[tuple[Tensor, Tensor] | None]


@dataclass(frozen=True)
class SequenceKeys:
    """The keys of one sequence in one layer, for selectors that look at them."""

    k_pages: Tensor
    table: Tensor  # [pages] int64
    length: int

    def read(self, first: int, last: int) -> Tensor:
        """Keys of tokens first … last - 1, `first` at a page's start: [kv_heads, last - first, dim]"""
        pages = self.table[None, first // PAGE_SIZE : -(-last // PAGE_SIZE)]
        return gather_pages(self.k_pages, pages)[:, : last - first]


class LayerSelector(Protocol):
    """Chooses blocks just in time: each layer's queries are known, its attention has not run."""

    def choose(self, layer: int, queries: Tensor, keys: SequenceKeys, scale: float) -> Tensor | None:
        """queries [rows, heads, dim] -> bool [kv_heads, blocks], or [rows, kv_heads, blocks] for a choice of each
        query; None to read everything."""
        ...


@dataclass
class ReadMemory:
    """Of one sequence: what each block got when it was last read, faded since. It lives where the model does.

    importance: [rows] float32, a factor of each row's weights; rows are (sparse layer, KV head). decay: a pass.
    place: among the memories that the runner keeps, which gives it.
    """

    importance: Tensor
    decay: float
    place: int | None = None


@dataclass
class SharedBudget:
    """Blocks that are read anyway, and as many more as there is `room` for, over all layers and heads at once.

    words: uint64 [rows, words], a bit a block, lowest first: read anyway, as are blocks before `first` and from
    `last` on. The others are those that `memory` holds the highest weights for.
    """

    words: np.ndarray
    first: int
    last: int
    room: int
    memory: ReadMemory
    dense_layers: tuple[int, ...]


@dataclass
class SparseRead:
    """What a sequence's queries read: lists that are known before the pass, a selector's choice, or a budget that
    the runner shares out on the device (GraphRunner only).

    group_means: let means stand in for what is not read (PagedKV.means). emit: return what weight was read.
    """

    block_size: int
    lists: LayerLists | None = None
    selector: LayerSelector | None = None
    group_means: bool = False
    emit: bool = False
    budget: SharedBudget | None = None

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.lists, self.selector, self.budget)) != 1:
            raise ValueError("a sparse read has one of lists, a selector and a budget")


@dataclass
class SequenceInput:
    """`tokens` to run at positions kv.length …; their KV is written and kv.length moves on.

    emitting: how many of the last queries also give their weights over blocks of `block_size` tokens (dense only).
    drafted: of `tokens` all but the first, to be judged; then logits must be "all", and a runner that judges gives
    a verdict instead of them.
    """

    kv: SequenceKV
    tokens: list[int]
    logits: Logits = "none"
    read: SparseRead | None = None  # None: dense
    block_size: int = 0
    emitting: int = 0
    drafted: Drafted | None = None


@dataclass
class BatchPart:
    """Neighbouring sequences that attend in the same way; rows first_row … last_row of the queries."""

    first_row: int
    last_row: int
    block_tables: Tensor  # [sequences, max_pages] int32
    kv_lengths: Tensor  # [sequences] int32
    query_starts: Tensor  # [sequences + 1] int32, from 0
    block_size: int = 0
    emitting: int = 0
    block_weights: list[Tensor] = field(
        default_factory=list
    )  # a layer each, [sequences, emitting, heads, blocks]
    lists: list[BlockLists | None] | None = None  # per layer, batched
    selector: LayerSelector | None = None  # of the part's only sequence
    means: list[GroupMeans] | None = None  # per layer
    emit_read: bool = False
    read_weights: list[tuple[BlockLists, Tensor] | None] = field(default_factory=list)  # a layer each


@dataclass
class Batch:
    """Tensors of one pass, on the model's device, and the KV that it reads and writes."""

    token_ids: Tensor  # [1, tokens] int64
    position_ids: Tensor  # [1, tokens] int64
    slots: Tensor  # [tokens] int64
    logits_rows: Tensor  # [rows] int64
    parts: list[BatchPart]
    k_pages: list[Tensor]
    v_pages: list[Tensor]
    order: list[int]  # order[i]: which input stands at place i


def build_batch(inputs: list[SequenceInput], kv: KVCache, device: torch.device, begun: bool = False) -> Batch:
    """Allocate pages for the inputs' tokens and lay them out. Raises OutOfPages before changing a length.

    begun: the pages are there already.
    """
    if any(not item.tokens for item in inputs):
        raise ValueError("every sequence of a batch needs at least one token")
    for item in inputs:
        if item.emitting and (
            item.read is not None or not item.block_size > 0 or item.emitting > len(item.tokens)
        ):
            raise ValueError(
                f"{item.emitting} of {len(item.tokens)} queries to emit over blocks of {item.block_size}: expected a "
                "dense input, no more than its queries, and a block size"
            )
    if any(item.read is not None and item.read.budget is not None for item in inputs):
        raise NotImplementedError("budgets that are shared out on the device run in GraphRunner")
    if not begun:
        kv.begin_pass([(item.kv, len(item.tokens)) for item in inputs])
    if kv.kept_layers or not all(kv.is_resident(item.kv) for item in inputs):
        raise NotImplementedError(
            "KV in tiers, once it has left the GPU or where some layers stay there, is read by GraphRunner; methods "
            "that choose while the target runs are not built for it: choose another, or leave --host-kv-memory out"
        )
    order = sorted(range(len(inputs)), key=lambda i: _kind(inputs[i]))
    tokens: list[int] = []
    positions, slots = [], []
    rows: list[int] = []
    groups: list[list[tuple[SequenceInput, int]]] = []
    kind: tuple[int, ...] | None = None
    for i in order:
        item = inputs[i]
        start, end = item.kv.length, item.kv.length + len(item.tokens)
        at = np.arange(start, end)
        pages = kv.gpu_pages(item.kv)[start // PAGE_SIZE :].astype(np.int64)
        positions.append(at)
        slots.append(pages[at // PAGE_SIZE - start // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)
        first = len(tokens)
        tokens += item.tokens
        if item.logits == "all":
            rows += range(first, len(tokens))
        elif item.logits == "last":
            rows.append(len(tokens) - 1)
        if kind != _kind(item):
            kind = _kind(item)
            groups.append([])
        groups[-1].append((item, first))
    return Batch(
        token_ids=torch.tensor([tokens], device=device),
        position_ids=torch.from_numpy(np.concatenate(positions))[None].to(device),
        slots=torch.from_numpy(np.concatenate(slots)).to(device),
        logits_rows=torch.tensor(rows, dtype=torch.long, device=device),
        parts=[_build_part(group, kv, device) for group in groups],
        k_pages=kv.k_pages,
        v_pages=kv.v_pages,
        order=order,
    )


def _kind(item: SequenceInput) -> tuple[int, ...]:
    """Neighbours of one kind share a part."""
    read = item.read
    if read is None:
        return (1, item.block_size, item.emitting) if item.emitting else (0,)
    if read.selector is not None:
        return (3, id(item))
    dense = tuple(layer for layer, entry in enumerate(read.lists or []) if entry is None)
    return (2, read.block_size, read.group_means, read.emit, *dense)


def _build_part(group: list[tuple[SequenceInput, int]], kv: KVCache, device: torch.device) -> BatchPart:
    items = [item for item, _ in group]
    tables = np.zeros((len(items), max(len(item.kv.pages) for item in items)), dtype=np.int32)
    for row, item in enumerate(items):
        tables[row, : len(item.kv.pages)] = kv.gpu_pages(item.kv)
    counts = np.array([len(item.tokens) for item in items], dtype=np.int32)
    starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    lengths = np.array([item.kv.length for item in items], dtype=np.int32) + counts
    first_row = group[0][1]
    part = BatchPart(
        first_row=first_row,
        last_row=first_row + int(starts[-1]),
        block_tables=torch.from_numpy(tables).to(device),
        kv_lengths=torch.from_numpy(lengths).to(device),
        query_starts=torch.from_numpy(starts).to(device),
        block_size=items[0].block_size,
        emitting=items[0].emitting,
    )
    read = items[0].read
    if read is not None:
        part.emit_read, part.selector = read.emit, read.selector
        if read.lists is not None:
            part.lists = _stack_lists([item.read.lists for item in items], read.block_size, device)  # type: ignore[union-attr,misc]
        if read.group_means:
            part.means = kv.group_means([item.kv for item in items], device)
        part.block_size = read.block_size
    return part


def _stack_lists(
    layer_lists: list[LayerLists], block_size: int, device: torch.device
) -> list[BlockLists | None]:
    """Pad every sequence's lists to one width a layer; the sequences have the same dense layers (`_kind`)."""
    stacked: list[BlockLists | None] = []
    for entries in zip(*layer_lists, strict=True):
        present = [entry for entry in entries if entry is not None]
        if not present:
            stacked.append(None)
            continue
        kv_heads, width = present[0][0].shape[0], max(lists.shape[1] for lists, _ in present)
        padded = torch.zeros(len(present), kv_heads, width, dtype=torch.int32)
        for row, (lists, _) in enumerate(present):
            padded[row, :, : lists.shape[1]] = lists
        counts = torch.stack([counts for _, counts in present])
        stacked.append(BlockLists(padded.to(device), counts.to(device), block_size))
    return stacked
