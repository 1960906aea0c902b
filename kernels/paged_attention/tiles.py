"""The steps of the Triton kernel of paged attention on one tile of keys: loads, softmax, block sums, group means."""

from specahead.kernels.backends import jit, tl
from specahead.kernels.paged_attention.items import places_of


@jit
def in_float16(q):
    """Return queries of 8-bit keys in float16, which holds more of what group means are than bfloat16, and all 8-bit
    numbers. Those in float32 stay.
    """
    if q.dtype == tl.bfloat16:
        q = q.to(tl.float16)
    return q


@jit
def load_keys(k_ptr, at, there, DIM: tl.constexpr, EIGHT: tl.constexpr):
    """Return the keys of a tile, [DIM, tokens]. at: where each token's numbers begin. there: which tokens exist."""
    # A mask costs time, and 8-bit pages do without: each of their numbers is finite, and unseen tokens have no weight.
    mask = None if EIGHT else there[None, :]
    # Offsets are added to the pointer one after the other: added up before, they cost registers.
    return tl.load(k_ptr + at[None, :] + tl.arange(0, DIM)[:, None], mask=mask, other=None if EIGHT else 0.0)


@jit
def load_values(v_ptr, at, there, DIM: tl.constexpr):
    """Return the values of a tile in 16 or 32 bits, [tokens, DIM]. The arguments are as for `load_keys`."""
    return tl.load(v_ptr + at[:, None] + tl.arange(0, DIM)[None, :], mask=there[:, None], other=0.0)


