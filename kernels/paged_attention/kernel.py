"""The Triton kernel of paged attention: split over keys as FlashDecoding, the work shared out as stream-K.

An item is a (sequence, KV head, tile of queries). The tiles of keys of all items stand in one row. Each program takes
an equal stretch of it and leaves a partial result for each item that it touches; a second kernel merges these.
"""

from specahead.kernels.backends import ask_for, jit, precede, tl
from specahead.kernels.paged_attention.items import (
    first_tile,
    item_at,
    place_in_list,
    places_of,
    program_of,
    queries_of,
    rows_in_terms,
)
from specahead.kernels.paged_attention.tiles import (
    attend_to_means,
    blocks_by_warp,
    load_eight_bit_values,
    load_keys,
    load_values,
    online_softmax,
    store_block_sums,
)
from specahead.kernels.two_terms import in_two_terms, of_two_terms


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
    mean_k_ptr,
    mean_v_ptr,
    mean_variance_ptr,
    group_tables_ptr,
    group_counts_ptr,
    unread_ptr,
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    NEWEST: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    SPARSE: tl.constexpr,
    MEANS: tl.constexpr,
    EMIT: tl.constexpr,
    BRANCHED: tl.constexpr,
    PDL: tl.constexpr,
    MAX_VARIANCE: tl.constexpr,
    PRECISION: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Attend one stretch of the row of tiles; leave a partial result at slot (program + item) for each item in it.

    With kv_scales, pages have 8-bit numbers, values with the tokens of a dimension side by side, as tensor cores take
    them. A head's scale of keys joins that of the scores; what is due to values comes when results are merged.

    TERMS: 16-bit queries and weights are multiplied with 8-bit numbers in two terms (kernels.two_terms), each tile's
    products apart: tensor cores sum products of 8 bits with 14 bits, too few for all tokens. Weights are up to 2^8, so
    that 8 bits hold them down to 2^-22 of the largest. Without TERMS, 8-bit numbers are turned into 16 bits.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    EIGHT: tl.constexpr = kv_scales_ptr is not None
    HEADROOM: tl.constexpr = 8 if TERMS else 0
    SPREAD: tl.constexpr = EMIT and BLOCK >= 8 and BLOCK <= TILE // 4 and not EIGHT
    sources = (tables_ptr, lists_ptr, pieces_ptr, table_stride, list_width)
    means = (mean_k_ptr, mean_v_ptr, mean_variance_ptr, group_tables_ptr, group_counts_ptr, unread_ptr, group_stride)
    of_items = (row_tiles, tile_starts_ptr, starts_ptr, lengths_ptr, lists_ptr, counts_ptr, list_width)
    program = tl.program_id(0)
    total = tl.load(tile_starts_ptr + items)
    item = tl.load(first_items_ptr + program)
    tile = first_tile(program, total, tl.num_programs(0), MIN_TILES)
    last = first_tile(program + 1, total, tl.num_programs(0), MIN_TILES)
    offs_row = tl.arange(0, ROWS)
    offs_dim = tl.arange(0, DIM)
    offs_tile = tl.arange(0, TILE)
    if SPREAD:
        offs_tile = blocks_by_warp(offs_tile, BLOCK)
    # Up to the wait nothing is read that launches of this layer make (queries, the newest tokens' KV): this launch may
    # begin before those have ended.
    known = tl.minimum(item, items - 1)  # a program may have no tiles
    first, stop, start, end, length, tokens, ends = item_at(known, *of_items, KV_HEADS, BLOCK, NEWEST, SPARSE)
    if PDL:
        if tile < last:
            place = (tile - first) * TILE + offs_tile
            page, within = places_of(place, tokens, item // row_tiles, sources, KV_HEADS, PAGE, BLOCK, SPARSE)
            at = (page * PAGE + within) * DIM
            ask_for(k_ptr, at, DIM)
            ask_for(v_ptr, at, DIM)
        precede(PDL)
    if TERMS:
        rows = queries_of(known, row_tiles, start, end, q_ptr, HEADS, KV_HEADS, QUERIES, ROWS, DIM)
        terms, unit, seen_to = rows_in_terms(*rows, length, end - start, tokens, ends, BLOCK, k_ptr.dtype.element_ty)
    while tile < last:
        stop = tl.minimum(last, stop)
        item_row = item // row_tiles
        kv_head = item_row % KV_HEADS
        queries = end - start
        query, real, q = queries_of(item, row_tiles, start, end, q_ptr, HEADS, KV_HEADS, QUERIES, ROWS, DIM)
        scale = scale_log2
        if EIGHT:
            scale *= tl.load(kv_scales_ptr + kv_head)
            if q.dtype == tl.bfloat16:
                q = q.to(tl.float16)  # holds more of what group means are, and all 8-bit numbers
        if BRANCHED:
            visible_at = visible_ptr + (start + query) * 3
            limit = tl.load(visible_at, mask=real, other=0)
            own_first = tl.load(visible_at + 1, mask=real, other=0)
            own_last = tl.load(visible_at + 2, mask=real, other=0)
        else:
            limit = tl.where(real, length - queries + query + 1, 0)  # a row sees what is before it
        there_to = length
        if SPARSE and not BRANCHED:
            # Lists ascend: by the last few blocks it is known up to which place in the list a row sees all tokens.
            limit = seen_to if TERMS else tl.where(real, place_in_list(limit, tokens, ends, BLOCK), 0)
            there_to = tl.max(place_in_list(tl.full([1], length, tl.int32), tokens, ends, BLOCK), 0)
        maximum = tl.full([ROWS], -float("inf"), tl.float32)
        total_weight = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        token_tiles = tl.cdiv(tokens, TILE)
        for t in tl.range(tile - first, tl.minimum(stop - first, token_tiles), num_stages=STAGES):
            place = t * TILE + offs_tile
            page, within = places_of(place, tokens, item_row, sources, KV_HEADS, PAGE, BLOCK, SPARSE)
            at = (page * PAGE + within) * DIM
            position = place
            if SPARSE and BRANCHED:
                # Where a token lies and which it is are two loads side by side: neither waits for the other.
                block = tl.load(lists_ptr + item_row * list_width + place // BLOCK, mask=place < tokens, other=0)
                position = tl.where(place < tokens, block * BLOCK + place % BLOCK, length)
            there = position < there_to
            k = load_keys(k_ptr, at, there, DIM, EIGHT)
            if TERMS:
                scores = of_two_terms(tl.dot(terms, k)) * (scale * unit)
            else:
                scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
            # `limit` and `own_last` do not lie after `there_to`: what is not there is not seen either.
            seen = position[None, :] < limit[:, None]
            if BRANCHED:
                seen |= (position[None, :] >= own_first[:, None]) & (position[None, :] < own_last[:, None])
            scores = tl.where(seen, scores, -float("inf"))
            p, base, fade, maximum, total_weight = online_softmax(scores, maximum, total_weight, HEADROOM)
            if EIGHT:
                v = load_eight_bit_values(
                    v_ptr, t, page, within, tokens, item_row, sources, KV_HEADS, DIM, PAGE, BLOCK, SPARSE
                )
            else:
                v = load_values(v_ptr, at, there, DIM)
            if TERMS:
                acc = acc * fade[:, None] + of_two_terms(tl.dot(in_two_terms(p, v.dtype), v))
            else:
                acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision=PRECISION)
            if EMIT:
                store_block_sums(
                    block_sums_ptr, block_sums_stride, p, base, t, item, tokens, QUERIES * GROUP, BLOCK, SPREAD
                )
        if MEANS:
            tiles = tl.maximum(tile - first, token_tiles) - token_tiles, stop - first - token_tiles
            running = maximum, total_weight, acc
            maximum, total_weight, acc = attend_to_means(
                q, real, scale, item_row, tiles, running, means, KV_HEADS, DIM, GROUP_TILE, MAX_VARIANCE, PRECISION
            )
        slot_at = (program + item) * (QUERIES * GROUP) + offs_row
        kept = offs_row < QUERIES * GROUP
        tl.store(partial_max_ptr + slot_at, maximum, mask=kept)
        tl.store(partial_sum_ptr + slot_at, total_weight, mask=kept)
        tl.store(partial_ptr + slot_at[:, None] * DIM + offs_dim[None, :], acc, mask=kept[:, None])
        tile = stop
        item += 1
        if tile < last:
            first, stop, start, end, length, tokens, ends = item_at(item, *of_items, KV_HEADS, BLOCK, NEWEST, SPARSE)
            if TERMS:
                rows = queries_of(item, row_tiles, start, end, q_ptr, HEADS, KV_HEADS, QUERIES, ROWS, DIM)
                terms, unit, seen_to = rows_in_terms(
                    *rows, length, end - start, tokens, ends, BLOCK, k_ptr.dtype.element_ty
                )


@jit
def merge_kernel(
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
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
    total = tl.load(tile_starts_ptr + items)
    begin, end = tl.load(tile_starts_ptr + item), tl.load(tile_starts_ptr + item + 1)
    first = program_of(begin, total, programs, MIN_TILES)
    last = tl.where(end > begin, program_of(end - 1, total, programs, MIN_TILES) + 1, first)
    precede(PDL)
    maximum = -float("inf")
    total_weight = 0.0
    acc = tl.zeros([DIM], tl.float32)
    for program in tl.range(first, last, SPLITS):
        split = program + offs_split
        at = (split + item) * (QUERIES * GROUP) + row
        there = split < last
        maxima = tl.load(partial_max_ptr + at, mask=there, other=-float("inf"))
        weights = tl.load(partial_sum_ptr + at, mask=there, other=0.0)
        values = tl.load(partial_ptr + at[:, None] * DIM + offs_dim[None, :], mask=there[:, None], other=0.0)
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
