"""The steps of the Triton kernel of paged attention on one tile of keys: loads, softmax, block sums, group means."""

from typing import Any, NamedTuple

from specahead.kernels.backends import jit, tl
from specahead.kernels.paged_attention.items import places_of


class Groups(NamedTuple):
    """The tensors of `GroupMeans`."""

    k: Any
    v: Any
    k_variance: Any
    tables: Any
    counts: Any


class Partial(NamedTuple):
    """Partial results: outputs [slots * rows, dim], maxima and sums of weights [slots * rows], all float32.

    `programs_of` says where the slots of an item begin.
    """

    outputs: Any
    maxima: Any
    sums: Any


@jit
def in_float16(q):
    """Return queries of 8-bit keys in float16, which holds more of what group means are than bfloat16, and all 8-bit
    numbers. Those in float32 stay.
    """
    if q.dtype == tl.bfloat16:
        q = q.to(tl.float16)
    return q


@jit
def load_keys(k_ptr, at, there, CUT: tl.constexpr):
    """Return the keys of a tile, [DIM, tokens]. at: where each token's numbers begin. there: which tokens exist."""
    # A mask costs time, and 8-bit pages do without: each of their numbers is finite, and unseen tokens have no weight.
    mask = None if CUT.EIGHT else there[None, :]
    # Offsets are added to the pointer one after the other: added up before, they cost registers.
    return tl.load(k_ptr + at[None, :] + tl.arange(0, CUT.DIM)[:, None], mask=mask, other=None if CUT.EIGHT else 0.0)


@jit
def load_values(v_ptr, at, there, CUT: tl.constexpr):
    """Return the values of a tile in 16 or 32 bits, [tokens, DIM]. The arguments are as for `load_keys`."""
    return tl.load(v_ptr + at[:, None] + tl.arange(0, CUT.DIM)[None, :], mask=there[:, None], other=0.0)


