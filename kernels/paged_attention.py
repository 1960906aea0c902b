"""Causal attention of ragged queries over paged KV: dense, or over block lists per (sequence, KV head).

Blocks that a list leaves out may be stood in for by the mean key and value of the group of tokens that they
belong to, weighted by how many of the group's tokens are not read, in the same softmax. The weight of n keys
k_i under a query q is n · mean(exp(q·k_i)); with the keys' variances that is, to second order,
n · exp(q·k̄ + ½ Σ q_d² var_d).

The Triton kernel (split over keys as FlashDecoding, the work shared out as stream-K): all tiles of all items, an
item being a (sequence, KV head, tile of queries), stand in one row; each program takes an equal stretch of it and
leaves a partial result for each item that it touches, which a second kernel merges. Nothing is planned on the
host: where items begin in the row is a cumulative sum on the device.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.backends import check_backend, follow, jit, overlapping_launch, power_of_two, tl

# The second-order term overshoots for keys that are far from normal; beyond this (a factor of e²) it is cut.
MAX_VARIANCE_TERM = 2.0
LOG2_E = 1.4426950408889634
MAX_ROWS = 64  # of a tile of queries: heads of a group times queries
MAX_EMITTED = 128  # tokens of a block whose weights are emitted: a tile
GROUP_TILE = 32  # group means that the Triton kernel takes at once


@dataclass(frozen=True)
class BlockLists:
    """The KV blocks that each (sequence, KV head) reads; `block_size` tokens divide a page or are whole pages.

    lists: [sequences, kv_heads, width] int32 logical blocks, each at most once
    counts: [sequences, kv_heads] int32, valid entries of `lists`
    slots: [sequences, kv_heads, width * pages of a block] int32, where the listed pages lie: rows of the pages taken as
        [pages * kv_heads, page_size, head_dim], not negative; None: block tables say it. Only for blocks of whole pages
    """

    lists: Tensor
    counts: Tensor
    block_size: int
    slots: Tensor | None = None


@dataclass(frozen=True)
class GroupMeans:
    """Means of the keys and values of groups of `group_size` tokens, a whole number of blocks.

    k, v: [slots, kv_heads, head_dim] means; k_variance: the same shape, of each key dimension within the group
    tables: [sequences, max_groups] int32, slot of each group from the first token on
    counts: [sequences] int32, groups that have a mean; they end before the first query
    """

    k: Tensor
    v: Tensor
    k_variance: Tensor
    tables: Tensor
    counts: Tensor
    group_size: int


@dataclass(frozen=True)
class Tuning:
    """How the Triton kernel is cut. tile: tokens; programs: per multiprocessor; at least min_tiles a program.

    segment: tiles of one item that a program takes, so that a result depends on nothing else in the batch; 0: equal
    stretches of all tiles.
    """

    tile: int = 128
    stages: int = 2
    warps: int = 4
    programs: int = 2
    min_tiles: int = 2
    segment: int = 0


# So many programs fewer than a GPU holds at once attend over lists. Beside eight that copy KV (engine.kv.tiered), each
# in the place of two, none has to wait until another has ended, which would take a layer's attention nearly twice its
# time. The same everywhere: what a step gives does not depend on where its KV comes from.
LEFT_FREE = 16


@dataclass(frozen=True)
class Work:
    """What the Triton kernel derives from lengths and lists: made once for all layers of a step, or for one.

    With a leading dimension for layers, or without:

    tile_starts: [items + 1] int32, where each item's tiles begin
    first_items: [programs] int32, the item that each program begins in
    pieces: [sequences, kv_heads, width * pieces of a block] int32, where listed blocks lie in the pages, in pieces of
        a block or a page, whichever is smaller: (page * kv_heads + head) * pieces of a page + piece
    unread: [sequences, kv_heads, max_groups] int32, tokens of a group that are not read; None without means
    """

    tuning: Tuning
    tile_starts: Tensor
    first_items: Tensor
    pieces: Tensor | None = None
    unread: Tensor | None = None

    def layer(self, index: int) -> "Work":
        every = (self.tile_starts, self.first_items, self.pieces, self.unread)
        return Work(self.tuning, *(None if tensor is None else tensor[index] for tensor in every))  # type: ignore[arg-type]


def paged_attention(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    blocks: BlockLists | None = None,
    means: GroupMeans | None = None,
    backend: str = "torch",
    max_queries: int = 0,
    work: Work | None = None,
) -> Tensor:
    """Attend; the last queries of a sequence stand at its last KV positions.

    queries: [tokens, heads, head_dim], the sequences one after another
    k_pages, v_pages: [pages, kv_heads, page_size, head_dim]
    block_tables: [sequences, max_pages] int32, page of each logical page
    kv_lengths: [sequences] int32, tokens with KV, the queries' own included
    query_starts: [sequences + 1] int32, first query row of each sequence
    blocks: what is read; everything if None. means: what stands in for the rest; nothing if None
    max_queries: for Triton, no sequence has more queries. work: for Triton, of `plan_work`; made here if None
    Returns [tokens, heads, head_dim]; a query that may see nothing gets zeros.
    """
    check_backend("paged_attention", backend, ("torch", "triton"))
    _check_arguments(queries, k_pages, blocks, means)
    if backend == "triton":
        _check_triton(queries, k_pages, max_queries)
        return _triton_paged_attention(
            queries,
            k_pages,
            v_pages,
            block_tables,
            kv_lengths,
            query_starts,
            scale,
            blocks,
            means,
            max_queries,
            work,
        )[0]
    out, _ = _torch_paged_attention(
        queries, k_pages, v_pages, block_tables, kv_lengths, query_starts, scale, blocks, means, False
    )
    return out


def paged_attention_with_read_weights(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    blocks: BlockLists,
    means: GroupMeans | None = None,
    backend: str = "torch",
    max_queries: int = 0,
    work: Work | None = None,
    weights_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` over lists, and how much softmax weight each listed block got.

    The weights are [sequences, kv_heads, width] float32, in the order of `blocks.lists`: the sum over the query
    heads of a KV head of the mean over a sequence's queries; 0 past a list's count.
    weights_out: where to put them, if given.
    """
    check_backend("paged_attention_with_read_weights", backend, ("torch", "triton"))
    _check_arguments(queries, k_pages, blocks, means)
    if backend == "triton":
        _check_triton(queries, k_pages, max_queries, blocks.block_size)
        out, sums, log_sums = _triton_paged_attention(
            queries,
            k_pages,
            v_pages,
            block_tables,
            kv_lengths,
            query_starts,
            scale,
            blocks,
            means,
            max_queries,
            work,
            blocks.block_size,
        )
        assert sums is not None and log_sums is not None
        return out, _triton_read_weights(
            queries, query_starts, blocks, max_queries, sums, log_sums, weights_out
        )
    out, weights = _torch_paged_attention(
        queries, k_pages, v_pages, block_tables, kv_lengths, query_starts, scale, blocks, means, True
    )
    assert weights is not None
    return out, weights if weights_out is None else weights_out.copy_(weights)


