"""One forward pass over several sequences of different lengths, flattened to [1, tokens].

The sequences are ordered by how they attend: plainly (dense), dense with block weights, over page lists.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.paged_kv import PAGE_SIZE, PagedKV, SequenceKV

Logits = Literal["none", "last", "all"]
# Per layer: None (dense) or page lists [kv_heads, width] int32 and counts [kv_heads] int32, on the CPU.
PageLists = list[tuple[Tensor, Tensor] | None]


@dataclass
class SequenceInput:
    """`tokens` to run at positions kv.length …; their KV is written and kv.length moves on."""

    kv: SequenceKV
    tokens: list[int]
    logits: Logits = "none"
    page_lists: PageLists | None = None  # None: dense
    block_size: int = 0  # > 0: also emit the block weights of the last token


@dataclass
class BatchPart:
    """Neighbouring sequences that attend in the same way; rows first_row … last_row of the queries."""

    first_row: int
    last_row: int
    block_tables: Tensor  # [sequences, max_pages] int32
    kv_lengths: Tensor  # [sequences] int32
    query_starts: Tensor  # [sequences + 1] int32, from 0
    page_lists: PageLists | None = (
        None  # per layer, batched: [sequences, kv_heads, width] and [sequences, kv_heads]
    )
    block_size: int = 0
    block_weights: list[Tensor] = field(default_factory=list)  # a layer each, [sequences, heads, blocks]


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


def build_batch(inputs: list[SequenceInput], kv: PagedKV, device: torch.device) -> Batch:
    """Allocate pages for the inputs' tokens and lay them out. Raises OutOfPages before changing a length."""
    if any(not item.tokens for item in inputs):
        raise ValueError("every sequence of a batch needs at least one token")
    order = sorted(range(len(inputs)), key=lambda i: _kind(inputs[i]))
    tokens: list[int] = []
    positions, slots = [], []
    rows: list[int] = []
    groups: list[list[tuple[SequenceInput, int]]] = []
    kind: tuple[int, int] | None = None
    for i in order:
        item = inputs[i]
        start, end = item.kv.length, item.kv.length + len(item.tokens)
        kv.grow(item.kv, end)
        at = np.arange(start, end)
        pages = np.array(item.kv.pages[start // PAGE_SIZE :], dtype=np.int64)
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


def _kind(item: SequenceInput) -> tuple[int, int]:
    return (2, 0) if item.page_lists is not None else (1, item.block_size) if item.block_size else (0, 0)


def _build_part(group: list[tuple[SequenceInput, int]], kv: PagedKV, device: torch.device) -> BatchPart:
    items = [item for item, _ in group]
    tables = np.zeros((len(items), max(len(item.kv.pages) for item in items)), dtype=np.int32)
    for row, item in enumerate(items):
        tables[row, : len(item.kv.pages)] = item.kv.pages
    counts = np.array([len(item.tokens) for item in items], dtype=np.int32)
    starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    lengths = np.array([item.kv.length for item in items], dtype=np.int32) + counts
    first_row = group[0][1]
    return BatchPart(
        first_row=first_row,
        last_row=first_row + int(starts[-1]),
        block_tables=torch.from_numpy(tables).to(device),
        kv_lengths=torch.from_numpy(lengths).to(device),
        query_starts=torch.from_numpy(starts).to(device),
        page_lists=_stack_page_lists(items, kv.num_layers, device)
        if items[0].page_lists is not None
        else None,
        block_size=items[0].block_size,
    )


def _stack_page_lists(items: list[SequenceInput], num_layers: int, device: torch.device) -> PageLists:
    """Pad every sequence's lists to one width a layer. A layer is dense for all sequences or for none."""
    stacked: PageLists = []
    for layer in range(num_layers):
        entries = [item.page_lists[layer] for item in items if item.page_lists is not None]
        present = [entry for entry in entries if entry is not None]
        if not present:
            stacked.append(None)
            continue
        if len(present) < len(entries):
            raise ValueError(f"layer {layer} is dense for some sequences of the batch and sparse for others")
        kv_heads, width = present[0][0].shape[0], max(lists.shape[1] for lists, _ in present)
        padded = torch.zeros(len(present), kv_heads, width, dtype=torch.int32)
        for row, (lists, _) in enumerate(present):
            padded[row, :, : lists.shape[1]] = lists
        stacked.append((padded.to(device), torch.stack([counts for _, counts in present]).to(device)))
    return stacked
