"""Scores by which a draft announces blocks: each row's weights, predicted by a blend of the draft's heads."""

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, follow, jit, overlapping_launch, tl
from specahead.kernels.selection.memory import WORD

_CHUNK = 512  # blocks that a program scores


def score_announced(
    evidence: Tensor,
    heads: Tensor,
    weights: Tensor,
    before: Tensor,
    limits: Tensor,
    stickiness: float,
    backend: Backend = "torch",
) -> Tensor:
    """Return the score of each block in each row: [sequences, rows, blocks] float32.

    It is the weighted sum of the evidence of the row's heads, times `stickiness` for a block that was announced before,
    and 0 outside the limits.
    evidence: [sequences, heads, blocks] float32, contiguous
    heads, weights: [rows, width] int32 and float32, the blend of each row, with weights of 0 after its last head
    before: [sequences, rows, words] int64, a bit a block, the lowest first: blocks that were announced before
    limits: [at least 2, sequences] int32, the first block that counts, and the one after the last that counts
    """
    (sequences, of_all, blocks), (rows, width) = evidence.shape, heads.shape
    if backend == "torch":
        projection = evidence.new_zeros(rows, of_all).scatter_add_(1, heads.long(), weights)
        column = torch.arange(blocks, device=evidence.device)
        outside = (column < limits[0][:, None]) | (column >= limits[1][:, None])
        favour = 1 + (stickiness - 1) * unpack_bits(before, blocks)
        return (torch.matmul(projection, evidence) * favour).masked_fill(outside[:, None], 0)
    scores = torch.empty(sequences, rows, blocks, dtype=torch.float32, device=evidence.device)
    if scores.numel():
        _score_announced_kernel[(sequences * rows, -(-blocks // _CHUNK))](
            evidence_ptr=evidence,
            heads_ptr=heads,
            weights_ptr=weights,
            before_ptr=before,
            limits_ptr=limits,
            scores_ptr=scores,
            of_all=of_all,
            width=width,
            blocks=blocks,
            words=before.shape[2],
            rows=rows,
            limit_stride=limits.stride(0),
            stickiness=stickiness,
            CHUNK=_CHUNK,
            **overlapping_launch(scores.device),
        )
    return scores


def unpack_bits(bitmap: Tensor, blocks: int) -> Tensor:
    """Return a bitmap, int64 [..., words], as 0 or 1, int64 [..., blocks]."""
    column = torch.arange(blocks, device=bitmap.device)
    return (bitmap[..., column // WORD] >> (column % WORD)) & 1


@jit
def _score_announced_kernel(
    evidence_ptr,
    heads_ptr,
    weights_ptr,
    before_ptr,
    limits_ptr,
    scores_ptr,
    of_all,
    width: tl.constexpr,
    blocks,
    words,
    rows,
    limit_stride,
    stickiness,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    sequence, blend = row // rows, row % rows * width
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < blocks
    counts = column >= tl.load(limits_ptr + sequence)
    counts = inside & counts & (column < tl.load(limits_ptr + limit_stride + sequence))
    word = tl.load(before_ptr + row * words + column // 64, mask=inside, other=0)
    bit = (word >> (column % 64).to(tl.int64)) & 1
    score = tl.zeros([CHUNK], tl.float32)
    for i in tl.static_range(width):
        head = sequence * of_all + tl.load(heads_ptr + blend + i)
        of_head = tl.load(evidence_ptr + head * blocks + column, mask=counts, other=0.0)
        score += of_head * tl.load(weights_ptr + blend + i)
    tl.store(scores_ptr + row * blocks + column, tl.where(bit != 0, score * stickiness, score), mask=inside)
