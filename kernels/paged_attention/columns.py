"""Attention over pages in 8 bits by products whose rows are tokens and whose columns are queries.

Keys and values are turned into 16 bits in the registers from which tensor cores take a left operand, and go nowhere
else. Columns come in steps of 8, so that 20 queries take 24; as rows they would take 32. One warp then holds up to 32
columns of 128 dimensions, and waits for no other one.
"""

from specahead.kernels.backends import jit, tl
from specahead.kernels.paged_attention.items import places_of, position_of, queries_of, seen_by
from specahead.kernels.paged_attention.tiles import in_float16, load_eight_bit_values, store_block_sums, store_partial


@jit
def columns_of(
    facts,
    q_ptr,
    visible_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
    BRANCHED: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Return COUNT rows of an item from FIRST on as columns [DIM, COUNT], what they see as `seen_by` says it, and up to
    where all that exist see everything. facts: as for `attend_in_columns`.
    """
    item, row_tiles, start, end, length, tokens, ends = facts
    query, real, q = queries_of(item, row_tiles, start, end, q_ptr, HEADS, KV_HEADS, QUERIES, COUNT, DIM, FIRST)
    sight = seen_by(query, real, start, length, end - start, tokens, ends, visible_ptr, BLOCK, SPARSE, BRANCHED)
    return tl.trans(in_float16(q)), sight, tl.min(tl.where(real, sight[0], length), 0)


@jit
def seen_scores(k, q, position, sight, is_partly_seen, BRANCHED: tl.constexpr, PRECISION: tl.constexpr):
    """Return products of a tile's keys and queries [tokens, columns], -inf for what a column does not see."""
    scores = tl.dot(k, q, input_precision=PRECISION)
    if is_partly_seen:
        limit, own_first, own_last = sight
        seen = position[:, None] < limit[None, :]
        if BRANCHED:
            seen |= (position[:, None] >= own_first[None, :]) & (position[:, None] < own_last[None, :])
        scores = tl.where(seen, scores, -float("inf"))
    return scores


@jit
def softmax_of_columns(products, scale, running):
    """Add one tile to an online softmax, as `online_softmax`; scores are products [tokens, columns] times `scale`.

    running: maxima [columns], total weights [8, columns] of the tokens 0 to 7 modulo 8, and outputs [DIM, columns].
    Returns the tile's weights, their base, and `running` with these weights added and outputs as faded.
    """
    maximum, total_weight, acc = running
    TILE: tl.constexpr = products.shape[0]
    COUNT: tl.constexpr = products.shape[1]
    higher = tl.maximum(maximum, tl.max(products, 0) * scale)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp2(products * scale - base[None, :])
    fade = tl.exp2(maximum - base)
    # A lane sums the weights that it holds. Sums over lanes are left for the end.
    sums = tl.sum(tl.reshape(weights, [TILE // 8, 8, COUNT]), 0)
    return weights, base, (higher, total_weight * fade[None, :] + sums, acc * fade[None, :])


@jit
def store_columns(partial, slot, running, KEPT: tl.constexpr, FIRST: tl.constexpr):
    """Store `running` of an item's columns from FIRST to KEPT - 1 in a slot."""
    maximum, total_weight, acc = running
    store_partial(partial, slot, (maximum, tl.sum(total_weight, 0), tl.trans(acc)), KEPT, FIRST)


@jit
def no_columns_yet(DIM: tl.constexpr, COUNT: tl.constexpr):
    """Return what `softmax_of_columns` adds to, before any tile."""
    maximum = tl.full([COUNT], -float("inf"), tl.float32)
    return maximum, tl.zeros([8, COUNT], tl.float32), tl.zeros([DIM, COUNT], tl.float32)


@jit
def attend_in_columns(
    tiles,
    facts,
    slot,
    q_ptr,
    k_ptr,
    v_ptr,
    visible_ptr,
    scale,
    sources,
    partial,
    block_sums,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SPARSE: tl.constexpr,
    EMIT: tl.constexpr,
    BRANCHED: tl.constexpr,
    PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr,
    MORE: tl.constexpr,
):
    """Attend from the first to the last of an item's tiles of keys; leave a partial result in a slot.

    An item's rows are COLUMNS columns and MORE further ones, both powers of two; MORE may be 0.
    facts: item, row_tiles, start, end, length, tokens, ends, as `queries_of` takes and `item_at` returns them.
    partial: outputs, maxima and sums of the slots. block_sums: where they are stored, and the stride of a row.
    """
    KEPT: tl.constexpr = QUERIES * (HEADS // KV_HEADS)
    item, row_tiles, _start, _end, length, tokens, _ends = facts
    block_sums_ptr, block_sums_stride = block_sums
    item_row = item // row_tiles
    q, sight, seen_by_all = columns_of(
        facts, q_ptr, visible_ptr, HEADS, KV_HEADS, QUERIES, DIM, BLOCK, SPARSE, BRANCHED, 0, COLUMNS
    )
    running = no_columns_yet(DIM, COLUMNS)
    if MORE:
        more_q, more_sight, more_seen = columns_of(
            facts, q_ptr, visible_ptr, HEADS, KV_HEADS, QUERIES, DIM, BLOCK, SPARSE, BRANCHED, COLUMNS, MORE
        )
        more_running = no_columns_yet(DIM, MORE)
        seen_by_all = tl.minimum(seen_by_all, more_seen)
    first, stop = tiles
    for t in tl.range(first, stop, num_stages=STAGES):
        place = t * TILE + tl.arange(0, TILE)
        page, within = places_of(place, tokens, item_row, sources, KV_HEADS, PAGE, BLOCK, SPARSE)
        position = position_of(place, tokens, length, item_row, sources, BLOCK, SPARSE, BRANCHED)
        # Of branches' lists it is not known at which place they reach a position.
        is_partly_seen = t * TILE + TILE > seen_by_all or (SPARSE and BRANCHED)
        at = (page * PAGE + within) * DIM
        k = tl.load(k_ptr + at[:, None] + tl.arange(0, DIM)[None, :]).to(q.dtype)
        products = seen_scores(k, q, position, sight, is_partly_seen, BRANCHED, PRECISION)
        if MORE:
            more_products = seen_scores(k, more_q, position, more_sight, is_partly_seen, BRANCHED, PRECISION)
        weights, base, running = softmax_of_columns(products, scale, running)
        if MORE:
            more_weights, more_base, more_running = softmax_of_columns(more_products, scale, more_running)
        v = load_eight_bit_values(
            v_ptr, t, page, within, tokens, item_row, sources, KV_HEADS, DIM, PAGE, BLOCK, SPARSE
        ).to(q.dtype)
        running = with_values(v, weights, running, PRECISION)
        if MORE:
            more_running = with_values(v, more_weights, more_running, PRECISION)
        if EMIT:
            store_block_sums(
                block_sums_ptr, block_sums_stride, tl.trans(weights), base, t, item, tokens, KEPT, BLOCK, False
            )
            if MORE:
                store_block_sums(
                    block_sums_ptr,
                    block_sums_stride,
                    tl.trans(more_weights),
                    more_base,
                    t,
                    item,
                    tokens,
                    KEPT,
                    BLOCK,
                    False,
                    COLUMNS,
                )
    store_columns(partial, slot, running, KEPT, 0)
    if MORE:
        store_columns(partial, slot, more_running, KEPT, COLUMNS)


@jit
def with_values(v, weights, running, PRECISION: tl.constexpr):
    """Return `running` with values [DIM, tokens] added by their weights [tokens, columns]."""
    maximum, total_weight, acc = running
    return maximum, total_weight, tl.dot(v, weights.to(v.dtype), acc, input_precision=PRECISION)
