"""Launching the Triton attention kernel: partial results of all programs, then their merging."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.kernels.backends import overlapping_launch, power_of_two
from specahead.kernels.paged_attention.inputs import MOST_BEYOND, VARIANCE_LIMIT, Batch, BlockLists, GroupMeans
from specahead.kernels.paged_attention.items import Cut
from specahead.kernels.paged_attention.kernel import merge_kernel, partial_attention_kernel
from specahead.kernels.paged_attention.tiles import Groups, Partial
from specahead.kernels.paged_attention.work import (
    GROUP_TILE,
    GROUP_TILE_APART,
    LEAST_ROWS,
    Tuning,
    Work,
    plan_work,
    row_tiles_of,
)

LOG2_E = 1.4426950408889634
MAX_EMITTED = 128  # tokens of a block whose weights are emitted


@dataclass(frozen=True)
class BlockSums:
    """log2 of each row's softmax weight on each block, and of its sum; rows as `partial_attention_kernel` numbers them.

    blocks: [items * queries of a tile * group, width] float32, of width 0 where no weights are emitted
    total: [items * queries of a tile * group] float32, filled where weights are emitted
    block_size: tokens of a block, 0: no weights are emitted
    layout: keyword arguments of kernels that read these
    """

    blocks: Tensor
    total: Tensor
    block_size: int
    layout: dict[str, int]


# From rows and width to room for `blocks` and `total` of BlockSums.
MakeRoom = Callable[[int, int], tuple[Tensor, Tensor]]


def attend_in_triton(
    batch: Batch,
    blocks: BlockLists | None,
    means: GroupMeans | None,
    work: Work | None,
    emit_block_size: int = 0,
    make_room: MakeRoom | None = None,
) -> tuple[Tensor, BlockSums]:
    """Return the output [tokens, heads, dim], and the sums of the weights on blocks, of all or of those listed.

    emit_block_size: tokens of a block whose weights are summed; 0: none. make_room: makes room for the sums; None: new
    tensors. The other arguments are those of `paged_attention`.
    Queries and pages are contiguous. Raises NotImplementedError for a head dimension that is no power of two from 16
    and for an emit_block_size that is no power of two up to MAX_EMITTED.
    """
    _check(batch, emit_block_size)
    tables, device = batch.block_tables, batch.queries.device
    model = batch.kv_heads, batch.group, batch.dim, batch.max_queries
    shared_out = *model, tables, batch.kv_lengths, batch.page_size, blocks, means
    work = work or plan_work(*shared_out, eight_bit=batch.scales is not None)
    if emit_block_size > work.tuning.tile:  # blocks of more tokens than most have: a tile holds whole ones
        work = plan_work(*shared_out, work.tuning.for_tiles_of(emit_block_size))
    tile_queries, row_tiles = row_tiles_of(batch.max_queries, batch.group)
    layout = {"HEADS": batch.heads, "KV_HEADS": batch.kv_heads, "row_tiles": row_tiles, "QUERIES": tile_queries}
    items, rows = len(batch.kv_lengths) * batch.kv_heads * row_tiles, tile_queries * batch.group
    width = 0
    if emit_block_size:
        whole = tables.shape[1] * batch.page_size // emit_block_size + 1
        width = max(1, whole if blocks is None else blocks.lists.shape[2])
    make_room = make_room or (lambda rows, width: _make_room(rows, width, device))
    sums = BlockSums(*make_room(items * rows, width), emit_block_size, layout)
    partial = _attend_in_parts(batch, blocks, means, work, items, rows, sums)
    return _merge(batch, work, items, rows, partial, sums, work.tuning.programs_apart(means)), sums


def _make_room(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    block_sums = torch.empty(rows, width, dtype=torch.float32, device=device)
    return block_sums, torch.empty(rows, dtype=torch.float32, device=device)


def takes_heads(dim: int) -> bool:
    """Return whether the Triton kernel takes heads of `dim` dimensions: powers of two from 16."""
    return dim >= 16 and not dim & (dim - 1)


def _check(batch: Batch, emit_block_size: int) -> None:
    if not takes_heads(batch.dim):
        raise NotImplementedError(
            f"paged_attention: heads of {batch.dim} dimensions; Triton takes powers of two from 16"
        )
    assert batch.max_queries > 0 and batch.queries.is_contiguous() and batch.k_pages.is_contiguous()
    assert batch.visible is None or batch.visible.is_contiguous()
    if emit_block_size & (emit_block_size - 1) or emit_block_size > MAX_EMITTED:
        raise NotImplementedError(
            f"paged_attention: weights of blocks of {emit_block_size} tokens; Triton emits for powers of two up to "
            f"{MAX_EMITTED}"
        )


def _attend_in_parts(
    batch: Batch,
    blocks: BlockLists | None,
    means: GroupMeans | None,
    work: Work,
    items: int,
    rows: int,
    sums: BlockSums,
) -> Partial:
    """Return the partial results; fill `sums.blocks`. items: all of the batch; rows: of an item."""
    tuning, device = work.tuning, batch.queries.device
    programs = len(work.first_items)
    apart = tuning.programs_apart(means)
    slots = (programs + items * (1 + apart)) * rows
    outputs = torch.empty(slots, batch.dim, dtype=torch.float32, device=device)
    partial = Partial(outputs, *torch.empty(2, slots, dtype=torch.float32, device=device))
    partial_attention_kernel[(programs + items * apart,)](
        q_ptr=batch.queries,
        k_ptr=batch.k_pages,
        v_ptr=batch.v_pages,
        tables_ptr=batch.block_tables,
        lengths_ptr=batch.kv_lengths,
        starts_ptr=batch.query_starts,
        lists_ptr=None if blocks is None else blocks.lists,
        counts_ptr=None if blocks is None else blocks.counts,
        pieces_ptr=work.pieces,
        tile_starts_ptr=work.tile_starts,
        first_items_ptr=work.first_items,
        groups=None if means is None else Groups(means.k, means.v, means.k_variance, means.tables, means.counts),
        unread_ptr=work.unread,
        partial=partial,
        block_sums_ptr=sums.blocks,
        visible_ptr=batch.visible,
        kv_scales_ptr=None if batch.scales is None else batch.scales.scales,
        scale_log2=batch.scale * LOG2_E,
        items=items,
        table_stride=batch.block_tables.shape[1],
        list_width=0 if blocks is None else blocks.lists.shape[2],
        group_stride=0 if means is None else max(1, means.tables.shape[1]),
        block_sums_stride=sums.blocks.shape[1],
        row_tiles=sums.layout["row_tiles"],
        CUT=_cut(batch, blocks, means, tuning, sums.layout["QUERIES"], sums.block_size),
        num_warps=tuning.warps,
        **overlapping_launch(device),
    )
    return partial


def _cut(
    batch: Batch,
    blocks: BlockLists | None,
    means: GroupMeans | None,
    tuning: Tuning,
    queries: int,
    emit_block_size: int,
) -> Cut:
    """Return what `partial_attention_kernel` is compiled for. queries: of a tile."""
    rows, block = queries * batch.group, emit_block_size or (1 if blocks is None else blocks.block_size)
    eight, emits = batch.scales is not None, emit_block_size > 0
    columns, more = columns_for(rows) if tuning.columns else (0, 0)
    return Cut(
        HEADS=batch.heads,
        KV_HEADS=batch.kv_heads,
        QUERIES=queries,
        KEPT=rows,
        ROWS=max(LEAST_ROWS, power_of_two(rows)),
        DIM=batch.dim,
        PAGE=batch.page_size,
        BLOCK=block,
        NEWEST=1 if blocks is None else power_of_two(-(-(batch.max_queries + MOST_BEYOND) // block) + 1),
        TILE=tuning.tile,
        GROUP_TILE=GROUP_TILE_APART if tuning.columns else GROUP_TILE,
        MIN_TILES=tuning.least_tiles,
        STAGES=tuning.stages,
        EIGHT=eight,
        SPARSE=blocks is not None,
        MEANS=means is not None,
        EMIT=emits,
        SPREAD=emits and 8 <= block <= tuning.tile // 4 and not eight,
        BRANCHED=batch.visible is not None,
        MAX_VARIANCE=VARIANCE_LIMIT if means is None else means.variance_limit,
        PRECISION="ieee" if batch.queries.dtype == torch.float32 else "tf32",
        COLUMNS=columns,
        MORE=more,
        APART=tuning.programs_apart(means),
    )


def columns_for(rows: int) -> tuple[int, int]:
    """Return the two powers of two from 8 on, or one of them and 0, that have the least sum in which rows fit."""
    whole = max(8, power_of_two(rows))
    half = whole // 2
    more = max(8, power_of_two(rows - half))
    return (half, more) if half + more < whole else (whole, 0)


def _merge(batch: Batch, work: Work, items: int, rows: int, partial: Partial, sums: BlockSums, apart: int) -> Tensor:
    """Return the output; fill `sums.total`, if weights are emitted. apart: programs of an item for means alone."""
    out = torch.empty_like(batch.queries)
    tuning, programs = work.tuning, len(work.first_items)
    splits = 16 if tuning.segment else min(64, max(8, power_of_two(programs // items + 2 + apart)))
    merge_kernel[(items, rows)](
        partial=partial,
        tile_starts_ptr=work.tile_starts,
        starts_ptr=batch.query_starts,
        out_ptr=out,
        log_sums_ptr=sums.total,
        kv_scales_ptr=None if batch.scales is None else batch.scales.scales,
        centers_ptr=None if batch.scales is None else batch.scales.centers,
        items=items,
        programs=programs,
        **sums.layout,
        SPLITS=splits,
        DIM=batch.dim,
        MIN_TILES=tuning.least_tiles,
        EMIT=sums.block_size > 0,
        APART=apart,
        num_warps=max(1, splits * batch.dim // 4096),  # a lane then holds 128 numbers at most
        **overlapping_launch(batch.queries.device),
    )
    return out