@jit
def load_eight_bit_values(
    v_ptr,
    t,
    page,
    within,
    tokens,
    item_row,
    sources,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Return the values of tile t in 8 bits, [DIM, tokens]. In a page the tokens of a dimension lie side by side.

    page, within: where the tile's tokens lie. tokens, item_row, sources: as for `places_of`, which returned these.
    """
    TILE: tl.constexpr = page.shape[0]
    if TILE >= PAGE and (not SPARSE or BLOCK >= PAGE):
        # The tile consists of whole pages. Read page by page, so that lanes side by side read adjacent bytes.
        first = t * TILE + tl.arange(0, TILE // PAGE) * PAGE
        page, _ = places_of(first, tokens, item_row, sources, KV_HEADS, PAGE, BLOCK, SPARSE)
        v = tl.load(v_ptr + (page * (PAGE * DIM))[:, None] + tl.arange(0, PAGE * DIM)[None, :])
        v = tl.permute(tl.reshape(v, [TILE // PAGE, DIM, PAGE]), [1, 0, 2])
        v = tl.reshape(v, [DIM, TILE])
    else:
        v = tl.load(v_ptr + (page * (PAGE * DIM) + within)[None, :] + (tl.arange(0, DIM) * PAGE)[:, None])
    return v


@jit
def online_softmax(scores, maximum, total_weight):
    """Add one tile to an online softmax to base 2 (FlashAttention, arXiv 2205.14135, algorithm 1).

    scores: [rows, tokens]. maximum, total_weight: [rows], over the tiles before. Returns the tile's weights, their
    base, the factor for what was summed before, and the new maximum and total weight.
    """
    higher = tl.maximum(maximum, tl.max(scores, 1))
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(maximum - base)
    return weights, base, fade, higher, total_weight * fade + tl.sum(weights, 1)


@jit
def blocks_by_warp(column, BLOCK: tl.constexpr):
    """Return which token of a tile stands in each column of the scores, so that each block lies in one warp's columns.

    Column 32 r + 8 w + j of the scores is held by warp w of four. In this order no sum over a block crosses warps.
    """
    eights = column // 8
    return (eights // (4 * (BLOCK // 8)) * 4 + eights % 4) * BLOCK + eights // 4 % (BLOCK // 8) * 8 + column % 8


@jit
def store_block_sums(
    block_sums_ptr,
    block_sums_stride,
    weights,
    base,
    t,
    item,
    tokens,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    SPREAD: tl.constexpr,
    FIRST: tl.constexpr = 0,
):
    """Store log2 of the sums over blocks of tile t's weights [rows, tokens], of an item's rows from FIRST to KEPT - 1.

    base: of the weights, [rows]. tokens: how many the item reads. SPREAD: columns are in the order of `blocks_by_warp`.
    """
    ROWS: tl.constexpr = weights.shape[0]
    BLOCKS: tl.constexpr = weights.shape[1] // BLOCK
    if SPREAD:
        split = tl.reshape(weights, [ROWS, BLOCKS // 4, BLOCK // 8, 4, 8])
        sums = tl.reshape(tl.sum(tl.sum(split, 4), 2), [ROWS, BLOCKS])
    else:
        sums = tl.sum(tl.reshape(weights, [ROWS, BLOCKS, BLOCK]), 2)
    row = FIRST + tl.arange(0, ROWS)
    block = t * BLOCKS + tl.arange(0, BLOCKS)
    row_at = (item * KEPT + row).to(tl.int64) * block_sums_stride
    tl.store(
        block_sums_ptr + row_at[:, None] + block[None, :],
        base[:, None] + tl.log2(sums),
        mask=(row < KEPT)[:, None] & (block < tl.cdiv(tokens, BLOCK))[None, :],
    )


@jit
def attend_to_means(
    q,
    real,
    scale,
    item_row,
    tiles,
    running,
    means,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    MAX_VARIANCE: tl.constexpr,
    PRECISION: tl.constexpr,
    STEP: tl.constexpr = 1,
    STAGES: tl.constexpr = None,
):
    """Attend to the means of groups. Return `running` with these added.

    A group weighs as its unread tokens would, were their keys normally distributed with the group's mean and variance.

    q, real: an item's rows and which of them exist. tiles: the first tile of groups and the end of the last, of which
    each STEP-th is taken, STAGES of them in flight. running: maximum, total weight and output of the tiles before.
    means: keys, values and variances of the keys, tables and counts of groups, their numbers of unread tokens, and the
    stride of a table.
    """
    mean_k_ptr, mean_v_ptr, mean_variance_ptr, group_tables_ptr, group_counts_ptr, unread_ptr, group_stride = means
    maximum, total_weight, acc = running
    begin, end = tiles
    offs_dim = tl.arange(0, DIM)
    sequence, kv_head = item_row // KV_HEADS, item_row % KV_HEADS
    groups = tl.load(group_counts_ptr + sequence)
    for t in tl.range(begin, end, STEP, num_stages=STAGES):
        group = t * GROUP_TILE + tl.arange(0, GROUP_TILE)
        inside = group < groups
        slot = tl.load(group_tables_ptr + sequence * group_stride + group, mask=inside, other=0)
        unread = tl.load(unread_ptr + item_row * group_stride + group, mask=inside, other=0.0)
        there = unread > 0
        at = (slot.to(tl.int64) * KV_HEADS + kv_head) * DIM
        across = at[None, :] + offs_dim[:, None]
        k = tl.load(mean_k_ptr + across, mask=there[None, :], other=0.0)
        variance = tl.load(mean_variance_ptr + across, mask=there[None, :], other=0.0)
        variance = tl.minimum(variance, 60000.0)  # what float16 holds, if those are the queries
        scaled = q.to(tl.float32) * scale
        # In units of log 2: ½ (q·s)² var, where s holds one factor log2(e) too many; hence · ln 2.
        squares = (scaled * scaled).to(q.dtype)
        spread = tl.dot(squares, variance.to(q.dtype), input_precision=PRECISION) * 0.34657359028
        spread = tl.minimum(spread, MAX_VARIANCE * 1.44269504089)
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale + spread
        scores += tl.log2(tl.maximum(unread, 1.0))[None, :]
        scores = tl.where(there[None, :] & real[:, None], scores, -float("inf"))
        weights, _, fade, maximum, total_weight = online_softmax(scores, maximum, total_weight)
        v = load_values(mean_v_ptr, at, there, DIM)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision=PRECISION)
    return maximum, total_weight, acc


@jit
def store_partial(partial, slot, running, KEPT: tl.constexpr, FIRST: tl.constexpr = 0):
    """Store `running`, the maximum, total weight and output of an item's rows from FIRST to KEPT - 1, in a slot."""
    partial_ptr, partial_max_ptr, partial_sum_ptr = partial
    maximum, total_weight, acc = running
    ROWS: tl.constexpr = acc.shape[0]
    DIM: tl.constexpr = acc.shape[1]
    row = FIRST + tl.arange(0, ROWS)
    at, kept = slot * KEPT + row, row < KEPT
    tl.store(partial_max_ptr + at, maximum, mask=kept)
    tl.store(partial_sum_ptr + at, total_weight, mask=kept)
    tl.store(partial_ptr + at[:, None] * DIM + tl.arange(0, DIM)[None, :], acc, mask=kept[:, None])
