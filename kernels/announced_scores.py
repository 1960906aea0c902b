"""Scores by which blocks are announced: those announced last round count more, those outside of limits not at all."""

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, tl
from kernels.shared_budget import WORD


def favour_announced(
    scores: Tensor, before: Tensor, limits: Tensor, stickiness: float, backend: str = "torch"
) -> Tensor:
    """Return scores times `stickiness` for what was announced before, and 0 outside the limits; for Triton in place.

    scores: [sequences, rows, blocks] float32, contiguous; before: [sequences, rows, words] int64, a bit a block, lowest
    first; limits: [at least 2, sequences] int32: the first block that counts, and the one behind the last that does
    """
    check_backend("favour_announced", backend)
    _, rows, blocks = scores.shape
    if backend == "torch":
        column = torch.arange(blocks, device=scores.device)
        outside = (column < limits[0][:, None]) | (column >= limits[1][:, None])
        return (scores * (1 + (stickiness - 1) * unpack_bits(before, blocks))).masked_fill(outside[:, None], 0)
    if scores.numel():
        _favour_announced_kernel[(scores.shape[0] * rows, -(-blocks // 2048))](
            *(scores, before, limits, blocks, before.shape[2], rows, limits.stride(0), stickiness), CHUNK=2048
        )
    return scores


def unpack_bits(bitmap: Tensor, blocks: int) -> Tensor:
    """Return a bitmap, int64 [..., words], as 0 or 1, int64 [..., blocks]."""
    column = torch.arange(blocks, device=bitmap.device)
    return (bitmap[..., column // WORD] >> (column % WORD)) & 1


@jit
def _favour_announced_kernel(
    scores_ptr, before_ptr, limits_ptr, blocks, words, rows, limit_stride, stickiness, CHUNK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    sequence = row // rows
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < blocks
    counts = column >= tl.load(limits_ptr + sequence)
    counts = counts & (column < tl.load(limits_ptr + limit_stride + sequence))
    word = tl.load(before_ptr + row * words + column // 64, mask=inside, other=0)
    bit = (word >> (column % 64).to(tl.int64)) & 1
    score = tl.load(scores_ptr + row * blocks + column, mask=inside & counts, other=0.0)
    tl.store(scores_ptr + row * blocks + column, tl.where(bit != 0, score * stickiness, score), mask=inside)
