"""From the sums that the attention kernel leaves (`BlockSums`) to the weights that blocks got, in Triton."""

import torch
from torch import Tensor

from kernels.backends import jit, tl
from kernels.paged_attention.inputs import Batch, BlockLists
from kernels.paged_attention.launch import BlockSums


def weights_of_last_queries(batch: Batch, sums: BlockSums, block_size: int, emitting: int, width: int) -> Tensor:
    """Return the weights of each sequence's last queries on all blocks: [sequences, emitting, heads, width] float32."""
    shape = (len(batch.kv_lengths), emitting, batch.heads, width)
    weights = torch.empty(shape, dtype=torch.float32, device=batch.queries.device)
    _block_weights_kernel[(len(batch.kv_lengths) * emitting * batch.heads, -(-width // 1024))](
        *(sums.blocks, sums.total, batch.kv_lengths, batch.query_starts, weights),
        *(width, sums.blocks.shape[1], emitting),
        **sums.layout,
        UNIT=block_size,
        CHUNK=1024,
    )
    return weights


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
        )
    return weights


def add_weights_of_listed(
    batch: Batch, sums: BlockSums, blocks: BlockLists, out: Tensor, share: float, emitting: int = 1
) -> None:
    """Add `share` of the last queries' mean weight on each listed block to `out` [sequences, heads, n], in place."""
    width = blocks.lists.shape[2]
    _add_listed_weights_kernel[(len(batch.kv_lengths) * batch.heads, -(-width // 1024) or 1)](
        *(sums.blocks, sums.total, blocks.lists, blocks.counts, batch.query_starts, out),
        *(width, sums.blocks.shape[1], out.stride(0), share / emitting, out.shape[2]),
        **sums.layout,
        EMITTING=emitting,
        CHUNK=1024,
    )


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
    sums = tl.load(block_sums_ptr + at.to(tl.int64) * block_sums_stride + block, mask=inside, other=-float("inf"))
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
    EMITTING: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`share` of each last query's weights on listed blocks to out [sequences, heads, n], a sequence's head a row."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0) % HEADS
    sequence = tl.program_id(0) // HEADS
    list_row = sequence * KV_HEADS + head // GROUP
    first = tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence) - EMITTING
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = place < tl.load(counts_ptr + list_row)
    weights = tl.zeros([CHUNK], tl.float32)
    for i in tl.static_range(EMITTING):
        query = tl.maximum(first + i, 0)
        at = (list_row * row_tiles + query // QUERIES) * QUERIES * GROUP + (query % QUERIES) * GROUP + head % GROUP
        sums = tl.load(block_sums_ptr + at.to(tl.int64) * block_sums_stride + place, mask=inside, other=-float("inf"))
        weights += tl.exp2(sums - tl.load(log_sums_ptr + at))
    block = tl.load(lists_ptr + list_row * width + place, mask=inside, other=0)
    target = out_ptr + sequence.to(tl.int64) * out_stride + head * n + block
    before = tl.load(target, mask=inside, other=0.0)
    tl.store(target, before + share * weights, mask=inside)


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
        at = (list_row * row_tiles + query // QUERIES) * QUERIES * GROUP + (query % QUERIES) * GROUP + row % GROUP
        sums = tl.load(block_sums_ptr + at.to(tl.int64) * block_sums_stride + block, mask=inside, other=-float("inf"))
        weights += tl.exp2(sums - tl.load(log_sums_ptr + at))
    weights = weights / tl.maximum(queries, 1)
    tl.store(out_ptr + list_row.to(tl.int64) * width + block, tl.where(inside, weights, 0.0), mask=block < width)
