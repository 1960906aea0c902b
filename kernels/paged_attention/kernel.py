"""The Triton kernel of paged attention: split over keys as FlashDecoding, the work shared out as stream-K.

All tiles of all items, an item being a (sequence, KV head, tile of queries), stand in one row. Each program takes an
equal stretch of it and leaves a partial result for each item that it touches, which a second kernel merges.
"""

from kernels.backends import ask_for, follow, jit, tl


@jit
def first_tile(program, total, programs, MIN_TILES: tl.constexpr):
    """Where a program's stretch of all tiles begins: equal shares, of at least MIN_TILES while there are tiles."""
    programs = tl.minimum(programs, tl.cdiv(total, MIN_TILES))
    share = total // tl.maximum(programs, 1)
    return tl.minimum(program * share + tl.minimum(program, total - share * programs), total)


@jit
def program_of(tile, total, programs, MIN_TILES: tl.constexpr):
    """Which program's stretch holds a tile: the reverse of `first_tile`."""
    programs = tl.minimum(programs, tl.cdiv(total, MIN_TILES))
    share = total // tl.maximum(programs, 1)
    longer = total - share * programs  # as many programs have a tile more
    if tile < longer * (share + 1):
        program = tile // (share + 1)
    else:
        program = longer + (tile - longer * (share + 1)) // tl.maximum(share, 1)
    return program