def _check_arguments(
    queries: Tensor, k_pages: Tensor, blocks: BlockLists | None, means: GroupMeans | None
) -> None:
    heads, (kv_heads, page_size) = queries.shape[1], k_pages.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"paged_attention: {heads} query heads are no multiple of {kv_heads} KV heads")
    if means is not None and blocks is None:
        raise ValueError("paged_attention: group means stand in for blocks that lists leave out; give lists")
    if blocks is None:
        return
    size = blocks.block_size
    if size < 1 or (size % page_size and page_size % size):
        raise ValueError(
            f"paged_attention: blocks of {size} tokens neither divide a page of {page_size} nor fill some"
        )
    if blocks.slots is not None and size % page_size:
        raise ValueError(
            f"paged_attention: slots are of whole pages of {page_size}, blocks have {size} tokens; give block tables"
        )
    if means is not None and means.group_size % size:
        raise ValueError(
            f"paged_attention: groups of {means.group_size} tokens are no whole blocks of {size}"
        )


def _check_triton(queries: Tensor, k_pages: Tensor, max_queries: int, emit_block_size: int = 0) -> None:
    dim = queries.shape[2]
    if dim < 16 or dim & (dim - 1):
        raise NotImplementedError(
            f"paged_attention: heads of {dim} dimensions; Triton takes powers of two from 16"
        )
    if max_queries < 1:
        raise ValueError("paged_attention: the Triton backend needs max_queries, as a number of the host's")
    if not (queries.is_contiguous() and k_pages.is_contiguous()):
        raise ValueError("paged_attention: the Triton backend needs contiguous queries and pages")
    if emit_block_size & (emit_block_size - 1) or emit_block_size > MAX_EMITTED:
        raise NotImplementedError(
            f"paged_attention: weights of blocks of {emit_block_size} tokens; Triton emits for powers of two up to "
            f"{MAX_EMITTED}"
        )


def _torch_paged_attention(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    blocks: BlockLists | None,
    means: GroupMeans | None,
    emit: bool,
) -> tuple[Tensor, Tensor | None]:
    out = torch.empty_like(queries)
    weights = None if blocks is None or not emit else torch.zeros_like(blocks.lists, dtype=torch.float32)
    starts, lengths = query_starts.tolist(), kv_lengths.tolist()
    for i, length in enumerate(lengths):
        rows = queries[starts[i] : starts[i + 1]]
        if not len(rows):
            continue
        table = block_tables[i].long()
        if blocks is None:
            keys, values, positions = _all_pages(k_pages, v_pages, table, length)
            out[starts[i] : starts[i + 1]] = _attend(rows, keys, values, positions, length, scale)
            continue
        listed = torch.arange(blocks.lists.shape[2], device=queries.device) < blocks.counts[i, :, None]
        chosen = blocks.lists[i].long()
        slots = None if blocks.slots is None else blocks.slots[i]
        keys, values, positions = _listed(
            k_pages, v_pages, table, chosen, listed, blocks.block_size, length, slots
        )
        if means is None and not emit:
            out[starts[i] : starts[i + 1]] = _attend(rows, keys, values, positions, length, scale)
            continue
        groups = None if means is None else _stand_ins(means, i, chosen, listed, blocks.block_size)
        out[starts[i] : starts[i + 1]], probs = _attend_with_probs(
            rows, keys, values, positions, length, scale, groups
        )
        if weights is not None:  # probs [kv_heads, group, rows, width * block_size]
            weights[i] = probs.unflatten(-1, (-1, blocks.block_size)).sum(-1).sum(1).mean(1)
    return out, weights


