"""The buffers of a pass: named tensors of fixed sizes, moved to the device by one copy and back by one."""

import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.sampling.judging import verdict_layout
from specahead.engine.steps.passes.behind_rounds import LeftRounds
from specahead.engine.steps.passes.behind_steps import AHEAD, UNIFORMS, LeftStep
from specahead.engine.steps.passes.layout import lay_out_rows
from specahead.engine.steps.passes.shape import PassShape
from specahead.engine.steps.staging import Buffers, Layout, Staging
from specahead.kernels.selection import WORD


def make_buffers(
    shape: PassShape,
    kv: KVCache,
    memory: Tensor | None = None,
    logits_rows: int | None = None,
    rounds: LeftRounds | None = None,
    left: LeftStep | None = None,
) -> Buffers:
    """Return the buffers of a shape, filled as for a pass without sequences.

    memory: [indices, rows, blocks] float32, for a shape that shares budgets out: what is remembered of many sequences.
    logits_rows: how many rows give logits, where the pass is not judged; None: all. rounds: what a draft's rounds
    have left, for a shape that may run behind them. left: what the last step with a turn has left, for one with a turn.

    The pass adds to the tensors: logits [logits rows, vocab]; where it makes them, lists and counts as
    `_lists_layout` has them; read_weights [sparse layers, sequences, kv_heads, width] float32.
    """
    layout = rows_layout(shape.sequences, shape.rows, shape.pages, shape.kept) | _logits_layout(shape, logits_rows)
    layout |= _lists_layout(shape, kv) if shape.decay is None else _budget_layout(shape, kv)
    if shape.groups:
        layout["group_tables"] = (shape.sequences, shape.groups), torch.int32
        layout["group_counts"] = (shape.sequences,), torch.int32
    if shape.turn:
        layout["follows"] = (shape.sequences,), torch.int32  # places in the last step; -1: the host gives all
    if shape.behind:
        layout["behind"] = (shape.sequences,), torch.int32  # places in a draft's rounds; -1: the host gives the tokens
        layout["held"] = (shape.sequences,), torch.int32  # drafted tokens that come before those of the rounds
    if shape.alternatives:
        layout["visible"] = (shape.rows, 3), torch.int32
        layout["alternatives"] = (shape.sequences, shape.alternatives), torch.int32  # -1: there is none
        layout["alternative_counts"] = (shape.sequences,), torch.int32
    if shape.fetches:
        layout["round"] = (1,), torch.int32  # of the residency tables
    drawn_from = {
        name: layout.pop(name) for name in ("support_ids", "support_probs") if shape.drafts and name in layout
    }
    buffers = Buffers(Staging(layout, kv.device), Staging(_results_layout(shape), kv.device))
    for name, (sizes, dtype) in drawn_from.items():  # they never leave the device
        buffers.tensors[name] = torch.zeros(sizes, dtype=dtype, device=kv.device)
    if memory is not None:
        buffers.tensors["memory"] = memory
        buffers.inputs.host["indices"][:] = -1
    if left is not None:
        buffers.tensors |= {f"left_{name}": tensor for name, tensor in vars(left).items()}
        buffers.inputs.host["follows"][:] = -1
    if rounds is not None:
        buffers.tensors |= {f"left_{name}": tensor for name, tensor in vars(rounds).items()}
        buffers.inputs.host["behind"][:] = -1
    lay_out_rows(buffers.inputs.host, [])
    buffers.inputs.send()
    return buffers


def rows_layout(sequences: int, rows: int, pages: int, kept: bool = False) -> Layout:
    """Lay out where the tokens of a pass come from and go to; the same for passes and rounds.

    slots: page * PAGE_SIZE + offset of each token, -1 where no token is. query_starts: the first row of each sequence.
    lengths: tokens with KV, those of the pass included. kept_slots, kept_tables: as slots and block_tables, of the
    layers that are kept on the GPU.
    """
    of_rows, tables = ((rows,), torch.int64), ((sequences, pages), torch.int32)
    layout: Layout = dict.fromkeys(("token_ids", "positions", "slots"), of_rows)
    layout |= {
        "query_starts": ((sequences + 1,), torch.int32),
        "lengths": ((sequences,), torch.int32),
        "block_tables": tables,
    }
    return layout | {"kept_slots": of_rows, "kept_tables": tables} if kept else layout


def _lists_layout(shape: PassShape, kv: KVCache) -> Layout:
    """Lay out block lists that come from the host."""
    if not shape.width:
        return {}
    heads = kv.num_layers - len(shape.dense_layers), shape.sequences, kv.kv_heads
    return {"lists": ((*heads, shape.width), torch.int32), "counts": (heads, torch.int32)}


def _budget_layout(shape: PassShape, kv: KVCache) -> Layout:
    """Lay out what decides over the blocks of a shared budget (SharedBudget); rows are (sparse layer, KV head).

    indices: where each sequence's memory is; -1: no sequence. blocks: how many each sequence has.
    """
    rows = (kv.num_layers - len(shape.dense_layers)) * kv.kv_heads
    numbers: Layout = dict.fromkeys(("indices", "first", "last", "blocks", "room"), ((shape.sequences,), torch.int32))
    return numbers | {
        "bitmaps": ((shape.sequences, rows, -(-shape.blocks // WORD)), torch.int64),
        "importance": ((rows,), torch.float32),
    }


def _logits_layout(shape: PassShape, logits_rows: int | None) -> Layout:
    """Lay out which rows give logits and how they are judged."""
    layout: Layout = {}
    if shape.judged:
        layout |= verdict_layout(shape.sequences, shape.queries - 1, shape.support, shape.cuts)
        if shape.drafts and shape.support:
            layout["draft_uniforms"] = (shape.sequences, shape.drafts), torch.float64
        for name in UNIFORMS:
            if shape.turn and shape.drafts and name in layout:
                (rows, columns), dtype = layout.pop(name)
                layout[name + AHEAD] = (rows, columns + shape.drafts), dtype
        logits_rows = shape.sequences * (shape.queries + shape.alternatives)
    if logits_rows is not None:
        layout["logits_rows"] = (logits_rows,), torch.int64
    return layout


def _results_layout(shape: PassShape) -> Layout:
    of_sequence = (shape.sequences,), torch.int32
    layout: Layout = {}
    if shape.decay is not None:
        layout["blocks_read"] = of_sequence
    if shape.judged:
        layout |= dict.fromkeys(("accepted", "following", "finite"), of_sequence)
    if shape.alternatives:
        layout["alternative"] = of_sequence
    if shape.drafts:
        layout["drafted"] = (shape.sequences, shape.drafts), torch.int32
    if shape.fetches:  # as specahead.engine.kv.fetch.FetchPlan has them, summed
        layout |= dict.fromkeys(("listed", "fetched", "overflow"), ((1,), torch.int32))
        layout["missed"] = of_sequence
    return layout