@jit
def _kv_places(
    place,
    sequence,
    kv_head,
    tokens,
    length,
    source,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Of the tokens at `place` in what an item reads: where they lie, their positions, and whether they are there.

    source: block tables, lists and pieces, and the strides of a table and of a list.
    """
    tables_ptr, lists_ptr, pieces_ptr, table_stride, list_width = source
    if SPARSE:
        PIECE: tl.constexpr = min(BLOCK, PAGE)
        # Where a token lies and which it is are two loads side by side: neither waits for the other.
        list_row = sequence * KV_HEADS + kv_head
        inside = place < tokens
        piece_row = list_row * (list_width * (BLOCK // PIECE))
        piece = tl.load(pieces_ptr + piece_row + place // PIECE, mask=inside, other=0)
        block = tl.load(lists_ptr + list_row * list_width + place // BLOCK, mask=inside, other=0)
        at = (piece.to(tl.int64) * PIECE + place % PIECE) * DIM
        position = tl.where(inside, block * BLOCK + place % BLOCK, length)
        there = position < length
    else:
        position = place
        there = place < length
        page = tl.load(tables_ptr + sequence * table_stride + place // PAGE, mask=there, other=0).to(tl.int64)
        at = ((page * KV_HEADS + kv_head) * PAGE + place % PAGE) * DIM
    return at, position, there


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
):
    """One program's stretch of the row of tiles; a partial result at slot (program + item) for each item in it."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SPREAD: tl.constexpr = EMIT and BLOCK >= 8 and BLOCK <= TILE // 4
    source = (tables_ptr, lists_ptr, pieces_ptr, table_stride, list_width)
    program = tl.program_id(0)
    total = tl.load(tile_starts_ptr + items)
    item = tl.load(first_items_ptr + program)
    tile = first_tile(program, total, tl.num_programs(0), MIN_TILES)
    last = first_tile(program + 1, total, tl.num_programs(0), MIN_TILES)
    offs_row = tl.arange(0, ROWS)
    offs_dim = tl.arange(0, DIM)
    offs_tile = tl.arange(0, TILE)
    if SPREAD:
        # Column 32 r + 8 w + j of the scores is held by warp w of four. Put whole blocks into one warp's columns, so
        # that no sum over a block crosses warps.
        eights = offs_tile // 8
        offs_tile = (
            (eights // (4 * (BLOCK // 8)) * 4 + eights % 4) * BLOCK + eights // 4 % (BLOCK // 8) * 8 + offs_tile % 8
        )
    if PDL:
        # Of what the launch before makes, the queries and the newest tokens' KV, nothing is read up to the wait.
        if tile < last:
            sequence = item // (row_tiles * KV_HEADS)
            kv_head = (item // row_tiles) % KV_HEADS
            length = tl.load(lengths_ptr + sequence)
            tokens = length
            if SPARSE:
                tokens = tl.load(counts_ptr + sequence * KV_HEADS + kv_head) * BLOCK
            place = (tile - tl.load(tile_starts_ptr + item)) * TILE + offs_tile
            at, _position, _there = _kv_places(
                place, sequence, kv_head, tokens, length, source, KV_HEADS, DIM, PAGE, BLOCK, SPARSE
            )
            ask_for(k_ptr, at, DIM)
            ask_for(v_ptr, at, DIM)
        tl.extra.cuda.gdc_wait()
    while tile < last:
        first = tl.load(tile_starts_ptr + item)
        stop = tl.minimum(last, tl.load(tile_starts_ptr + item + 1))
        row_tile = item % row_tiles
        kv_head = (item // row_tiles) % KV_HEADS
        sequence = item // (row_tiles * KV_HEADS)
        start = tl.load(starts_ptr + sequence)
        queries = tl.load(starts_ptr + sequence + 1) - start
        length = tl.load(lengths_ptr + sequence)
        query = row_tile * QUERIES + offs_row // GROUP
        real = (offs_row < QUERIES * GROUP) & (query < queries)
        head = kv_head * GROUP + offs_row % GROUP
        q_at = ((start + query) * HEADS + head).to(tl.int64) * DIM
        q = tl.load(q_ptr + q_at[:, None] + offs_dim[None, :], mask=real[:, None], other=0.0)
        if BRANCHED:
            visible_at = visible_ptr + (start + query) * 3
            limit = tl.load(visible_at, mask=real, other=0) - 1
            own_first = tl.load(visible_at + 1, mask=real, other=0)
            own_last = tl.load(visible_at + 2, mask=real, other=0)
        else:
            limit = tl.where(real, length - queries + query, -1)  # the last position that a row may see
        maximum = tl.full([ROWS], -float("inf"), tl.float32)
        total_weight = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        list_row = sequence * KV_HEADS + kv_head
        tokens = length
        if SPARSE:
            tokens = tl.load(counts_ptr + list_row) * BLOCK
        token_tiles = tl.cdiv(tokens, TILE)
        for t in tl.range(tile - first, tl.minimum(stop - first, token_tiles), num_stages=STAGES):
            place = t * TILE + offs_tile
            at, position, there = _kv_places(
                place, sequence, kv_head, tokens, length, source, KV_HEADS, DIM, PAGE, BLOCK, SPARSE
            )
            k = tl.load(k_ptr + at[None, :] + offs_dim[:, None], mask=there[None, :], other=0.0)
            scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
            # `limit` and `own_last` lie below `length`: what is not there is not seen either.
            seen = position[None, :] <= limit[:, None]
            if BRANCHED:
                seen |= (position[None, :] >= own_first[:, None]) & (position[None, :] < own_last[:, None])
            scores = tl.where(seen, scores, -float("inf"))
            higher = tl.maximum(maximum, tl.max(scores, 1))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            p = tl.exp2(scores - base[:, None])
            fade = tl.exp2(maximum - base)
            total_weight = total_weight * fade + tl.sum(p, 1)
            v = tl.load(v_ptr + at[:, None] + offs_dim[None, :], mask=there[:, None], other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
            maximum = higher
            if EMIT:
                if SPREAD:
                    split = tl.reshape(p, [ROWS, TILE // (4 * BLOCK), BLOCK // 8, 4, 8])
                    sums = tl.reshape(tl.sum(tl.sum(split, 4), 2), [ROWS, TILE // BLOCK])
                else:
                    sums = tl.sum(tl.reshape(p, [ROWS, TILE // BLOCK, BLOCK]), 2)
                block = t * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
                row_at = (item * QUERIES * GROUP + offs_row).to(tl.int64) * block_sums_stride
                tl.store(
                    block_sums_ptr + row_at[:, None] + block[None, :],
                    base[:, None] + tl.log2(sums),
                    mask=(offs_row < QUERIES * GROUP)[:, None] & (block < tl.cdiv(tokens, BLOCK))[None, :],
                )
        if MEANS:
            groups = tl.load(group_counts_ptr + sequence)
            for t in tl.range(tl.maximum(tile - first, token_tiles) - token_tiles, stop - first - token_tiles):
                group = t * GROUP_TILE + tl.arange(0, GROUP_TILE)
                inside = group < groups
                slot = tl.load(group_tables_ptr + sequence * group_stride + group, mask=inside, other=0)
                unread = tl.load(unread_ptr + list_row * group_stride + group, mask=inside, other=0.0)
                there = unread > 0
                at = (slot.to(tl.int64) * KV_HEADS + kv_head) * DIM
                across = at[None, :] + offs_dim[:, None]
                k = tl.load(mean_k_ptr + across, mask=there[None, :], other=0.0)
                variance = tl.load(mean_variance_ptr + across, mask=there[None, :], other=0.0)
                variance = tl.minimum(variance, 60000.0)  # what float16 holds, if those are the queries
                scaled = q.to(tl.float32) * scale_log2
                # In units of log 2: ½ (q·s)² var, where s holds one factor log2(e) too many; hence · ln 2.
                squares = (scaled * scaled).to(q.dtype)
                spread = tl.dot(squares, variance.to(q.dtype), input_precision=PRECISION) * 0.34657359028
                spread = tl.minimum(spread, MAX_VARIANCE * 1.44269504089)
                scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale_log2 + spread
                scores += tl.log2(tl.maximum(unread, 1.0))[None, :]
                scores = tl.where(there[None, :] & real[:, None], scores, -float("inf"))
                higher = tl.maximum(maximum, tl.max(scores, 1))
                base = tl.where(higher == -float("inf"), 0.0, higher)
                p = tl.exp2(scores - base[:, None])
                fade = tl.exp2(maximum - base)
                total_weight = total_weight * fade + tl.sum(p, 1)
                v = tl.load(mean_v_ptr + at[:, None] + offs_dim[None, :], mask=there[:, None], other=0.0)
                acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision=PRECISION)
                maximum = higher
        slot_at = (program + item) * (QUERIES * GROUP) + offs_row
        kept = offs_row < QUERIES * GROUP
        tl.store(partial_max_ptr + slot_at, maximum, mask=kept)
        tl.store(partial_sum_ptr + slot_at, total_weight, mask=kept)
        tl.store(partial_ptr + slot_at[:, None] * DIM + offs_dim[None, :], acc, mask=kept[:, None])
        tile = stop
        item += 1
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def merge_kernel(
    partial_ptr,
    partial_max_ptr,
    partial_sum_ptr,
    tile_starts_ptr,
    starts_ptr,
    out_ptr,
    log_sums_ptr,
    items,
    programs,
    row_tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    MIN_TILES: tl.constexpr,
    EMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of one item from its partial results, SPLITS at a time, and log2 of its weight sum."""
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
    follow(PDL)
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
    query = (item % row_tiles) * QUERIES + row // GROUP
    out_at = ((start + query) * HEADS + kv_head * GROUP + row % GROUP).to(tl.int64) * DIM
    if query < next_start - start:
        tl.store(out_ptr + out_at + offs_dim, acc)
    if EMIT:
        log_sum = tl.where(total_weight == 0.0, float("inf"), maximum + tl.log2(total_weight))
        tl.store(log_sums_ptr + item * (QUERIES * GROUP) + row, log_sum)
