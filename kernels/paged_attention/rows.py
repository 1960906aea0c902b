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
    tiles, item, slot, q_ptr, k_ptr, v_ptr, visible_ptr, scale, sources, means, partial, block_sums, CUT: tl.constexpr
):
    """Attend to an item's tiles, first of keys and then of group means; leave a partial result in a slot.

    tiles: the first and the end of the last. block_sums: where sums of weights go, and the stride of a row.
    """
    begin, stop = tiles
    offs_tile = tl.arange(0, CUT.TILE)
    if CUT.SPREAD:
        offs_tile = blocks_by_warp(offs_tile, CUT.BLOCK)
    query, real, q = queries_of(item, q_ptr, CUT, CUT.ROWS)
    if CUT.EIGHT:
        q = in_float16(q)
    limit, own_first, own_last = seen_by(query, real, item, visible_ptr, CUT)
    there_to = item.length
    if CUT.SPARSE and not CUT.BRANCHED:
        there_to = tl.max(place_in_list(tl.full([1], item.length, tl.int32), item, CUT), 0)
    maximum, total_weight, acc = nothing_yet(CUT.ROWS, CUT.DIM)
    token_tiles = tl.cdiv(item.tokens, CUT.TILE)
    for t in tl.range(begin, tl.minimum(stop, token_tiles), num_stages=CUT.STAGES):
        place = t * CUT.TILE + offs_tile
        page, within = places_of(place, item, sources, CUT)
        at = (page * CUT.PAGE + within) * CUT.DIM
        position = position_of(place, item, sources, CUT)
        there = position < there_to
        k = load_keys(k_ptr, at, there, CUT)
        scores = tl.dot(q, k.to(q.dtype), input_precision=CUT.PRECISION) * scale
        # `limit` and `own_last` do not lie after `there_to`: what is not there is not seen either.
        seen = position[None, :] < limit[:, None]
        if CUT.BRANCHED:
            seen |= (position[None, :] >= own_first[:, None]) & (position[None, :] < own_last[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        p, base, fade, maximum, total_weight = online_softmax(scores, maximum, total_weight)
        if CUT.EIGHT:
            v = tl.trans(load_eight_bit_values(v_ptr, t, page, within, item, sources, CUT))
        else:
            v = load_values(v_ptr, at, there, CUT)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision=CUT.PRECISION)
        if CUT.EMIT:
            store_block_sums(block_sums, p, base, t, item, CUT)
    running = maximum, total_weight, acc
    if CUT.MEANS:
        tiles = tl.maximum(begin, token_tiles) - token_tiles, stop - token_tiles
        running = attend_to_means(q, real, scale, item, tiles, running, means, CUT)
    store_partial(partial, slot, running, CUT)