@jit
def load_eight_bit_values(v_ptr, t, page, within, item, sources, CUT: tl.constexpr):
    """Return the values of tile t in 8 bits, [DIM, tokens]. In a page the tokens of a dimension lie side by side.

    page, within: where the tile's tokens lie, as `places_of` returned it.
    """
    if CUT.TILE >= CUT.PAGE and (not CUT.SPARSE or CUT.BLOCK >= CUT.PAGE):
        # The tile consists of whole pages. Read page by page, so that lanes side by side read adjacent bytes.
        first = t * CUT.TILE + tl.arange(0, CUT.TILE // CUT.PAGE) * CUT.PAGE
        page, _ = places_of(first, item, sources, CUT)
        numbers = tl.arange(0, CUT.PAGE * CUT.DIM)
        v = tl.load(v_ptr + (page * (CUT.PAGE * CUT.DIM))[:, None] + numbers[None, :])
        v = tl.permute(tl.reshape(v, [CUT.TILE // CUT.PAGE, CUT.DIM, CUT.PAGE]), [1, 0, 2])
        v = tl.reshape(v, [CUT.DIM, CUT.TILE])
    else:
        at = (page * (CUT.PAGE * CUT.DIM) + within)[None, :]
        v = tl.load(v_ptr + at + (tl.arange(0, CUT.DIM) * CUT.PAGE)[:, None])
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
def store_block_sums(block_sums, weights, base, t, item, CUT: tl.constexpr, FIRST: tl.constexpr = 0):
    """Store log2 of the sums over blocks of tile t's weights [rows, tokens], of an item's rows from FIRST to KEPT - 1.

    base: of the weights, [rows]. block_sums: where the sums go, and the stride of a row.
    """
    block_sums_ptr, stride = block_sums
    ROWS: tl.constexpr = weights.shape[0]
    BLOCKS: tl.constexpr = weights.shape[1] // CUT.BLOCK
    if CUT.SPREAD:
        split = tl.reshape(weights, [ROWS, BLOCKS // 4, CUT.BLOCK // 8, 4, 8])
        sums = tl.reshape(tl.sum(tl.sum(split, 4), 2), [ROWS, BLOCKS])
    else:
        sums = tl.sum(tl.reshape(weights, [ROWS, BLOCKS, CUT.BLOCK]), 2)
    row = FIRST + tl.arange(0, ROWS)
    block = t * BLOCKS + tl.arange(0, BLOCKS)
    row_at = (item.number * CUT.KEPT + row).to(tl.int64) * stride
    tl.store(
        block_sums_ptr + row_at[:, None] + block[None, :],
        base[:, None] + tl.log2(sums),
        mask=(row < CUT.KEPT)[:, None] & (block < tl.cdiv(item.tokens, CUT.BLOCK))[None, :],
    )


@jit
def attend_to_means(
    q, real, scale, item, tiles, running, means, CUT: tl.constexpr, STEP: tl.constexpr = 1, STAGES: tl.constexpr = None
):
    """Attend to the means of groups. Return `running` with these added.

    A group weighs as its unread tokens would, were their keys normally distributed with the group's mean and variance.

    q, real: an item's rows and which of them exist. tiles: the first tile of groups and the end of the last, of which
    each STEP-th is taken, STAGES of them in flight. running: maximum, total weight and output of the tiles before.
    means: `Groups`, `Work.unread`, and the stride of both of their tables.
    """
    groups, unread_ptr, stride = means
    maximum, total_weight, acc = running
    begin, end = tiles
    offs_dim = tl.arange(0, CUT.DIM)
    sequence, kv_head = item.row // CUT.KV_HEADS, item.row % CUT.KV_HEADS
    count = tl.load(groups.counts + sequence)
    for t in tl.range(begin, end, STEP, num_stages=STAGES):
        group = t * CUT.GROUP_TILE + tl.arange(0, CUT.GROUP_TILE)
        inside = group < count
        slot = tl.load(groups.tables + sequence * stride + group, mask=inside, other=0)
        unread = tl.load(unread_ptr + item.row * stride + group, mask=inside, other=0.0)
        there = unread > 0
        at = (slot.to(tl.int64) * CUT.KV_HEADS + kv_head) * CUT.DIM
        across = at[None, :] + offs_dim[:, None]
        k = tl.load(groups.k + across, mask=there[None, :], other=0.0)
        variance = tl.load(groups.k_variance + across, mask=there[None, :], other=0.0)
        variance = tl.minimum(variance, 60000.0)  # what float16 holds, if those are the queries
        scaled = q.to(tl.float32) * scale
        # In units of log 2: ½ (q·s)² var, where s holds one factor log2(e) too many; hence · ln 2.
        squares = (scaled * scaled).to(q.dtype)
        spread = tl.dot(squares, variance.to(q.dtype), input_precision=CUT.PRECISION) * 0.34657359028
        spread = tl.minimum(spread, CUT.MAX_VARIANCE * 1.44269504089)
        scores = tl.dot(q, k.to(q.dtype), input_precision=CUT.PRECISION) * scale + spread
        scores += tl.log2(tl.maximum(unread, 1.0))[None, :]
        scores = tl.where(there[None, :] & real[:, None], scores, -float("inf"))
        weights, _, fade, maximum, total_weight = online_softmax(scores, maximum, total_weight)
        v = load_values(groups.v, at, there, CUT)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision=CUT.PRECISION)
    return maximum, total_weight, acc


@jit
def store_partial(partial, slot, running, CUT: tl.constexpr, FIRST: tl.constexpr = 0):
    """Store `running`, the maximum, total weight and output of an item's rows from FIRST to KEPT - 1, in a slot."""
    maximum, total_weight, acc = running
    row = FIRST + tl.arange(0, acc.shape[0])
    at, kept = slot * CUT.KEPT + row, row < CUT.KEPT
    tl.store(partial.maxima + at, maximum, mask=kept)
    tl.store(partial.sums + at, total_weight, mask=kept)
    tl.store(partial.outputs + at[:, None] * CUT.DIM + tl.arange(0, CUT.DIM)[None, :], acc, mask=kept[:, None])