def _all_pages(k_pages: Tensor, v_pages: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values [kv_heads, n, dim] and positions [1, n] of a sequence's first `length` tokens, in whole pages."""
    page_size = k_pages.shape[2]
    physical = table[None, : -(-length // page_size)]
    positions = torch.arange(physical.shape[1] * page_size, device=table.device)[None]
    return gather_pages(k_pages, physical), gather_pages(v_pages, physical), positions


def _listed(
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    chosen: Tensor,
    listed: Tensor,
    block_size: int,
    length: int,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values [kv_heads, width * block_size, dim] of listed blocks; positions beyond `length` where none is."""
    page_size = k_pages.shape[2]
    offsets = torch.arange(block_size, device=table.device)
    positions = chosen.where(listed, 0)[..., None] * block_size + offsets
    if slots is not None:
        there = listed.repeat_interleave(block_size // page_size, 1)
        rows = slots.where(there, 0).flatten().long()
        keys, values = (
            pages.view(-1, page_size * pages.shape[3])
            .index_select(0, rows)
            .view(len(slots), -1, pages.shape[3])
            for pages in (k_pages, v_pages)
        )
    elif block_size < page_size:
        flat = positions.flatten(1)
        keys, values = (
            gather_tokens(pages, table[flat // page_size], flat % page_size) for pages in (k_pages, v_pages)
        )
    else:
        pages = positions[..., ::page_size].flatten(1) // page_size
        physical = table[pages.clamp(max=len(table) - 1)]  # a last block may reach beyond the table
        keys, values = gather_pages(k_pages, physical), gather_pages(v_pages, physical)
    return keys, values, positions.where(listed[..., None], length).flatten(1)


def gather_pages(pages: Tensor, physical: Tensor) -> Tensor:
    """The pages listed as [kv_heads, width] (or [1, width] for all heads) -> [kv_heads, width * page_size, dim]"""
    kv_heads, page_size, dim = pages.shape[1:]
    rows = physical * kv_heads + torch.arange(kv_heads, device=pages.device)[:, None]
    # One row per (page, head): index_select copies each with one memcpy, several times faster than indexing.
    return pages.view(-1, page_size * dim).index_select(0, rows.flatten()).view(kv_heads, -1, dim)


def gather_tokens(pages: Tensor, physical: Tensor, offsets: Tensor) -> Tensor:
    """Single tokens: page and offset [kv_heads, n] -> [kv_heads, n, dim]"""
    kv_heads, page_size, dim = pages.shape[1:]
    rows = (physical * kv_heads + torch.arange(kv_heads, device=pages.device)[:, None]) * page_size + offsets
    return pages.view(-1, dim).index_select(0, rows.flatten()).view(kv_heads, -1, dim)


@dataclass(frozen=True)
class _StandIns:
    """Of one sequence: means and variances [kv_heads, groups, dim], tokens not read [kv_heads, groups]."""

    k: Tensor
    v: Tensor
    k_variance: Tensor
    unread: Tensor


def _stand_ins(
    means: GroupMeans, sequence: int, chosen: Tensor, listed: Tensor, block_size: int
) -> _StandIns:
    count = int(means.counts[sequence])
    slots = means.tables[sequence, :count].long()
    per_group = means.group_size // block_size
    group = (chosen // per_group).where(listed, count).clamp(max=count)
    read = torch.zeros(len(chosen), count + 1, device=chosen.device).scatter_add_(
        1, group, torch.ones_like(group, dtype=torch.float32)
    )
    unread = means.group_size - block_size * read[:, :count]
    k, v, variance = (x[slots].transpose(0, 1).float() for x in (means.k, means.v, means.k_variance))
    return _StandIns(k, v, variance, unread)


def pack_heads(queries: Tensor, kv_heads: int) -> Tensor:
    """[rows, heads, dim] -> [kv_heads, group * rows, dim]: the query heads of a KV head side by side"""
    rows, _, dim = queries.shape
    return queries.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)


def _unpack(out: Tensor, rows: int) -> Tensor:
    """The reverse of `pack_heads`."""
    kv_heads, _, dim = out.shape
    return out.view(kv_heads, -1, rows, dim).permute(2, 0, 1, 3).reshape(rows, -1, dim)


def _visible(positions: Tensor, rows: int, length: int) -> Tensor:
    """bool [1 or kv_heads, rows, n]: which positions each of the last `rows` of `length` tokens may see"""
    return positions[:, None, :] <= torch.arange(length - rows, length, device=positions.device)[:, None]


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, length: int, scale: float
) -> Tensor:
    """One sequence. queries [rows, heads, dim]; keys, values [kv_heads, n, dim]; positions [1 or kv_heads, n]"""
    rows, heads, _ = queries.shape
    kv_heads, n = keys.shape[:2]
    if n == 0:
        return torch.zeros_like(queries)
    mask = _visible(positions, rows, length).repeat(1, heads // kv_heads, 1)
    out = F.scaled_dot_product_attention(
        pack_heads(queries, kv_heads)[None], keys[None], values[None], attn_mask=mask[None], scale=scale
    )[0]
    return _unpack(out.where(mask.any(-1, keepdim=True), 0), rows)


def _attend_with_probs(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    length: int,
    scale: float,
    groups: _StandIns | None = None,
) -> tuple[Tensor, Tensor]:
    """As `_attend`, and the probabilities of the keys, float32 [kv_heads, group, rows, n]."""
    rows, heads, _ = queries.shape
    kv_heads, n = keys.shape[:2]
    packed = pack_heads(queries, kv_heads)
    mask = _visible(positions, rows, length).repeat(1, heads // kv_heads, 1).expand(kv_heads, -1, -1)
    scores = (packed @ keys.mT).float() * scale
    if groups is not None:
        q = packed.float() * scale
        spread = ((q * q) @ groups.k_variance.mT / 2).clamp(max=MAX_VARIANCE_TERM)
        mean_scores = q @ groups.k.mT + spread + groups.unread.clamp(min=1).log()[:, None]
        scores = torch.cat([scores, mean_scores], -1)
        mask = torch.cat([mask, (groups.unread > 0)[:, None].expand(-1, mask.shape[1], -1)], -1)
        values = torch.cat([values, groups.v.to(values.dtype)], 1)
    # A row that sees nothing: its softmax is NaN, its result zeros.
    probs = scores.masked_fill(~mask, -torch.inf).softmax(-1).where(mask, 0)
    out = (probs.to(values.dtype) @ values).to(queries.dtype)
    return _unpack(out, rows), probs[..., :n].unflatten(1, (-1, rows))


# --- Triton ---------------------------------------------------------------------------------------------------


@jit
def _first_tile(program, total, programs, MIN_TILES: tl.constexpr):
    """Where a program's stretch of all tiles begins: equal shares, of at least MIN_TILES while there are tiles."""
    programs = tl.minimum(programs, tl.cdiv(total, MIN_TILES))
    share = total // tl.maximum(programs, 1)
    return tl.minimum(program * share + tl.minimum(program, total - share * programs), total)


@jit
def _program_of(tile, total, programs, MIN_TILES: tl.constexpr):
    """Which program's stretch holds a tile: the reverse of `_first_tile`."""
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
    tables_ptr,
    lists_ptr,
    pieces_ptr,
    table_stride,
    list_width,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Of the tokens at `place` in what an item reads: where they lie, their positions, and whether they are there."""
    if SPARSE:
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
def _ask_for(ptr, at, DIM: tl.constexpr):
    """Have rows of DIM numbers brought to the second-level cache."""
    LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    lines = ptr + at[:, None] + (tl.arange(0, max(1, DIM // LINE)) * LINE)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _partial_attention_kernel(
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
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    STAGES: tl.constexpr,
    SPARSE: tl.constexpr,
    MEANS: tl.constexpr,
    EMIT: tl.constexpr,
    SPREAD: tl.constexpr,
    PDL: tl.constexpr,
    MAX_VARIANCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program's stretch of the row of tiles; a partial result at slot (program + item) for each item in it."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    program = tl.program_id(0)
    total = tl.load(tile_starts_ptr + items)
    item = tl.load(first_items_ptr + program)
    tile = _first_tile(program, total, tl.num_programs(0), MIN_TILES)
    last = _first_tile(program + 1, total, tl.num_programs(0), MIN_TILES)
    offs_row = tl.arange(0, ROWS)
    offs_dim = tl.arange(0, DIM)
    offs_tile = tl.arange(0, TILE)
    if SPREAD:
        # Column 32 r + 8 w + j of the scores is held by warp w of four. Put whole blocks into one warp's columns, so
        # that no sum over a block crosses warps.
        eights = offs_tile // 8
        offs_tile = (
            (eights // (4 * (BLOCK // 8)) * 4 + eights % 4) * BLOCK
            + eights // 4 % (BLOCK // 8) * 8
            + offs_tile % 8
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
            at, _position, _there = _kv_places(
                (tile - tl.load(tile_starts_ptr + item)) * TILE + offs_tile,
                sequence,
                kv_head,
                tokens,
                length,
                tables_ptr,
                lists_ptr,
                pieces_ptr,
                table_stride,
                list_width,
                KV_HEADS,
                DIM,
                PAGE,
                BLOCK,
                PIECE,
                SPARSE,
            )
            _ask_for(k_ptr, at, DIM)
            _ask_for(v_ptr, at, DIM)
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
            at, position, there = _kv_places(
                t * TILE + offs_tile,
                sequence,
                kv_head,
                tokens,
                length,
                tables_ptr,
                lists_ptr,
                pieces_ptr,
                table_stride,
                list_width,
                KV_HEADS,
                DIM,
                PAGE,
                BLOCK,
                PIECE,
                SPARSE,
            )
            k = tl.load(k_ptr + at[None, :] + offs_dim[:, None], mask=there[None, :], other=0.0)
            scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
            # `limit` lies below `length`: what is not there is not seen either.
            scores = tl.where(position[None, :] <= limit[:, None], scores, -float("inf"))
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
            for t in tl.range(
                tl.maximum(tile - first, token_tiles) - token_tiles, stop - first - token_tiles
            ):
                group = t * GROUP_TILE + tl.arange(0, GROUP_TILE)
                inside = group < groups
                slot = tl.load(group_tables_ptr + sequence * group_stride + group, mask=inside, other=0)
                unread = tl.load(unread_ptr + list_row * group_stride + group, mask=inside, other=0.0)
                there = unread > 0
                at = (slot.to(tl.int64) * KV_HEADS + kv_head) * DIM
                across = at[None, :] + offs_dim[:, None]
                k = tl.load(mean_k_ptr + across, mask=there[None, :], other=0.0)
                variance = tl.load(mean_variance_ptr + across, mask=there[None, :], other=0.0)
                scaled = q.to(tl.float32) * scale_log2
                # In units of log 2: ½ (q·s)² var, where s holds one factor log2(e) too many; hence · ln 2.
                spread = tl.dot(scaled * scaled, variance, input_precision=PRECISION) * 0.34657359028
                spread = tl.minimum(spread, MAX_VARIANCE * 1.44269504089)
                scores = tl.dot(scaled, k, input_precision=PRECISION) + spread
                scores += tl.log2(tl.maximum(unread, 1.0))[None, :]
                scores = tl.where(there[None, :] & real[:, None], scores, -float("inf"))
                higher = tl.maximum(maximum, tl.max(scores, 1))
                base = tl.where(higher == -float("inf"), 0.0, higher)
                p = tl.exp2(scores - base[:, None])
                fade = tl.exp2(maximum - base)
                total_weight = total_weight * fade + tl.sum(p, 1)
                v = tl.load(mean_v_ptr + at[:, None] + offs_dim[None, :], mask=there[:, None], other=0.0)
                acc = tl.dot(p, v, acc * fade[:, None], input_precision=PRECISION)
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
def _merge_kernel(
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
    first = _program_of(begin, total, programs, MIN_TILES)
    last = tl.where(end > begin, _program_of(end - 1, total, programs, MIN_TILES) + 1, first)
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


@jit
def _tile_starts_kernel(
    tokens_ptr,
    groups_ptr,
    tile_starts_ptr,
    first_items_ptr,
    items,
    programs,
    per_sequence,
    per_tokens,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    MEANS: tl.constexpr,
    ITEMS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SEGMENT: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Where each item's tiles begin, [items + 1], and the item that each program of the attention kernel begins in.

    One program a layer. A count of tokens serves per_tokens items.
    """
    layer = tl.program_id(0)
    item = tl.arange(0, ITEMS)
    inside = item < items
    at = layer * (items // per_tokens) + item // per_tokens
    tiles = tl.cdiv(tl.load(tokens_ptr + at, mask=inside, other=0) * UNIT, TILE)
    if MEANS:
        tiles += tl.cdiv(tl.load(groups_ptr + item // per_sequence, mask=inside, other=0), GROUP_TILE)
    tiles = tl.cdiv(tiles, SEGMENT) * SEGMENT
    tile_starts_ptr += layer * (items + 1)
    tl.store(tile_starts_ptr, 0)
    ends = tl.cumsum(tiles, 0)
    tl.store(tile_starts_ptr + 1 + item, ends, mask=inside)
    total = tl.sum(tiles, 0)
    for chunk in tl.range(0, programs, PROGRAMS):
        program = chunk + tl.arange(0, PROGRAMS)
        first = _first_tile(program, total, programs, MIN_TILES)
        before = (ends[None, :] <= first[:, None]) & inside[None, :]
        first_item = tl.sum(before.to(tl.int32), 1)
        tl.store(first_items_ptr + layer * programs + program, first_item, mask=program < programs)


@jit
def _pieces_kernel(
    lists_ptr,
    counts_ptr,
    tables_ptr,
    pieces_ptr,
    list_width,
    table_stride,
    sequences,
    KV_HEADS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    PER_PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Logical blocks to places in the pages (`Work.pieces`); a row is a (layer, sequence, KV head)."""
    row = tl.program_id(0)
    kv_head = row % KV_HEADS
    sequence = (row // KV_HEADS) % sequences
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = place < tl.load(counts_ptr + row) * PER_BLOCK
    block = tl.load(lists_ptr + row * list_width + place // PER_BLOCK, mask=inside, other=0)
    piece = block * PER_BLOCK + place % PER_BLOCK
    logical = piece // PER_PAGE
    # A last block of several pages may reach beyond the table; those tokens lie beyond the length too.
    page = tl.load(
        tables_ptr + sequence * table_stride + logical, mask=inside & (logical < table_stride), other=0
    )
    at = (page * KV_HEADS + kv_head) * PER_PAGE + piece % PER_PAGE
    tl.store(pieces_ptr + row * (list_width * PER_BLOCK) + place, at, mask=inside)


@jit
def _unread_kernel(
    lists_ptr,
    counts_ptr,
    unread_ptr,
    list_width,
    group_stride,
    PER_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Tokens of each group that a list leaves out; one program a (layer, sequence, KV head)."""
    row = tl.program_id(0)
    count = tl.load(counts_ptr + row)
    read = tl.zeros([GROUPS], tl.int32)
    for first in tl.range(0, count, CHUNK):
        place = first + tl.arange(0, CHUNK)
        inside = place < count
        group = tl.load(lists_ptr + row * list_width + place, mask=inside, other=0) // PER_GROUP
        # Blocks after the last whole group belong to none.
        read += tl.histogram(
            tl.where(inside & (group < GROUPS), group, 0), GROUPS, mask=inside & (group < GROUPS)
        )
    group = tl.arange(0, GROUPS)
    tl.store(unread_ptr + row * group_stride + group, (PER_GROUP - read) * BLOCK, mask=group < group_stride)


@jit
def _block_weights_kernel(
    block_sums_ptr,
    log_sums_ptr,
    counts_ptr,
    starts_ptr,
    out_ptr,
    width: tl.constexpr,
    block_sums_stride: tl.constexpr,
    emitting: tl.constexpr,
    row_tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Dense attention: out [sequences, emitting, heads, width], each row's weights; counts: tokens, UNIT a block."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0)
    head = row % HEADS
    place = (row // HEADS) % emitting
    sequence = row // (HEADS * emitting)
    query = tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence) - emitting + place
    query = tl.maximum(query, 0)  # an empty place of a batch has none
    item = (sequence * KV_HEADS + head // GROUP) * row_tiles + query // QUERIES
    at = item * QUERIES * GROUP + (query % QUERIES) * GROUP + head % GROUP
    block = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = block < tl.cdiv(tl.load(counts_ptr + sequence), UNIT)
    sums = tl.load(
        block_sums_ptr + at.to(tl.int64) * block_sums_stride + block,
        mask=inside,
        other=-float("inf"),
    )
    weights = tl.exp2(sums - tl.load(log_sums_ptr + at))
    tl.store(out_ptr + row.to(tl.int64) * width + block, tl.where(inside, weights, 0.0), mask=block < width)


@jit
def _add_listed_weights_kernel(
    block_sums_ptr,
    log_sums_ptr,
    lists_ptr,
    counts_ptr,
    starts_ptr,
    out_ptr,
    width: tl.constexpr,
    block_sums_stride: tl.constexpr,
    out_stride,
    share,
    n: tl.constexpr,
    row_tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`share` of the last query's weights on listed blocks to out [sequences, heads, n], one sequence's head a row."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0) % HEADS
    sequence = tl.program_id(0) // HEADS
    list_row = sequence * KV_HEADS + head // GROUP
    query = tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence) - 1
    query = tl.maximum(query, 0)
    at = (
        (list_row * row_tiles + query // QUERIES) * QUERIES * GROUP + (query % QUERIES) * GROUP + head % GROUP
    )
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = place < tl.load(counts_ptr + list_row)
    sums = tl.load(
        block_sums_ptr + at.to(tl.int64) * block_sums_stride + place, mask=inside, other=-float("inf")
    )
    block = tl.load(lists_ptr + list_row * width + place, mask=inside, other=0)
    target = out_ptr + sequence.to(tl.int64) * out_stride + head * n + block
    before = tl.load(target, mask=inside, other=0.0)
    tl.store(target, before + share * tl.exp2(sums - tl.load(log_sums_ptr + at)), mask=inside)


@jit
def _read_weights_kernel(
    block_sums_ptr,
    log_sums_ptr,
    counts_ptr,
    starts_ptr,
    out_ptr,
    width: tl.constexpr,
    block_sums_stride: tl.constexpr,
    row_tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Listed blocks: out [sequences, kv_heads, width], summed over a KV head's heads, mean over the queries."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    list_row = tl.program_id(0)
    sequence = list_row // KV_HEADS
    queries = tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence)
    block = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    count = tl.load(counts_ptr + list_row)
    inside = block < count
    weights = tl.zeros([CHUNK], tl.float32)
    rows = tl.where(tl.program_id(1) * CHUNK < count, queries * GROUP, 0)
    for row in tl.range(0, rows):
        query = row // GROUP
        at = (
            (list_row * row_tiles + query // QUERIES) * QUERIES * GROUP
            + (query % QUERIES) * GROUP
            + row % GROUP
        )
        sums = tl.load(
            block_sums_ptr + at.to(tl.int64) * block_sums_stride + block, mask=inside, other=-float("inf")
        )
        weights += tl.exp2(sums - tl.load(log_sums_ptr + at))
    weights = weights / tl.maximum(queries, 1)
    tl.store(
        out_ptr + list_row.to(tl.int64) * width + block, tl.where(inside, weights, 0.0), mask=block < width
    )


def plan_work(
    kv_heads: int,
    group: int,
    dim: int,
    max_queries: int,
    block_tables: Tensor,
    kv_lengths: Tensor,
    page_size: int,
    blocks: BlockLists | None = None,
    means: GroupMeans | None = None,
    tuning: Tuning | None = None,
) -> Work:
    """Launches only; works inside a CUDA graph. `blocks` may hold lists of all layers: [layers, sequences, …].

    block_tables, kv_lengths: as for `paged_attention`; group: query heads of a KV head; dim: of a head
    """
    tile_queries, row_tiles = _row_tiles(max_queries, group)
    tuning = tuning or default_tuning(dim, blocks is not None, tile_queries * group)
    sequences = len(kv_lengths)
    items = sequences * kv_heads * row_tiles
    counts = kv_lengths if blocks is None else blocks.counts
    layers = blocks.counts.shape[0] if blocks is not None and blocks.counts.dim() == 3 else 1
    longest = (
        block_tables.shape[1] * page_size if blocks is None else blocks.lists.shape[-1] * blocks.block_size
    )
    tiles = -(-longest // tuning.tile) + (0 if means is None else -(-means.tables.shape[1] // GROUP_TILE))
    programs = tuning.programs * _multiprocessors(kv_lengths.device)
    if blocks is not None:
        programs = max(1, programs - LEFT_FREE)
    if tuning.segment:
        programs = max(1, items * -(-tiles // tuning.segment))
    starts = torch.empty(layers, items + 1, dtype=torch.int32, device=kv_lengths.device)
    first_items = torch.empty(layers, programs, dtype=torch.int32, device=kv_lengths.device)
    _tile_starts_kernel[(layers,)](
        counts,
        counts if means is None else means.counts,
        starts,
        first_items,
        items,
        programs,
        kv_heads * row_tiles,
        kv_heads * row_tiles if blocks is None else row_tiles,
        UNIT=1 if blocks is None else blocks.block_size,
        TILE=tuning.tile,
        GROUP_TILE=GROUP_TILE,
        MEANS=means is not None,
        ITEMS=power_of_two(items),
        MIN_TILES=tuning.segment or tuning.min_tiles,
        SEGMENT=max(1, tuning.segment),
        PROGRAMS=max(1, 4096 // power_of_two(items)),
    )
    pieces = unread = None
    if blocks is not None:
        width, per_block = blocks.lists.shape[-1], max(1, blocks.block_size // page_size)
        pieces = blocks.slots
    if blocks is not None and pieces is None:
        shape = (*blocks.counts.shape, width * per_block)
        pieces = torch.empty(shape, dtype=torch.int32, device=kv_lengths.device)
        _pieces_kernel[(blocks.counts.numel(), -(-width * per_block // 1024) or 1)](
            blocks.lists,
            blocks.counts,
            block_tables,
            pieces,
            width,
            block_tables.shape[1],
            sequences,
            KV_HEADS=kv_heads,
            PER_BLOCK=per_block,
            PER_PAGE=max(1, page_size // blocks.block_size),
            CHUNK=1024,
        )
    if means is not None:
        assert blocks is not None
        shape = (*blocks.counts.shape, max(1, means.tables.shape[1]))
        unread = torch.empty(shape, dtype=torch.int32, device=kv_lengths.device)
        _unread_kernel[(blocks.counts.numel(),)](
            blocks.lists,
            blocks.counts,
            unread,
            blocks.lists.shape[-1],
            shape[-1],
            PER_GROUP=means.group_size // blocks.block_size,
            BLOCK=blocks.block_size,
            GROUPS=power_of_two(shape[-1]),
            CHUNK=512,
        )
    if blocks is not None and blocks.counts.dim() == 3:
        return Work(tuning, starts, first_items, pieces, unread)
    return Work(tuning, starts[0], first_items[0], pieces, unread)


def default_tuning(dim: int, sparse: bool, rows: int) -> Tuning:
    """Measured on an H200 (docs/performance.md): as many tiles in flight as shared memory holds. rows: of a tile."""
    if dim > 64:
        if rows > 16:
            return Tuning()
        return Tuning(programs=3) if sparse else Tuning(stages=3)
    return Tuning(programs=4) if sparse else Tuning(stages=3, programs=3)


def pinned_tuning(dim: int) -> Tuning:
    """Results that depend on nothing else in the batch, as long as `max_queries` is the same."""
    return replace(default_tuning(dim, False, MAX_ROWS), segment=32)


def _row_tiles(max_queries: int, group: int) -> tuple[int, int]:
    """Queries of one tile of rows, and how many such tiles cover `max_queries`."""
    queries = min(max_queries, max(1, MAX_ROWS // group))
    return queries, -(-max_queries // queries)


def _triton_paged_attention(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    blocks: BlockLists | None,
    means: GroupMeans | None,
    max_queries: int,
    work: Work | None,
    emit_block_size: int = 0,
    tuning: Tuning | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, and if blocks of `emit_block_size` tokens emit: log2 of each row's weight on them and in all.

    The rows of these are [items * queries of a tile * group], as `_partial_attention_kernel` numbers them.
    """
    heads, dim = queries.shape[1:]
    kv_heads, page_size = k_pages.shape[1:3]
    group = heads // kv_heads
    work = work or plan_work(
        kv_heads, group, dim, max_queries, block_tables, kv_lengths, page_size, blocks, means, tuning
    )
    tuning = work.tuning
    tile_queries, row_tiles = _row_tiles(max_queries, group)
    items = len(kv_lengths) * kv_heads * row_tiles
    programs = len(work.first_items)
    rows = tile_queries * group
    device = queries.device
    out = torch.empty_like(queries)
    slots = programs + items
    partial = torch.empty(slots * rows, dim, dtype=torch.float32, device=device)
    partial_max, partial_sum = torch.empty(2, slots * rows, dtype=torch.float32, device=device)
    block_sums = log_sums = None
    if emit_block_size:
        listed = (
            block_tables.shape[1] * page_size // emit_block_size + 1
            if blocks is None
            else blocks.lists.shape[2]
        )
        block_sums = torch.empty(items * rows, max(1, listed), dtype=torch.float32, device=device)
        log_sums = torch.empty(items * rows, dtype=torch.float32, device=device)
    block_size = emit_block_size or (1 if blocks is None else blocks.block_size)
    nothing = kv_lengths  # stands where a pointer is wanted and not used
    _partial_attention_kernel[(programs,)](
        queries,
        k_pages,
        v_pages,
        block_tables,
        kv_lengths,
        query_starts,
        nothing if blocks is None else blocks.lists,
        nothing if blocks is None else blocks.counts,
        nothing if work.pieces is None else work.pieces,
        work.tile_starts,
        work.first_items,
        nothing if means is None else means.k,
        nothing if means is None else means.v,
        nothing if means is None else means.k_variance,
        nothing if means is None else means.tables,
        nothing if means is None else means.counts,
        nothing if work.unread is None else work.unread,
        partial,
        partial_max,
        partial_sum,
        partial_max if block_sums is None else block_sums,
        scale * LOG2_E,
        items,
        block_tables.shape[1],
        0 if blocks is None else blocks.lists.shape[2],
        0 if means is None else max(1, means.tables.shape[1]),
        0 if block_sums is None else block_sums.shape[1],
        HEADS=heads,
        KV_HEADS=kv_heads,
        row_tiles=row_tiles,
        QUERIES=tile_queries,
        ROWS=max(16, power_of_two(rows)),
        DIM=dim,
        PAGE=page_size,
        BLOCK=block_size,
        PIECE=min(block_size, page_size),
        TILE=tuning.tile,
        GROUP_TILE=GROUP_TILE,
        MIN_TILES=tuning.segment or tuning.min_tiles,
        STAGES=tuning.stages,
        SPARSE=blocks is not None,
        MEANS=means is not None,
        EMIT=bool(emit_block_size),
        SPREAD=bool(emit_block_size) and 8 <= block_size <= tuning.tile // 4,
        MAX_VARIANCE=MAX_VARIANCE_TERM,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=tuning.warps,
        **overlapping_launch(device),
    )
    splits = 16 if tuning.segment else min(64, max(8, power_of_two(programs // items + 2)))
    _merge_kernel[(items, rows)](
        partial,
        partial_max,
        partial_sum,
        work.tile_starts,
        query_starts,
        out,
        partial_max if log_sums is None else log_sums,
        items,
        programs,
        HEADS=heads,
        KV_HEADS=kv_heads,
        row_tiles=row_tiles,
        QUERIES=tile_queries,
        SPLITS=splits,
        DIM=dim,
        MIN_TILES=tuning.segment or tuning.min_tiles,
        EMIT=log_sums is not None,
        num_warps=1 if splits <= 16 else 4,  # a lane then holds all splits of its columns
        **overlapping_launch(device),
    )
    return out, block_sums, log_sums


def _triton_read_weights(
    queries: Tensor,
    query_starts: Tensor,
    blocks: BlockLists,
    max_queries: int,
    sums: Tensor,
    log_sums: Tensor,
    weights: Tensor | None,
) -> Tensor:
    sequences, kv_heads, width = blocks.lists.shape
    tile_queries, row_tiles = _row_tiles(max_queries, queries.shape[1] // kv_heads)
    if weights is None:
        weights = torch.empty(sequences, kv_heads, width, dtype=torch.float32, device=queries.device)
    if width:
        _read_weights_kernel[(sequences * kv_heads, -(-width // 256))](
            sums,
            log_sums,
            blocks.counts,
            query_starts,
            weights,
            width,
            sums.shape[1],
            HEADS=queries.shape[1],
            KV_HEADS=kv_heads,
            row_tiles=row_tiles,
            QUERIES=tile_queries,
            CHUNK=256,
        )
    return weights


def triton_block_weights(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    block_size: int,
    emitting: int,
    max_queries: int,
    width: int,
    work: Work | None = None,
) -> tuple[Tensor, Tensor]:
    """The Triton half of `kernels.block_weights`: dense attention, and weights [sequences, emitting, heads, width]."""
    out, sums, log_sums = _triton_paged_attention(
        queries,
        k_pages,
        v_pages,
        block_tables,
        kv_lengths,
        query_starts,
        scale,
        None,
        None,
        max_queries,
        work,
        block_size,
    )
    assert sums is not None and log_sums is not None
    sequences, heads, kv_heads = len(kv_lengths), queries.shape[1], k_pages.shape[1]
    tile_queries, row_tiles = _row_tiles(max_queries, heads // kv_heads)
    weights = torch.empty(sequences, emitting, heads, width, dtype=torch.float32, device=queries.device)
    _block_weights_kernel[(sequences * emitting * heads, -(-width // 1024))](
        sums,
        log_sums,
        kv_lengths,
        query_starts,
        weights,
        width,
        sums.shape[1],
        emitting,
        HEADS=heads,
        KV_HEADS=kv_heads,
        row_tiles=row_tiles,
        QUERIES=tile_queries,
        UNIT=block_size,
        CHUNK=1024,
    )
    return out, weights


def triton_add_listed_weights(
    queries: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    blocks: BlockLists,
    out: Tensor,
    share: float,
    max_queries: int,
    work: Work | None = None,
) -> Tensor:
    """The Triton half of `kernels.block_weights.add_listed_weights`."""
    _check_triton(queries, k_pages, max_queries, blocks.block_size)
    result, sums, log_sums = _triton_paged_attention(
        queries,
        k_pages,
        v_pages,
        block_tables,
        kv_lengths,
        query_starts,
        scale,
        blocks,
        None,
        max_queries,
        work,
        blocks.block_size,
    )
    assert sums is not None and log_sums is not None
    heads, kv_heads = queries.shape[1], k_pages.shape[1]
    width, (tile_queries, row_tiles) = blocks.lists.shape[2], _row_tiles(max_queries, heads // kv_heads)
    _add_listed_weights_kernel[(len(kv_lengths) * heads, -(-width // 1024) or 1)](
        sums,
        log_sums,
        blocks.lists,
        blocks.counts,
        query_starts,
        out,
        width,
        sums.shape[1],
        out.stride(0),
        share,
        out.shape[2],
        HEADS=heads,
        KV_HEADS=kv_heads,
        row_tiles=row_tiles,
        QUERIES=tile_queries,
        CHUNK=1024,
    )
    return result


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter: enough programs for items to be split
        return 10
    return torch.cuda.get_device_properties(device).multi_processor_count
