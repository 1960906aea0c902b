"""What the target remembers of its own attention: the weights of blocks, and the scores that follow from them.

Rows are (layer, KV head), a group is a sequence. Before a read the scores of blocks are made, and which blocks are read
whatever they score; after it the weights of the blocks that were read are remembered.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, jit, tl

WORD = 64  # bits
_CHUNK = 1024  # blocks that a program takes at once


class Remembered(NamedTuple):
    """The memories of sequences.

    weights: [places, rows, n] float32, contiguous
    places: [groups] int32, all different, where in `weights` each group's are; negative for a group without a memory
    """

    weights: Tensor
    places: Tensor


def score_blocks(
    memory: Remembered,
    importance: Tensor,
    words: Tensor,
    limits: tuple[Tensor, Tensor, Tensor],
    room: Tensor,
    backend: Backend = "torch",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which blocks are read whatever they score, the scores of the others, and the room that is left for these.

    importance: [rows] float32, a factor of each row's weights
    words: [groups, rows, words] int64, a bit a block, the lowest first: blocks that are read whatever they score
    limits: (first, last, blocks), [groups] int32 each. Of `blocks` blocks those before `first` and from `last` on are
        read in every row. A group without a memory must have all its blocks there
    room: [groups] int32, the most blocks from `first` up to, but not including, `last` that it may read over all rows
    Returns forced [groups, rows, n] uint8; scores [groups, rows, n] float32, 0 where forced and from `blocks` on; and
    [groups] int32, `room` less the forced blocks between `first` and `last`, negative where there are more.
    """
    first, last, blocks = limits
    groups, (rows, n), device = len(room), memory.weights.shape[1:], room.device
    if backend == "torch":
        column = torch.arange(n, device=device)
        bits = words[..., column // WORD] >> (column % WORD) & 1
        outside = (column < first[:, None, None]) | (column >= last[:, None, None])
        inside = column < blocks[:, None, None]
        forced = (bits.bool() | outside) & inside
        own = memory.weights[memory.places.clamp(min=0).long()]
        scores = (own * importance[:, None]).masked_fill(forced | ~inside, 0)
        return forced.to(torch.uint8), scores, room - (forced & ~outside).sum((1, 2), dtype=torch.int32)
    forced = torch.empty(groups, rows, n, dtype=torch.uint8, device=device)
    scores = torch.empty(groups, rows, n, dtype=torch.float32, device=device)
    left = room.clone()
    _score_blocks_kernel[(groups * rows, -(-n // _CHUNK))](
        memory_ptr=memory.weights,
        places_ptr=memory.places,
        importance_ptr=importance,
        words_ptr=words,
        first_ptr=first,
        last_ptr=last,
        blocks_ptr=blocks,
        forced_ptr=forced,
        scores_ptr=scores,
        left_ptr=left,
        n=n,
        word_count=words.shape[2],
        rows=rows,
        CHUNK=_CHUNK,
    )
    return forced, scores, left


def remember_weights(
    memory: Remembered,
    lists: Tensor,
    counts: Tensor,
    weights: Tensor,
    blocks: Tensor,
    decay: float,
    backend: Backend = "torch",
) -> None:
    """Fade the memory by `decay` and raise it to the weights that were read, in place; 0 from `blocks` on.

    Nothing is remembered of groups without a memory.
    lists: [outer, groups, inner, width] int32 blocks, where rows are outer * inner; counts: [outer, groups, inner]
    int32; weights: as lists, float32; blocks: [groups] int32
    """
    into, places = memory
    groups, (rows, n) = len(places), into.shape[1:]
    inner, width = lists.shape[2:]
    if backend == "torch":
        lists, counts, weights = (x.transpose(0, 1).flatten(1, 2) for x in (lists, counts, weights))
        listed = torch.arange(width, device=into.device) < counts[..., None]
        read = torch.zeros(groups, rows, n + 1, device=into.device)
        read.scatter_(2, lists.long().where(listed, n), weights.where(listed, 0.0))
        inside = torch.arange(n, device=into.device) < blocks[:, None, None]
        there = places >= 0
        at = places[there].long()
        into[at] = torch.maximum(into[at] * decay, read[there, :, :n]).where(inside[there], 0.0)
        return
    _remember_weights_kernel[(groups * rows,)](
        memory_ptr=into,
        places_ptr=places,
        lists_ptr=lists,
        counts_ptr=counts,
        weights_ptr=weights,
        blocks_ptr=blocks,
        n=n,
        width=width,
        rows=rows,
        decay=decay,
        INNER=inner,
        CHUNK=_CHUNK,
    )


@jit
def _score_blocks_kernel(
    memory_ptr,
    places_ptr,
    importance_ptr,
    words_ptr,
    first_ptr,
    last_ptr,
    blocks_ptr,
    forced_ptr,
    scores_ptr,
    left_ptr,
    n: tl.constexpr,
    word_count: tl.constexpr,
    rows: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Score a chunk of one row's blocks, and take those that are forced off the room that is left."""
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
    place = tl.maximum(tl.load(places_ptr + group), 0).to(tl.int64)  # without a memory all blocks are forced
    own = (place * rows + row % rows) * n + column
    score = tl.load(memory_ptr + own, mask=there, other=0.0) * tl.load(importance_ptr + row % rows)
    tl.store(forced_ptr + at, forced.to(tl.uint8), mask=inside)
    tl.store(scores_ptr + at, tl.where(there & ~forced, score, 0.0), mask=inside)
    chosen = tl.sum((forced & ~outside).to(tl.int32), 0)
    if chosen > 0:
        tl.atomic_add(left_ptr + group, -chosen, sem="relaxed")


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
    """Fade one row of a memory, then raise the listed blocks; a barrier stands between the two."""
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
