"""Sparse passes of a draft: scores of blocks by the weights of its first pass, and how many blocks to read."""

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, follow, jit, overlapping_launch, tl


def score_own_blocks(
    weights: Tensor,
    lengths: Tensor,
    ends: Tensor,
    sizes: tuple[int, int, int, int],
    kept: tuple[int, int],
    share: float,
    backend: Backend = "torch",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores [layers * sequences * kv_heads, blocks] float32 and, for each row, the number of blocks and the
    number of blocks to read, int32 [rows] each. A score is the sum of the weights of a KV head's heads, infinity for
    blocks that are read anyway: the first and the newest ones.

    weights: [sequences, layers * heads, blocks] float32, contiguous
    lengths: [sequences] int32, tokens before the passes; 0: there is no sequence
    ends: [sequences] int32, tokens after the passes
    sizes: layers, KV heads, blocks, tokens of a block
    kept: how many of the first and of the newest blocks are read anyway
    share: of the blocks that are read, if that is more
    """
    layers, kv_heads, blocks, block_size = sizes
    sequences, rows = len(lengths), layers * len(lengths) * kv_heads
    if backend == "torch":
        scores = weights.view(sequences, layers, kv_heads, -1, blocks).sum(3).transpose(0, 1)
        recent = -(-lengths // block_size) - kept[1]
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
        weights_ptr=weights,
        lengths_ptr=lengths,
        ends_ptr=ends,
        scores_ptr=scores,
        valid_ptr=valid,
        count_ptr=count,
        sequences=sequences,
        blocks=blocks,
        first=kept[0],
        newest=kept[1],
        share=share,
        GROUP=weights.shape[1] // (layers * kv_heads),
        KV_HEADS=kv_heads,
        LAYERS=layers,
        BLOCK=block_size,
        CHUNK=1024,
        **overlapping_launch(weights.device),
    )
    return scores, valid, count


@jit
def _score_own_blocks_kernel(
    weights_ptr,
    lengths_ptr,
    ends_ptr,
    scores_ptr,
    valid_ptr,
    count_ptr,
    sequences,
    blocks,
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
    """A chunk of one row; its first program also stores how many blocks there are and how many are read."""
    follow(PDL)
    row = tl.program_id(0)
    kv_head, sequence, layer = row % KV_HEADS, row // KV_HEADS % sequences, row // (KV_HEADS * sequences)
    length = tl.load(lengths_ptr + sequence)
    recent = tl.cdiv(length, BLOCK) - newest
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < blocks
    always = (column < first) | (column >= recent)
    at = (sequence.to(tl.int64) * LAYERS + layer) * KV_HEADS * GROUP + kv_head * GROUP
    score = tl.zeros([CHUNK], tl.float32)
    for head in tl.static_range(GROUP):
        score += tl.load(weights_ptr + (at + head) * blocks + column, mask=inside & ~always, other=0.0)
    score = tl.where(always, float("inf"), score)
    tl.store(scores_ptr + row.to(tl.int64) * blocks + column, score, mask=inside)
    if tl.program_id(1) == 0:
        valid = tl.where(length > 0, tl.cdiv(tl.load(ends_ptr + sequence), BLOCK), 0)
        chosen = tl.maximum(tl.minimum(recent, valid) - tl.minimum(first, valid), 0)
        tl.store(valid_ptr + row, valid)
        tl.store(count_ptr + row, tl.maximum((valid.to(tl.float32) * share).to(tl.int32), valid - chosen))
