"""Attention over pages in 8 bits by products whose rows are tokens and whose columns are queries.

Keys and values are turned into 16 bits in the registers from which tensor cores take a left operand, and go nowhere
else. Columns come in steps of 8, so that 20 queries take 24; as rows they would take 32. One warp then holds up to 32
columns of 128 dimensions, and waits for no other one.
"""

from specahead.kernels.backends import jit, tl
from specahead.kernels.paged_attention.items import places_of, position_of, queries_of, seen_by
from specahead.kernels.paged_attention.tiles import in_float16, load_eight_bit_values, store_block_sums, store_partial


@jit
def columns_of(item, q_ptr, visible_ptr, CUT: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Return COUNT rows of an item from FIRST on as columns [DIM, COUNT], what they see as `seen_by` says it, and up to
    where all that exist see everything.
    """
    query, real, q = queries_of(item, q_ptr, CUT, COUNT, FIRST)
    sight = seen_by(query, real, item, visible_ptr, CUT)
    return tl.trans(in_float16(q)), sight, tl.min(tl.where(real, sight[0], item.length), 0)


@jit
def seen_scores(k, q, position, sight, is_partly_seen, CUT: tl.constexpr):
    """Return products of a tile's keys and queries [tokens, columns], -inf for what a column does not see."""
    scores = tl.dot(k, q, input_precision=CUT.PRECISION)
    if is_partly_seen:
        limit, own_first, own_last = sight
        seen = position[:, None] < limit[None, :]
        if CUT.BRANCHED:
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
def store_columns(partial, slot, running, CUT: tl.constexpr, FIRST: tl.constexpr):
    """Store `running` of an item's columns from FIRST to KEPT - 1 in a slot."""
    maximum, total_weight, acc = running
    store_partial(partial, slot, (maximum, tl.sum(total_weight, 0), tl.trans(acc)), CUT, FIRST)


@jit
def no_columns_yet(DIM: tl.constexpr, COUNT: tl.constexpr):
    """Return what `softmax_of_columns` adds to, before any tile."""
    maximum = tl.full([COUNT], -float("inf"), tl.float32)
    return maximum, tl.zeros([8, COUNT], tl.float32), tl.zeros([DIM, COUNT], tl.float32)


@jit
def attend_in_columns(
    tiles, item, slot, q_ptr, k_ptr, v_ptr, visible_ptr, scale, sources, partial, block_sums, CUT: tl.constexpr
):
    """Attend from the first to the last of an item's tiles of keys; leave a partial result in a slot.

    An item's rows are COLUMNS columns and MORE further ones, both powers of two; MORE may be 0.
    block_sums: where sums of weights go, and the stride of a row.
    """
    q, sight, seen_by_all = columns_of(item, q_ptr, visible_ptr, CUT, 0, CUT.COLUMNS)
    running = no_columns_yet(CUT.DIM, CUT.COLUMNS)
    if CUT.MORE:
        more_q, more_sight, more_seen = columns_of(item, q_ptr, visible_ptr, CUT, CUT.COLUMNS, CUT.MORE)
        more_running = no_columns_yet(CUT.DIM, CUT.MORE)
        seen_by_all = tl.minimum(seen_by_all, more_seen)
    first, stop = tiles
    for t in tl.range(first, stop, num_stages=CUT.STAGES):
        place = t * CUT.TILE + tl.arange(0, CUT.TILE)
        page, within = places_of(place, item, sources, CUT)
        position = position_of(place, item, sources, CUT)
        # Of branches' lists it is not known at which place they reach a position.
        is_partly_seen = t * CUT.TILE + CUT.TILE > seen_by_all or (CUT.SPARSE and CUT.BRANCHED)
        at = (page * CUT.PAGE + within) * CUT.DIM
        k = tl.load(k_ptr + at[:, None] + tl.arange(0, CUT.DIM)[None, :]).to(q.dtype)
        products = seen_scores(k, q, position, sight, is_partly_seen, CUT)
        if CUT.MORE:
            more_products = seen_scores(k, more_q, position, more_sight, is_partly_seen, CUT)
        weights, base, running = softmax_of_columns(products, scale, running)
        if CUT.MORE:
            more_weights, more_base, more_running = softmax_of_columns(more_products, scale, more_running)
        v = load_eight_bit_values(v_ptr, t, page, within, item, sources, CUT).to(q.dtype)
        running = with_values(v, weights, running, CUT)
        if CUT.MORE:
            more_running = with_values(v, more_weights, more_running, CUT)
        if CUT.EMIT:
            store_block_sums(block_sums, tl.trans(weights), base, t, item, CUT)
            if CUT.MORE:
                store_block_sums(block_sums, tl.trans(more_weights), more_base, t, item, CUT, CUT.COLUMNS)
    store_columns(partial, slot, running, CUT, 0)
    if CUT.MORE:
        store_columns(partial, slot, more_running, CUT, CUT.COLUMNS)


@jit
def with_values(v, weights, running, CUT: tl.constexpr):
    """Return `running` with values [DIM, tokens] added by their weights [tokens, columns]."""
    maximum, total_weight, acc = running
    return maximum, total_weight, tl.dot(v, weights.to(v.dtype), acc, input_precision=CUT.PRECISION)
