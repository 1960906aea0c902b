"""The Triton kernel of paged attention: split over keys as FlashDecoding, the work shared out as stream-K.

An item is a (sequence, KV head, tile of queries). The tiles of keys of all items stand in one row. Each program takes
an equal stretch of it and leaves a partial result for each item that it touches; a second kernel merges these.
"""

from specahead.kernels.backends import ask_for, jit, precede, tl
from specahead.kernels.paged_attention.columns import attend_in_columns
from specahead.kernels.paged_attention.items import (
    Items,
    Sources,
    facts_of,
    first_tile,
    item_of,
    places_of,
    programs_of,
    queries_of,
)
from specahead.kernels.paged_attention.rows import attend_in_rows, nothing_yet
from specahead.kernels.paged_attention.tiles import attend_to_means, blocks_by_warp, in_float16, store_partial


@jit
def partial_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lengths_ptr,
    starts_ptr,
    lists_ptr,
    counts_ptr,
    pieces_ptr,
    tile_starts_ptr,
    first_items_ptr,
    groups,
    unread_ptr,
    partial,
    block_sums_ptr,
    visible_ptr,
    kv_scales_ptr,
    scale_log2,
    items,
    table_stride,
    list_width,
    group_stride,
    block_sums_stride,
    row_tiles,
    CUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend one stretch of the row of tiles; leave a partial result for each item in it, at slot
    program + item * (1 + APART). groups: `Groups`, or None. partial: `Partial`.

    With kv_scales, pages have 8-bit numbers. A head's scale of keys joins that of the scores; what is due to values
    comes when results are merged.

    APART: where it is not 0, the row of tiles has no group means: so many programs for each item, after all others,
    attend to these, and leave their partial results in the slots that follow the item's.
    """
    sources = Sources(tables_ptr, lists_ptr, pieces_ptr, table_stride, list_width)
    means, block_sums = (groups, unread_ptr, group_stride), (block_sums_ptr, block_sums_stride)
    all_items = Items(row_tiles, tile_starts_ptr, starts_ptr, lengths_ptr, counts_ptr)
    program = tl.program_id(0)
    programs = tl.num_programs(0) - CUT.APART * items
    total = tl.load(tile_starts_ptr + items)
    number = tl.load(first_items_ptr + (tl.minimum(program, programs - 1) if CUT.APART else program))
    tile = first_tile(program, total, programs, CUT.MIN_TILES)
    last = first_tile(program + 1, total, programs, CUT.MIN_TILES)
    offs_tile = tl.arange(0, CUT.TILE)
    if CUT.SPREAD:
        offs_tile = blocks_by_warp(offs_tile, CUT.BLOCK)
    # Up to the wait nothing is read that launches of this layer make (queries, the newest tokens' KV): this launch may
    # begin before those have ended.
    facts = facts_of(tl.minimum(number, items - 1), all_items, sources, CUT)  # a program may have no tiles
    if PDL:
        if tile < last:
            item = item_of(number, all_items, facts)
            page, within = places_of((tile - item.first) * CUT.TILE + offs_tile, item, sources, CUT)
            at = (page * CUT.PAGE + within) * CUT.DIM
            ask_for(k_ptr, at, CUT.DIM)
            ask_for(v_ptr, at, CUT.DIM)
        precede(PDL)
    while tile < last:
        item = item_of(number, all_items, facts)
        stop = tl.minimum(last, item.stop)
        scale = scale_log2
        if CUT.EIGHT:
            scale *= tl.load(kv_scales_ptr + item.row % CUT.KV_HEADS)
        slot = program + number * (1 + CUT.APART)
        begin, end = tile - item.first, stop - item.first
        if CUT.COLUMNS:
            tiles = begin, tl.minimum(end, tl.cdiv(item.tokens, CUT.TILE))
            attend_in_columns(
                tiles, item, slot, q_ptr, k_ptr, v_ptr, visible_ptr, scale, sources, partial, block_sums, CUT
            )
        else:
            tiles = begin, end
            attend_in_rows(
                tiles, item, slot, q_ptr, k_ptr, v_ptr, visible_ptr, scale, sources, means, partial, block_sums, CUT
            )
        tile = stop
        number += 1
        if tile < last:
            facts = facts_of(number, all_items, sources, CUT)
    if CUT.APART:
        part = program - programs
        if part >= 0:
            attend_to_means_apart(
                part, programs, items, all_items, sources, q_ptr, kv_scales_ptr, scale_log2, means, partial, CUT
            )


@jit
def attend_to_means_apart(
    part, programs, items, all_items, sources, q_ptr, kv_scales_ptr, scale, means, partial, CUT: tl.constexpr
):
    """Attend to every APART-th tile of the group means of an item; leave a partial result in the item's last slots.

    part: of all items, APART for each. programs: that attend to tokens.
    """
    number = part // CUT.APART
    item = item_of(number, all_items, facts_of(number, all_items, sources, CUT))
    _query, real, q = queries_of(item, q_ptr, CUT, CUT.ROWS)
    q = in_float16(q)
    scale *= tl.load(kv_scales_ptr + item.row % CUT.KV_HEADS)
    tiles = part % CUT.APART, tl.cdiv(tl.load(means[0].counts + item.row // CUT.KV_HEADS), CUT.GROUP_TILE)
    # Of the loads of several tiles at once, shared memory would have no room for other programs.
    running = nothing_yet(CUT.ROWS, CUT.DIM)
    running = attend_to_means(q, real, scale, item, tiles, running, means, CUT, CUT.APART, 1)
    _program, last = programs_of(number, items, all_items.tile_starts, programs, CUT.MIN_TILES)
    store_partial(partial, last + number * (1 + CUT.APART) + part % CUT.APART, running, CUT)


@jit
def merge_kernel(
    partial,
    tile_starts_ptr,
    starts_ptr,
    out_ptr,
    log_sums_ptr,
    kv_scales_ptr,
    centers_ptr,
    items,
    programs,
    row_tiles,
    QUERIES,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    MIN_TILES: tl.constexpr,
    EMIT: tl.constexpr,
    APART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge one row of one item from its partial results, SPLITS at a time, and store log2 of its weight sum.

    QUERIES is a plain number, so that this is not compiled for each.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    item = tl.program_id(0)
    row = tl.program_id(1)
    offs_dim = tl.arange(0, DIM)
    offs_split = tl.arange(0, SPLITS)
    sequence = item // (row_tiles * KV_HEADS)
    kv_head = (item // row_tiles) % KV_HEADS
    start, next_start = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    first, last = programs_of(item, items, tile_starts_ptr, programs, MIN_TILES)
    last += APART
    precede(PDL)
    maximum = -float("inf")
    total_weight = 0.0
    acc = tl.zeros([DIM], tl.float32)
    for program in tl.range(first, last, SPLITS):
        split = program + offs_split
        at = (split + item * (1 + APART)) * (QUERIES * GROUP) + row
        there = split < last
        maxima = tl.load(partial.maxima + at, mask=there, other=-float("inf"))
        weights = tl.load(partial.sums + at, mask=there, other=0.0)
        values = tl.load(partial.outputs + at[:, None] * DIM + offs_dim[None, :], mask=there[:, None], other=0.0)
        higher = tl.maximum(maximum, tl.max(maxima, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        ours, theirs = tl.exp2(maximum - base), tl.exp2(maxima - base)
        acc = acc * ours + tl.sum(values * theirs[:, None], 0)
        total_weight = total_weight * ours + tl.sum(weights * theirs, 0)
        maximum = higher
    acc = acc / tl.where(total_weight == 0.0, 1.0, total_weight)
    if kv_scales_ptr is not None:  # of values, whose scales and centers come after those of keys
        of_values = KV_HEADS + kv_head
        center = tl.load(centers_ptr + of_values * DIM + offs_dim)
        acc = acc * tl.load(kv_scales_ptr + of_values) + tl.where(total_weight == 0.0, 0.0, center)
    query = (item % row_tiles) * QUERIES + row // GROUP
    out_at = ((start + query) * HEADS + kv_head * GROUP + row % GROUP).to(tl.int64) * DIM
    if query < next_start - start:
        tl.store(out_ptr + out_at + offs_dim, acc)
    if EMIT:
        log_sum = tl.where(total_weight == 0.0, float("inf"), maximum + tl.log2(total_weight))
        tl.store(log_sums_ptr + item * (QUERIES * GROUP) + row, log_sum)
