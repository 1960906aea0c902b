"""What comes before and after a read that one budget decides over all layers and heads.

Before: which blocks are read anyway, and the scores of the others. After: remembering the weights that were read. Rows
are (layer, KV head); a group is a sequence.
"""

import torch
from torch import Tensor

from specahead.kernels.backends import check_backend, follow, jit, overlapping_launch, tl

WORD = 64  # bits


def score_blocks(
    words: Tensor,
    memory: Tensor,
    places: Tensor,
    importance: Tensor,
    first: Tensor,
    last: Tensor,
    blocks: Tensor,
    backend: str = "torch",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which blocks are read whatever they score, the scores of the others, and how many are chosen already.

    words: [groups, rows, words] int64, a bit a block, lowest first: chosen already
    memory: [places, rows, n] float32, remembered weights; importance: [rows] float32, a factor of each row
    places: [groups] int32, where in `memory` each group's are; negative for a group without any, all of whose blocks
        are read whatever they score
    first, last, blocks: [groups] int32; of `blocks` those before `first` and from `last` on are read everywhere
    Returns forced [groups, rows, n] uint8, scores [groups, rows, n] float32, 0 where forced and beyond `blocks`, and
    chosen [groups, parts] int32, which add up to the forced blocks from `first` up to, but not including, `last`.
    """
    check_backend("score_blocks", backend)
    groups, (rows, n) = len(places), memory.shape[1:]
    if backend == "torch":
        column = torch.arange(n, device=memory.device)
        bits = words[..., column // WORD] >> (column % WORD) & 1
        outside = (column < first[:, None, None]) | (column >= last[:, None, None])
        inside = column < blocks[:, None, None]
        forced = (bits.bool() | outside) & inside
        own = memory[places.clamp(min=0).long()]
        scores = (own * importance[:, None]).masked_fill(forced | ~inside, 0)
        return forced.to(torch.uint8), scores, (forced & ~outside).sum(2, dtype=torch.int32)
    forced = torch.empty(groups, rows, n, dtype=torch.uint8, device=memory.device)
    scores = torch.empty(groups, rows, n, dtype=torch.float32, device=memory.device)
    chunks = -(-n // 1024)
    chosen = torch.empty(groups, rows * chunks, dtype=torch.int32, device=memory.device)
    _score_blocks_kernel[(groups * rows, chunks)](
        *(words, memory, places, importance, first, last, blocks, forced, scores, chosen),
        *(n, words.shape[2], rows),
        CHUNK=1024,
    )
    return forced, scores, chosen


def room_left(room: Tensor, chosen: Tensor, backend: str = "torch") -> Tensor:
    """Return how many blocks each group may read beside those that are read whatever they score: [groups] int32.

    room: [groups] int32, blocks from `first` up to, but not including, `last` that it may read over all rows; chosen:
    as `score_blocks` returns it, contiguous.
    """
    check_backend("room_left", backend)
    if backend == "torch":
        return (room - chosen.sum(1)).clamp(min=0).int()
    left = torch.empty_like(room)
    _room_left_kernel[(len(room),)](
        *(room, chosen, left, chosen.shape[1]), CHUNK=2048, num_warps=8, **overlapping_launch(room.device)
    )
    return left


def remember_weights(
    memory: Tensor,
    places: Tensor,
    lists: Tensor,
    counts: Tensor,
    weights: Tensor,
    blocks: Tensor,
    decay: float,
    backend: str = "torch",
) -> None:
    """Fade `memory` [places, rows, n] and raise it to the weights that were read, in place; 0 from `blocks` on.

    places: [groups] int32, all different, where each group's memory is; nothing is remembered at a negative one
    lists: [outer, groups, inner, width] int32 blocks, where rows are outer * inner; counts: [outer, groups, inner]
    int32; weights: as lists, float32; blocks: [groups] int32
    """
    check_backend("remember_weights", backend)
    groups, (rows, n) = len(places), memory.shape[1:]
    inner, width = lists.shape[2:]
    if backend == "torch":
        lists, counts, weights = (x.transpose(0, 1).flatten(1, 2) for x in (lists, counts, weights))
        listed = torch.arange(width, device=memory.device) < counts[..., None]
        read = torch.zeros(groups, rows, n + 1, device=memory.device)
        read.scatter_(2, lists.long().where(listed, n), weights.where(listed, 0.0))
        inside = torch.arange(n, device=memory.device) < blocks[:, None, None]
        there = places >= 0
        at = places[there].long()
        memory[at] = torch.maximum(memory[at] * decay, read[there, :, :n]).where(inside[there], 0.0)
        return
    _remember_weights_kernel[(groups * rows,)](
        memory, places, lists, counts, weights, blocks, n, width, rows, decay, INNER=inner, CHUNK=1024
    )


@jit
def _score_blocks_kernel(
    words_ptr,
    memory_ptr,
    places_ptr,
    importance_ptr,
    first_ptr,
    last_ptr,
    blocks_ptr,
    forced_ptr,
    scores_ptr,
    chosen_ptr,
    n: tl.constexpr,
    word_count: tl.constexpr,
    rows: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    group = row // rows
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < n
    there = inside & (column < tl.load(blocks_ptr + group))
    word = tl.load(words_ptr + row.to(tl.int64) * word_count + column // 64, mask=there, other=0)
    bit = (word >> (column % 64).to(tl.int64)) & 1
    outside = (column < tl.load(first_ptr + group)) | (column >= tl.load(last_ptr + group))
    forced = ((bit != 0) | outside) & there
    at = row.to(tl.int64) * n + column
    place = tl.maximum(tl.load(places_ptr + group), 0).to(tl.int64)  # of a group without any, no score counts
    own = (place * rows + row % rows) * n + column
    score = tl.load(memory_ptr + own, mask=there, other=0.0) * tl.load(importance_ptr + row % rows)
    tl.store(forced_ptr + at, forced.to(tl.uint8), mask=inside)
    tl.store(scores_ptr + at, tl.where(forced | (column >= tl.load(blocks_ptr + group)), 0.0, score), mask=inside)
    chosen = tl.sum((forced & ~outside).to(tl.int32), 0)
    tl.store(chosen_ptr + row * tl.num_programs(1) + tl.program_id(1), chosen)


@jit
def _room_left_kernel(room_ptr, chosen_ptr, left_ptr, parts, CHUNK: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    group = tl.program_id(0)
    chosen = tl.zeros([CHUNK], tl.int32)
    for start in tl.range(0, parts, CHUNK):
        part = start + tl.arange(0, CHUNK)
        chosen += tl.load(chosen_ptr + group.to(tl.int64) * parts + part, mask=part < parts, other=0)
    tl.store(left_ptr + group, tl.maximum(tl.load(room_ptr + group) - tl.sum(chosen, 0), 0))


@jit
def _remember_weights_kernel(
    memory_ptr,
    places_ptr,
    lists_ptr,
    counts_ptr,
    weights_ptr,
    blocks_ptr,
    n: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    decay,
    INNER: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a row: fade it, then raise the listed blocks. The barrier stands between the two."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.num_programs(0) // rows
    listed_row = (row % rows // INNER * groups + row // rows) * INNER + row % INNER
    blocks = tl.load(blocks_ptr + row // rows)
    count = tl.load(counts_ptr + listed_row)
    place = tl.load(places_ptr + row // rows).to(tl.int64)
    if place < 0:
        return
    memory_ptr += (place * rows + row % rows) * n
    for start in tl.range(0, n, CHUNK):
        column = start + tl.arange(0, CHUNK)
        at = memory_ptr + column
        faded = tl.load(at, mask=column < n, other=0.0) * decay
        tl.store(at, tl.where(column < blocks, faded, 0.0), mask=column < n)
    tl.debug_barrier()
    for start in tl.range(0, count, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        listed = entry < count
        block = tl.load(lists_ptr + listed_row * width + entry, mask=listed, other=0)
        weight = tl.load(weights_ptr + listed_row * width + entry, mask=listed, other=0.0)
        at = memory_ptr + block
        listed = listed & (block < blocks)
        tl.store(at, tl.maximum(tl.load(at, mask=listed, other=0.0), weight), mask=listed)
