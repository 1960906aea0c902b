"""What passes of a draft read by weights of its own: scores of all blocks, and what stays known of those left out.

A draft whose first pass is not dense reads what an earlier one weighed most; evidence then holds the old weights of
what it does not read, and the new ones of what it does.
"""

import torch
from torch import Tensor

from specahead.kernels.backends import check_backend, follow, jit, overlapping_launch, power_of_two, tl


def score_own_blocks(
    weights: Tensor,
    places: Tensor | None,
    known: Tensor | None,
    lengths: Tensor,
    ends: Tensor,
    sizes: tuple[int, int, int, int],
    kept: tuple[int, int],
    share: float,
    backend: str = "torch",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores [layers * sequences * kv_heads, blocks] float32, and of each row how many blocks there are, and how
    many are read, int32 both. A score is the sum over a KV head's heads, infinity where a block is read anyway: the
    first ones, the newest ones, and those that nobody has weighed.

    weights: [places, layers * heads, at least blocks] float32, contiguous; places: [sequences] int64, where each
        sequence's are; None: a place is a sequence
    known: [sequences] int32, tokens that the weights are of; None: all that there are
    lengths: [sequences] int32, tokens before the passes, 0 of an empty place of a batch; ends: behind them
    sizes: layers, KV heads, blocks, tokens of a block; kept: how many of the first and of the newest blocks are read
    share: of the blocks that is read, at least what is read anyway
    """
    check_backend("score_own_blocks", backend)
    layers, kv_heads, blocks, block_size = sizes
    sequences, rows = len(lengths), layers * len(lengths) * kv_heads
    if backend == "torch":
        own = weights if places is None else weights.index_select(0, places)
        scores = own[..., :blocks].view(sequences, layers, kv_heads, -1, blocks).sum(3).transpose(0, 1)
        recent = -(-lengths // block_size) - kept[1]
        if known is not None:
            recent = torch.minimum(recent, known // block_size)
        column = torch.arange(blocks, device=weights.device)
        always = (column < kept[0]) | (column >= recent[:, None])
        valid = (-(-ends // block_size)).where(lengths > 0, 0)
        forced = (always & (column < valid[:, None])).sum(1)
        count = torch.maximum((valid * share).int(), forced)
        valid, count = (each.int()[None, :, None].expand(layers, -1, kv_heads).flatten() for each in (valid, count))
        return scores.masked_fill(always[:, None], torch.inf).reshape(rows, blocks), valid, count
    scores = torch.empty(rows, blocks, dtype=torch.float32, device=weights.device)
    valid, count = torch.empty(2, rows, dtype=torch.int32, device=weights.device)
    _score_own_blocks_kernel[(rows, -(-blocks // 1024))](
        *(weights, places, known, lengths, ends, scores, valid, count, sequences, blocks, weights.shape[2]),
        *(*kept, share),
        GROUP=weights.shape[1] // (layers * kv_heads),
        KV_HEADS=kv_heads,
        LAYERS=layers,
        BLOCK=block_size,
        CHUNK=1024,
        **overlapping_launch(weights.device),
    )
    return scores, valid, count


def keep_unread(
    memory: Tensor,
    places: Tensor,
    known: Tensor,
    lists: Tensor,
    counts: Tensor,
    blocks: int,
    block_size: int,
    backend: str = "torch",
) -> Tensor:
    """Return the remembered weights of blocks that no list names, 0 elsewhere: [sequences, layers, heads, blocks].

    memory, places, known: as weights of `score_own_blocks`; what lies beyond `known` may be of tokens that were taken
        back, or of another session
    lists: [layers, sequences, kv_heads, width] int32 blocks, of which counts [layers, sequences, kv_heads] int32 count
    """
    check_backend("keep_unread", backend)
    layers, sequences, kv_heads, width = lists.shape
    heads = memory.shape[1] // layers
    if backend == "torch":
        column = torch.arange(blocks, device=memory.device)
        kept = memory.index_select(0, places)[..., :blocks].view(sequences, layers, kv_heads, -1, blocks)
        kept = kept.masked_fill((column >= known[:, None] // block_size)[:, None, None, None], 0)
        valid = torch.arange(width, device=lists.device) < counts[..., None]
        times = torch.zeros(*counts.shape, blocks, dtype=torch.int32, device=lists.device)
        times.scatter_add_(-1, lists.where(valid, 0).long(), valid.to(times.dtype))
        return (kept * (times == 0).transpose(0, 1)[:, :, :, None]).flatten(2, 3)
    out = torch.empty(sequences, layers, heads, blocks, dtype=torch.float32, device=memory.device)
    _copy_known_kernel[(sequences * layers * heads, -(-blocks // 2048))](
        *(memory, places, known, out, blocks, memory.shape[2]), HEADS=layers * heads, BLOCK=block_size, CHUNK=2048
    )
    _zero_listed_kernel[(layers * sequences * kv_heads,)](
        *(lists, counts, out, sequences, blocks, width),
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        LAYERS=layers,
        CHUNK=512,
    )
    return out


def count_reads(
    first: Tensor | None, lengths: Tensor, later: Tensor, passes: int, block_size: int, backend: str = "torch"
) -> Tensor:
    """Return how many blocks are read of each sequence, over the layers and KV heads of all passes: [sequences] int64.

    first, later: [layers, sequences, kv_heads] int32 blocks that the first pass reads, contiguous, and each of the
        `passes` behind it; first may be None: all that lengths [sequences] int32, tokens, have
    """
    check_backend("count_reads", backend)
    layers, sequences, kv_heads = later.shape
    if backend == "torch":
        everything = -(-lengths.long() // block_size) * (layers * kv_heads)
        return (everything if first is None else first.sum((0, 2))) + passes * later.sum((0, 2))
    out = torch.empty(sequences, dtype=torch.int64, device=later.device)
    _count_reads_kernel[(sequences,)](
        *(first, lengths, later, out, passes, sequences),
        KV_HEADS=kv_heads,
        LAYERS=layers,
        BLOCK=block_size,
        LISTS=power_of_two(layers * kv_heads),
    )
    return out


@jit
def _score_own_blocks_kernel(
    weights_ptr,
    places_ptr,
    known_ptr,
    lengths_ptr,
    ends_ptr,
    scores_ptr,
    valid_ptr,
    count_ptr,
    sequences,
    blocks,
    stride,
    first,
    newest,
    share,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A chunk of one row; its first program says how many blocks there are, and how many are read."""
    follow(PDL)
    row = tl.program_id(0)
    kv_head, sequence, layer = row % KV_HEADS, row // KV_HEADS % sequences, row // (KV_HEADS * sequences)
    place = sequence.to(tl.int64)
    if places_ptr is not None:
        place = tl.load(places_ptr + sequence)
    length = tl.load(lengths_ptr + sequence)
    recent = tl.cdiv(length, BLOCK) - newest
    if known_ptr is not None:
        recent = tl.minimum(recent, tl.load(known_ptr + sequence) // BLOCK)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < blocks
    always = (column < first) | (column >= recent)
    at = (place * LAYERS + layer) * KV_HEADS * GROUP + kv_head * GROUP
    score = tl.zeros([CHUNK], tl.float32)
    for head in tl.static_range(GROUP):
        score += tl.load(weights_ptr + (at + head) * stride + column, mask=inside & ~always, other=0.0)
    score = tl.where(always, float("inf"), score)
    tl.store(scores_ptr + row.to(tl.int64) * blocks + column, score, mask=inside)
    if tl.program_id(1) == 0:
        valid = tl.where(length > 0, tl.cdiv(tl.load(ends_ptr + sequence), BLOCK), 0)
        chosen = tl.maximum(tl.minimum(recent, valid) - tl.minimum(first, valid), 0)
        tl.store(valid_ptr + row, valid)
        tl.store(count_ptr + row, tl.maximum((valid.to(tl.float32) * share).to(tl.int32), valid - chosen))


@jit
def _copy_known_kernel(
    memory_ptr,
    places_ptr,
    known_ptr,
    out_ptr,
    blocks,
    stride,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The weights of one head of one layer and sequence; HEADS: of all layers."""
    row = tl.program_id(0).to(tl.int64)
    sequence = row // HEADS
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    known = tl.load(known_ptr + sequence) // BLOCK
    source = (tl.load(places_ptr + sequence) * HEADS + row % HEADS) * stride + column
    weights = tl.load(memory_ptr + source, mask=(column < blocks) & (column < known), other=0.0)
    tl.store(out_ptr + row * blocks + column, weights, mask=column < blocks)


@jit
def _zero_listed_kernel(
    lists_ptr,
    counts_ptr,
    out_ptr,
    sequences,
    blocks,
    width,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """What one list names, of all heads of its KV head."""
    row = tl.program_id(0)
    kv_head, sequence, layer = row % KV_HEADS, row // KV_HEADS % sequences, row // (KV_HEADS * sequences)
    at = out_ptr + ((sequence * LAYERS + layer) * KV_HEADS + kv_head).to(tl.int64) * GROUP * blocks
    count = tl.load(counts_ptr + row)
    for start in tl.range(0, count, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        block = tl.load(lists_ptr + row.to(tl.int64) * width + entry, mask=entry < count, other=0)
        for head in tl.static_range(GROUP):
            tl.store(at + head * blocks + block, tl.zeros([CHUNK], tl.float32), mask=entry < count)


@jit
def _count_reads_kernel(
    first_ptr,
    lengths_ptr,
    later_ptr,
    out_ptr,
    passes,
    sequences,
    KV_HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTS: tl.constexpr,
):
    """All lists of one sequence."""
    sequence = tl.program_id(0)
    row = tl.arange(0, LISTS)
    at = (row // KV_HEADS * sequences + sequence) * KV_HEADS + row % KV_HEADS
    inside = row < LAYERS * KV_HEADS
    read = tl.sum(tl.load(later_ptr + at, mask=inside, other=0).to(tl.int64), 0) * passes
    if first_ptr is None:
        read += tl.cdiv(tl.load(lengths_ptr + sequence).to(tl.int64), BLOCK) * (LAYERS * KV_HEADS)
    else:
        read += tl.sum(tl.load(first_ptr + at, mask=inside, other=0).to(tl.int64), 0)
    tl.store(out_ptr + sequence, read)
