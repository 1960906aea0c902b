"""Attention by products whose rows are queries and whose columns are tokens: over pages of any bits."""

from specahead.kernels.backends import jit, tl
from specahead.kernels.paged_attention.items import place_in_list, places_of, position_of, queries_of, seen_by
from specahead.kernels.paged_attention.tiles import (
    attend_to_means,
    blocks_by_warp,
    in_float16,
    load_eight_bit_values,
    load_keys,
    load_values,
    online_softmax,
    store_block_sums,
    store_partial,
)


@jit
def nothing_yet(ROWS: tl.constexpr, DIM: tl.constexpr):
    """Return maxima, total weights and outputs of rows before any tile."""
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    return maximum, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@jit
def attend_in_rows(
    tiles,
    facts,
    slot,
    q_ptr,
    k_ptr,
    v_ptr,
    visible_ptr,
    scale,
    sources,
    means,
    partial,
    block_sums,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    EIGHT: tl.constexpr,
    SPARSE: tl.constexpr,
    MEANS: tl.constexpr,
    EMIT: tl.constexpr,
    BRANCHED: tl.constexpr,
    SPREAD: tl.constexpr,
    MAX_VARIANCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to an item's tiles, first of keys and then of group means; leave a partial result in a slot.

    tiles: the first and the end of the last. facts: item, row_tiles, start, end, length, tokens, ends, as `queries_of`
    takes and `item_at` returns them. means: as for `attend_to_means`. partial: outputs, maxima and sums of the slots.
    block_sums: where sums of weights go, and the stride of a row. EIGHT: pages have 8-bit numbers.
    """
    KEPT: tl.constexpr = QUERIES * (HEADS // KV_HEADS)
    begin, stop = tiles
    item, row_tiles, start, end, length, tokens, ends = facts
    block_sums_ptr, block_sums_stride = block_sums
    item_row = item // row_tiles
    offs_tile = tl.arange(0, TILE)
    if SPREAD:
        offs_tile = blocks_by_warp(offs_tile, BLOCK)
    query, real, q = queries_of(item, row_tiles, start, end, q_ptr, HEADS, KV_HEADS, QUERIES, ROWS, DIM)
    if EIGHT:
        q = in_float16(q)
    limit, own_first, own_last = seen_by(
        query, real, start, length, end - start, tokens, ends, visible_ptr, BLOCK, SPARSE, BRANCHED
    )
    there_to = length
    if SPARSE and not BRANCHED:
        there_to = tl.max(place_in_list(tl.full([1], length, tl.int32), tokens, ends, BLOCK), 0)
    maximum, total_weight, acc = nothing_yet(ROWS, DIM)
    token_tiles = tl.cdiv(tokens, TILE)
    for t in tl.range(begin, tl.minimum(stop, token_tiles), num_stages=STAGES):
        place = t * TILE + offs_tile
        page, within = places_of(place, tokens, item_row, sources, KV_HEADS, PAGE, BLOCK, SPARSE)
        at = (page * PAGE + within) * DIM
        position = position_of(place, tokens, length, item_row, sources, BLOCK, SPARSE, BRANCHED)
        there = position < there_to
        k = load_keys(k_ptr, at, there, DIM, EIGHT)
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
        # `limit` and `own_last` do not lie after `there_to`: what is not there is not seen either.
        seen = position[None, :] < limit[:, None]
        if BRANCHED:
            seen |= (position[None, :] >= own_first[:, None]) & (position[None, :] < own_last[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        p, base, fade, maximum, total_weight = online_softmax(scores, maximum, total_weight)
        if EIGHT:
            v = load_eight_bit_values(
                v_ptr, t, page, within, tokens, item_row, sources, KV_HEADS, DIM, PAGE, BLOCK, SPARSE
            )
            v = tl.trans(v)
        else:
            v = load_values(v_ptr, at, there, DIM)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision=PRECISION)
        if EMIT:
            store_block_sums(block_sums_ptr, block_sums_stride, p, base, t, item, tokens, KEPT, BLOCK, SPREAD)
    running = maximum, total_weight, acc
    if MEANS:
        tiles = tl.maximum(begin, token_tiles) - token_tiles, stop - token_tiles
        running = attend_to_means(
            q, real, scale, item_row, tiles, running, means, KV_HEADS, DIM, GROUP_TILE, MAX_VARIANCE, PRECISION
        )
    store_partial(partial, slot, running, KEPT)
