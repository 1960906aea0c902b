"""From the sums that the attention kernel leaves (`BlockSums`) to the weights that blocks got, in Triton."""

import torch
from torch import Tensor

from kernels.backends import follow, jit, overlapping_launch, tl
from kernels.paged_attention.inputs import Batch, BlockLists
from kernels.paged_attention.launch import BlockSums


def weigh_last_queries(
    batch: Batch, sums: BlockSums, out: Tensor, emitting: int = 1, blocks: BlockLists | None = None, share: float = 1.0
) -> None:
    """Write the weights of each sequence's last queries on all blocks to `out` [sequences, emitting, heads, width].

    With lists: add `share` of their mean weight on each listed block to `out` [sequences, heads, n]. `out` is float32,
    its last dimension contiguous.
    """
    lengths = batch.kv_lengths  # also for lists, where there are none, just so that something is given
    listed = (lengths, lengths) if blocks is None else (blocks.lists, blocks.counts)
    width = out.shape[-1] if blocks is None else blocks.lists.shape[2]
    rows = len(lengths) * batch.heads * (emitting if blocks is None else 1)
    _query_weights_kernel[(rows, -(-width // 1024) or 1)](
        *(sums.blocks, sums.total, *listed, batch.query_starts, out),
        *(width, sums.blocks.shape[1], emitting, out.stride(0), share / emitting, out.shape[-1]),
        **sums.layout,
        UNIT=sums.block_size,
        LISTED=blocks is not None,
        CHUNK=1024,
        **overlapping_launch(out.device),
    )


def weights_of_listed(batch: Batch, sums: BlockSums, blocks: BlockLists, weights: Tensor | None = None) -> Tensor:
    """Return [sequences, kv_heads, width] float32, as `paged_attention_with_read_weights` describes it.

    weights: where to put them, if given.
    """
    sequences, kv_heads, width = blocks.lists.shape
    if weights is None:
        weights = torch.empty(sequences, kv_heads, width, dtype=torch.float32, device=batch.queries.device)
    if width:
        _read_weights_kernel[(sequences * kv_heads, -(-width // 256))](
            *(sums.blocks, sums.total, blocks.counts, batch.query_starts, weights),
            *(width, sums.blocks.shape[1]),
            **sums.layout,
            CHUNK=256,
            **overlapping_launch(weights.device),
        )
    return weights


def remember_weights_of_all(batch: Batch, sums: BlockSums, memory: Tensor, places: Tensor, decay: float) -> None:
    """Remember the weights of all blocks, as `paged_attention_remembering` describes it."""
    sequences, kv_heads, n = len(batch.kv_lengths), batch.kv_heads, memory.shape[2]
    _remember_kernel[(sequences * kv_heads, -(-n // 256))](
        *(sums.blocks, sums.total, batch.kv_lengths, batch.query_starts, places, memory),
        *(n, sums.blocks.shape[1], memory.stride(0), memory.stride(1), decay),
        **sums.layout,
        UNIT=sums.block_size,
        CHUNK=256,
    )


@jit
def _row_of(item, query, head, QUERIES: tl.constexpr, GROUP: tl.constexpr):
    """The row of `BlockSums` of a query's head; item: the first of its sequence and KV head, head: within the group."""
    return (item + query // QUERIES) * QUERIES * GROUP + (query % QUERIES) * GROUP + head


@jit
def _query_weights_kernel(
    block_sums_ptr,
    log_sums_ptr,
    lists_ptr,
    counts_ptr,
    starts_ptr,
    out_ptr,
    width: tl.constexpr,
    block_sums_stride: tl.constexpr,
    emitting: tl.constexpr,
    out_stride,
    share,
    n: tl.constexpr,
    row_tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    LISTED: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weights of one head of the last `emitting` queries.

    Dense: those of one query, stored to out [sequences, emitting, heads, n]; counts: tokens, UNIT a block.
    LISTED: `share` of those of all, added to out [sequences, heads, n]; counts: blocks of a list.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOGETHER: tl.constexpr = emitting if LISTED else 1
    row = tl.program_id(0)
    head = row % HEADS
    sequence = row // (HEADS * (emitting // TOGETHER))
    first = tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence) - emitting
    if not LISTED:
        first += row // HEADS % emitting
    list_row = sequence * KV_HEADS + head // GROUP
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = place < (tl.load(counts_ptr + list_row) if LISTED else tl.cdiv(tl.load(counts_ptr + sequence), UNIT))
    weights = tl.zeros([CHUNK], tl.float32)
    follow(PDL)
    for index in tl.static_range(TOGETHER):
        query = tl.maximum(first + index, 0)  # an empty place of a batch has none
        at = _row_of(list_row * row_tiles, query, head % GROUP, QUERIES, GROUP)
        sums = tl.load(block_sums_ptr + at.to(tl.int64) * block_sums_stride + place, mask=inside, other=-float("inf"))
        weights += tl.exp2(sums - tl.load(log_sums_ptr + at))
    if LISTED:
        block = tl.load(lists_ptr + list_row * width + place, mask=inside, other=0)
        target = out_ptr + sequence.to(tl.int64) * out_stride + head * n + block
        before = tl.load(target, mask=inside, other=0.0)
        tl.store(target, before + share * weights, mask=inside)
    else:
        tl.store(out_ptr + row.to(tl.int64) * n + place, tl.where(inside, weights, 0.0), mask=place < n)


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
    PDL: tl.constexpr,
):
    """Listed blocks: out [sequences, kv_heads, width], summed over a KV head's heads, mean over the queries."""
    list_row = tl.program_id(0)
    block = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = block < tl.load(counts_ptr + list_row)
    sums = (block_sums_ptr, log_sums_ptr, starts_ptr)
    follow(PDL)
    weights = _mean_weights(sums, list_row, block, inside, block_sums_stride, row_tiles, HEADS, KV_HEADS, QUERIES)
    tl.store(out_ptr + list_row.to(tl.int64) * width + block, weights, mask=block < width)


@jit
def _remember_kernel(
    block_sums_ptr,
    log_sums_ptr,
    lengths_ptr,
    starts_ptr,
    places_ptr,
    memory_ptr,
    n: tl.constexpr,
    block_sums_stride: tl.constexpr,
    place_stride,
    head_stride,
    decay,
    row_tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """All blocks: memory [places, kv_heads, n], faded and raised to what the queries weigh now."""
    list_row = tl.program_id(0)
    sequence = list_row // KV_HEADS
    place = tl.load(places_ptr + sequence)
    if place < 0:
        return
    block = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = block < tl.cdiv(tl.load(lengths_ptr + sequence), UNIT)
    sums = (block_sums_ptr, log_sums_ptr, starts_ptr)
    weights = _mean_weights(sums, list_row, block, inside, block_sums_stride, row_tiles, HEADS, KV_HEADS, QUERIES)
    at = memory_ptr + place.to(tl.int64) * place_stride + list_row % KV_HEADS * head_stride + block
    faded = tl.load(at, mask=inside, other=0.0) * decay
    tl.store(at, tl.maximum(faded, weights), mask=block < n)


@jit
def _mean_weights(
    sums,
    list_row,
    block,
    inside,
    block_sums_stride: tl.constexpr,
    row_tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """The weights that a KV head's heads give to blocks, summed, mean over the queries; 0 where not `inside`.

    sums: log2 of the weights of rows on blocks and in all, and the first query row of each sequence.
    """
    block_sums_ptr, log_sums_ptr, starts_ptr = sums
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS_AT_ONCE: tl.constexpr = 16  # one by one, each row's sums would wait for those of the row before
    sequence = list_row // KV_HEADS
    queries = tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence)
    weights = tl.zeros(block.shape, tl.float32)
    rows = tl.where(tl.max(inside.to(tl.int32), 0) > 0, queries * GROUP, 0)
    for first in tl.range(0, rows, ROWS_AT_ONCE):
        row = first + tl.arange(0, ROWS_AT_ONCE)
        there = row < rows
        at = _row_of(list_row * row_tiles, row // GROUP, row % GROUP, QUERIES, GROUP)
        of_rows = tl.load(
            block_sums_ptr + at.to(tl.int64)[:, None] * block_sums_stride + block[None, :],
            mask=there[:, None] & inside[None, :],
            other=-float("inf"),
        )
        log_sums = tl.load(log_sums_ptr + at, mask=there, other=0.0)
        weights += tl.sum(tl.exp2(of_rows - log_sums[:, None]), 0)
    return tl.where(inside, weights / tl.maximum(queries, 1), 0.0)
