"""The softmax weights that blocks got: in Triton from the sums that the attention kernel leaves (`BlockSums`)."""

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, follow, jit, overlapping_launch, power_of_two, tl
from specahead.kernels.paged_attention.inputs import Batch, BlockLists, check_batch
from specahead.kernels.paged_attention.launch import BlockSums, attend_in_triton
from specahead.kernels.paged_attention.reference import add_weights_of_last_queries, attend_in_torch
from specahead.kernels.paged_attention.work import Work

MOST_LEFT = 2**28  # bytes that the layers of a pass leave before their weights are added to evidence


class LayersEvidence:
    """Adds the weights that the layers of a pass give blocks to evidence, in Triton many layers in one launch.

    evidence: [sequences, layers, heads, n] float32, its last dimension contiguous
    share: the factor of the mean weight of each sequence's last `emitting` queries; all have as many
    block_size: tokens of a block
    listed: the lists of all layers, with a leading dimension for them, if the pass reads lists
    fresh: whether the evidence is undefined before, and is set; not in a pass that reads lists
    Layers attend in their order. After the last one all weights have been added, and a pass of the same sizes may
    follow.
    """

    def __init__(
        self,
        evidence: Tensor,
        share: float,
        block_size: int,
        emitting: int,
        listed: BlockLists | None,
        fresh: bool = False,
        backend: Backend = "torch",
    ) -> None:
        if fresh and listed is not None:
            raise ValueError("LayersEvidence: a pass that reads lists sets no evidence: give one that holds numbers")
        self._evidence, self._share, self._block_size = evidence, share, block_size
        self._emitting, self._listed, self._fresh, self._backend = emitting, listed, fresh, backend
        self._room: tuple[Tensor, Tensor] | None = None  # of several layers
        self._first = self._left = 0  # the first layer in that room, and how many are in it

    def attend(self, layer: int, batch: Batch, blocks: BlockLists | None, work: Work | None) -> Tensor:
        """Return the output of a layer, as `paged_attention`. blocks: its lists, if it reads lists."""
        check_batch(batch, blocks)
        if self._backend == "torch":
            sums = self._evidence[:, layer]
            if self._fresh:
                sums.zero_()
            add_weights_of_last_queries(batch, blocks, self._block_size, sums, self._share, self._emitting)
            return attend_in_torch(batch, blocks)[0]
        return self._attend_in_triton(layer, batch, blocks, work)

    def _attend_in_triton(self, layer: int, batch: Batch, blocks: BlockLists | None, work: Work | None) -> Tensor:
        out, sums = attend_in_triton(batch, blocks, None, work, self._block_size, self._room_of)
        assert self._room is not None
        layers, room = self._evidence.shape[1], len(self._room[0])
        self._left += 1
        if layer + 1 == layers or self._left == room:
            self._add(batch, sums, layer + 1)
            self._first, self._left = (layer + 1) % layers, 0
        return out

    def _room_of(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Return room for the sums of a layer, [rows, width] and [rows]."""
        if self._room is None:
            layers = max(1, min(self._evidence.shape[1], MOST_LEFT // (4 * rows * max(1, width))))
            device = self._evidence.device
            sums = torch.empty(layers, rows, width, dtype=torch.float32, device=device)
            self._room = sums, torch.empty(layers, rows, dtype=torch.float32, device=device)
        return self._room[0][self._left], self._room[1][self._left]

    def _add(self, batch: Batch, sums: BlockSums, stop: int) -> None:
        """Add the weights of the layers up to, but not including, `stop` that are in the room, or set them."""
        assert self._room is not None
        layers, lengths = slice(self._first, stop), batch.kv_lengths
        out, lists, counts = self._evidence[:, layers], lengths, lengths
        if self._listed is not None:
            lists, counts = self._listed.lists[layers], self._listed.counts[layers]
        (sequences, count, heads, n), of_blocks = out.shape, self._room[0]
        width = n if self._listed is None else lists.shape[-1]
        chunk = min(1024, max(128, power_of_two(width)))
        _query_weights_kernel[(sequences * heads, -(-width // chunk) or 1, count)](
            block_sums_ptr=of_blocks,
            log_sums_ptr=self._room[1],
            lengths_ptr=lengths,
            lists_ptr=lists,
            counts_ptr=counts,
            starts_ptr=batch.query_starts,
            out_ptr=out,
            width=width,
            block_sums_stride=of_blocks.shape[-1],
            emitting=self._emitting,
            out_stride=out.stride(0),
            layer_stride=out.stride(1),
            head_stride=out.stride(2),
            share=self._share / self._emitting,
            sequences=sequences,
            sums_rows=of_blocks.shape[1],
            **sums.layout,
            UNIT=sums.block_size,
            LISTED=self._listed is not None,
            STORED=self._fresh,
            CHUNK=chunk,
            num_warps=max(1, chunk // 256),
            **overlapping_launch(out.device),
        )


def weights_of_listed(batch: Batch, sums: BlockSums, blocks: BlockLists, weights: Tensor | None = None) -> Tensor:
    """Return [sequences, kv_heads, width] float32, as `paged_attention_with_read_weights` describes it.

    weights: where to put them, contiguous; None: a new tensor
    """
    sequences, kv_heads, width = blocks.lists.shape
    if weights is None:
        weights = torch.empty(sequences, kv_heads, width, dtype=torch.float32, device=batch.queries.device)
    if width:
        _weigh_heads(batch, sums, blocks.counts, 0, weights, None, 0.0)
    return weights


def remember_weights_of_all(batch: Batch, sums: BlockSums, memory: Tensor, places: Tensor, decay: float) -> None:
    """Remember the weights of all blocks, as `paged_attention_remembering` describes it."""
    _weigh_heads(batch, sums, batch.kv_lengths, sums.block_size, memory, places, decay)


def _weigh_heads(
    batch: Batch, sums: BlockSums, counts: Tensor, unit: int, out: Tensor, places: Tensor | None, decay: float
) -> None:
    """Store what each KV head's queries weigh blocks, or raise remembered weights to it."""
    kv_heads, n = out.shape[1:]
    _head_weights_kernel[(len(batch.kv_lengths) * kv_heads, -(-n // 256))](
        block_sums_ptr=sums.blocks,
        log_sums_ptr=sums.total,
        counts_ptr=counts,
        starts_ptr=batch.query_starts,
        places_ptr=places,
        memory_ptr=out,
        n=n,
        block_sums_stride=sums.blocks.shape[1],
        place_stride=out.stride(0),
        head_stride=out.stride(1),
        decay=decay,
        **sums.layout,
        UNIT=unit,
        CHUNK=256,
        **overlapping_launch(out.device),
    )


@jit
def _row_of(item, query, head, QUERIES: tl.constexpr, GROUP: tl.constexpr):
    """Return a query head's row of `BlockSums`. item: the first of its sequence and KV head; head: within the group."""
    return (item + query // QUERIES) * QUERIES * GROUP + (query % QUERIES) * GROUP + head


@jit
def _query_weights_kernel(
    block_sums_ptr,
    log_sums_ptr,
    lengths_ptr,
    lists_ptr,
    counts_ptr,
    starts_ptr,
    out_ptr,
    width: tl.constexpr,
    block_sums_stride: tl.constexpr,
    emitting: tl.constexpr,
    out_stride,
    layer_stride,
    head_stride,
    share,
    sequences,
    sums_rows,
    row_tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    UNIT: tl.constexpr,
    LISTED: tl.constexpr,
    STORED: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weigh blocks of UNIT tokens, or of lists, by one head of the last `emitting` queries in one layer, times `share`,
    into out [sequences, layers, heads, n].

    STORED: weights are stored, for all blocks; else they are added.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = row % HEADS
    sequence = row // HEADS
    first = tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence) - emitting
    list_row = sequence * KV_HEADS + head // GROUP
    of_lists = layer * sequences * KV_HEADS + list_row
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if LISTED:
        inside = place < tl.load(counts_ptr + of_lists)
        block = tl.load(lists_ptr + of_lists * width + place, mask=inside, other=0)
    else:
        inside = place < tl.cdiv(tl.load(lengths_ptr + sequence), UNIT)
        block = place
    target = out_ptr + sequence.to(tl.int64) * out_stride + layer * layer_stride + head * head_stride + block
    weights = tl.zeros([CHUNK], tl.float32)
    follow(PDL)
    for index in tl.static_range(emitting):
        query = tl.maximum(first + index, 0)  # an empty place of a batch has none
        at = layer * sums_rows + _row_of(list_row * row_tiles, query, head % GROUP, QUERIES, GROUP)
        sums = tl.load(block_sums_ptr + at * block_sums_stride + place, mask=inside, other=-float("inf"))
        weights += tl.exp2(sums - tl.load(log_sums_ptr + at))
    weights = share * weights
    if STORED:
        tl.store(target, tl.where(inside, weights, 0.0), mask=place < width)
    else:
        tl.store(target, tl.load(target, mask=inside, other=0.0) + weights, mask=inside)


@jit
def _head_weights_kernel(
    block_sums_ptr,
    log_sums_ptr,
    counts_ptr,
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
    PDL: tl.constexpr,
):
    """Weigh blocks by a KV head's queries: summed over its query heads, mean over queries; 0 after the last block.

    memory: [places, kv_heads, n]
    counts: blocks [sequences, kv_heads] where UNIT is 0; else tokens [sequences], in blocks of UNIT
    places: [sequences], where in the memory the weights of each sequence fade and are raised to the new ones, nowhere
        if negative; None: the new ones are stored, in the order of sequences
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS_AT_ONCE: tl.constexpr = 16  # one by one, each row's sums would wait for those of the row before
    list_row = tl.program_id(0)
    sequence = list_row // KV_HEADS
    block = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    blocks = tl.cdiv(tl.load(counts_ptr + sequence), UNIT) if UNIT else tl.load(counts_ptr + list_row)
    place = sequence if places_ptr is None else tl.load(places_ptr + sequence)
    follow(PDL)
    if place < 0:
        return
    inside = block < blocks
    queries = tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence)
    weights = tl.zeros([CHUNK], tl.float32)
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
    weights = tl.where(inside, weights / tl.maximum(queries, 1), 0.0)
    at = memory_ptr + place.to(tl.int64) * place_stride + list_row % KV_HEADS * head_stride + block
    if places_ptr is not None:
        weights = tl.maximum(tl.load(at, mask=inside, other=0.0) * decay, weights)
    tl.store(at, weights, mask=block < n)
