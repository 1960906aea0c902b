"""The buffers of a pass: named tensors of fixed sizes, moved to the device by one copy and back by one."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.judging import verdict_layout
from engine.kv.cache import KVCache
from engine.layer_attention import BlockWeights
from engine.passes.layout import lay_out_rows
from engine.passes.shape import PassShape
from engine.staging import Layout, Staging
from kernels.shared_budget import WORD


@dataclass
class BudgetBuffers:
    """What decides over the blocks of a shared budget; rows are (sparse layer, KV head).

    memory: [places, rows, blocks] float32, of many sequences. indices: [sequences] int32, where each sequence's is; -1:
    no sequence. bitmaps: [sequences, rows, words] int64. importance: [rows] float32. first, last, blocks, room:
    [sequences] int32.
    """

    memory: Tensor
    indices: Tensor
    bitmaps: Tensor
    importance: Tensor
    first: Tensor
    last: Tensor
    blocks: Tensor
    room: Tensor


@dataclass
class PassBuffers:
    """The inputs of one shape on the device, all parts of `inputs`, and what a pass leaves.

    results: what leaves by one copy: accepted, following [sequences] int32 of judged passes; blocks_read [sequences]
    int32 of shared budgets; of fetching passes listed, fetched, overflow [1] and missed [sequences] int32. token_ids,
    positions, slots: [rows] int64, slots -1 where no token is. query_starts: [sequences + 1] int32. lengths:
    [sequences] int32. block_tables: [sequences, pages] int32. logits_rows: int64, the rows that give logits; in judged
    passes sequences * queries of them; None: all. lists: [sparse layers, sequences, kv_heads, width] int32. counts:
    [sparse layers, sequences, kv_heads] int32. group_tables: [sequences, groups] int32. group_counts: [sequences]
    int32. kept_slots, kept_tables: as slots and block_tables, of the layers that are kept on the GPU. round: [1] int32,
    of the residency tables. logits: [logits rows, vocab]. block_weights: of dense layers that emit. read_weights:
    [sparse layers, sequences, kv_heads, width] float32.
    """

    inputs: Staging
    results: Staging
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    lengths: Tensor
    block_tables: Tensor
    logits_rows: Tensor | None = None
    lists: Tensor | None = None
    counts: Tensor | None = None
    group_tables: Tensor | None = None
    group_counts: Tensor | None = None
    budget: BudgetBuffers | None = None
    verdicts: dict[str, Tensor] = field(default_factory=dict)
    kept_slots: Tensor | None = None
    kept_tables: Tensor | None = None
    round: Tensor | None = None
    logits: Tensor | None = None
    block_weights: BlockWeights | None = None
    read_weights: Tensor | None = None


def rows_layout(sequences: int, rows: int, pages: int, kept: bool = False) -> Layout:
    """Lay out where the tokens of a pass come from and go to; the same for passes and rounds."""
    kept_layout: Layout = {"kept_slots": ((rows,), torch.int64), "kept_tables": ((sequences, pages), torch.int32)}
    return {
        **(kept_layout if kept else {}),
        "token_ids": ((rows,), torch.int64),
        "positions": ((rows,), torch.int64),
        "slots": ((rows,), torch.int64),
        "query_starts": ((sequences + 1,), torch.int32),
        "lengths": ((sequences,), torch.int32),
        "block_tables": ((sequences, pages), torch.int32),
    }


def make_buffers(
    shape: PassShape, kv: KVCache, device: torch.device, memory: Tensor | None = None, logits_rows: int | None = None
) -> PassBuffers:
    """Make the buffers of a shape, filled as for a pass without sequences.

    memory: [places, rows, blocks] float32, for a shape that shares budgets out. logits_rows: how many rows give logits,
    where the pass is not judged; None: all.
    """
    layouts = {
        "rows": rows_layout(shape.sequences, shape.rows, shape.pages, shape.kept),
        "lists": _lists_layout(shape, kv),
        "groups": _groups_layout(shape),
        "budget": _budget_layout(shape, kv),
        "round": {"round": ((1,), torch.int32)} if shape.fetches else {},
        "logits": _logits_layout(shape, logits_rows),
        "verdicts": verdict_layout(shape.sequences, shape.queries - 1, shape.support) if shape.judged else {},
    }
    inputs = Staging({name: size for layout in layouts.values() for name, size in layout.items()}, device)

    def parts(*names: str) -> dict[str, Any]:
        return {key: inputs.device[key] for name in names for key in layouts[name]}

    buffers = PassBuffers(
        inputs,
        Staging(_results_layout(shape), device),
        **parts("rows", "logits", "lists", "groups", "round"),
        verdicts=parts("verdicts"),
    )
    if shape.decay is not None:
        assert memory is not None
        buffers.budget = BudgetBuffers(memory, **parts("budget"))
        inputs.host["indices"][:] = -1
    lay_out_rows(inputs.host, [])
    inputs.send()
    return buffers


def _lists_layout(shape: PassShape, kv: KVCache) -> Layout:
    if not shape.width or shape.decay is not None:
        return {}
    heads = kv.num_layers - len(shape.dense_layers), shape.sequences, kv.kv_heads
    return {"lists": ((*heads, shape.width), torch.int32), "counts": (heads, torch.int32)}


def _groups_layout(shape: PassShape) -> Layout:
    if not shape.groups:
        return {}
    return {
        "group_tables": ((shape.sequences, shape.groups), torch.int32),
        "group_counts": ((shape.sequences,), torch.int32),
    }


def _budget_layout(shape: PassShape, kv: KVCache) -> Layout:
    if shape.decay is None:
        return {}
    rows = (kv.num_layers - len(shape.dense_layers)) * kv.kv_heads
    numbers = dict.fromkeys(("indices", "first", "last", "blocks", "room"), ((shape.sequences,), torch.int32))
    return {
        **numbers,
        "bitmaps": ((shape.sequences, rows, -(-shape.blocks // WORD)), torch.int64),
        "importance": ((rows,), torch.float32),
    }


def _logits_layout(shape: PassShape, logits_rows: int | None) -> Layout:
    rows = shape.sequences * shape.queries if shape.judged else logits_rows
    return {} if rows is None else {"logits_rows": ((rows,), torch.int64)}


def _results_layout(shape: PassShape) -> Layout:
    of_sequence = (shape.sequences,), torch.int32
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if shape.decay is not None:
        layout["blocks_read"] = of_sequence
    if shape.judged:
        layout |= {"accepted": of_sequence, "following": of_sequence}
    if shape.fetches:
        layout |= dict.fromkeys(("listed", "fetched", "overflow"), ((1,), torch.int32))
        layout["missed"] = of_sequence
    return layout
