"""Merging the outputs of the same queries over pieces of a sequence, by their log-sum-exp, in one launch.

FlashAttention-2 (arXiv 2307.08691, section 3.1). Each output is read once, and the merged rows are written in place and
in their final dtype: on a GPU a merge costs nothing but memory traffic.
"""

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, jit, power_of_two, tl


def merge_attended(
    running: Tensor,
    total: Tensor,
    piece: Tensor,
    weight: Tensor,
    out: Tensor,
    skipped: int = 0,
    backend: Backend = "torch",
) -> Tensor:
    """Merge the rows of partial attentions, from the row `skipped` on, into the rows of `out`.

    Returns the log-sum-exp of the scores of all, [batch, heads, rows of out, 1] float32. Arithmetic is in float32.
    An output that saw no keys has a log-sum-exp of -inf and weight 0, but must be a number.

    running: [batch, heads, rows, dim], of any strides and dtype, and of as many rows as it has; total: the log-sum-exp
        of its scores, [batch, heads, rows, 1] float32, whose rows are neighbours
    piece, weight: the same of one piece or more, [pieces * batch, ...]
    out: [batch, heads, at most rows - skipped, dim], of any strides and dtype; without `skipped` it may be `running`
    """
    batch, heads, rows, dim = out.shape
    if backend == "torch":
        here = slice(skipped, skipped + rows)
        running, total, piece, weight = (each[:, :, here] for each in (running, total, piece, weight))
        merged = running.float()
        for other, of_other in zip(piece.split(batch), weight.split(batch), strict=True):
            apart = (of_other - total).masked_fill(of_other == total, 0)  # both may be -inf
            merged, total = merged.lerp(other.float(), apart.sigmoid()), torch.logaddexp(total, of_other)
        out.copy_(merged)
        return total
    merged = torch.empty(batch, heads, rows, 1, dtype=torch.float32, device=out.device)
    if out.numel():
        tile = power_of_two(heads) * power_of_two(dim)
        _merge_attended_kernel[(rows, batch)](
            running_ptr=running,
            running_sums_ptr=total,
            piece_ptr=piece,
            weight_ptr=weight,
            out_ptr=out,
            merged_ptr=merged,
            of_total=total.stride(1),
            of_weight=weight.stride(1),
            of_piece=piece.stride(0),
            skipped=skipped,
            RUNNING=_strides(running),
            PIECE=_strides(piece[:1]),
            OUT=_strides(out),
            PIECES=len(piece) // batch,
            heads=heads,
            dim=dim,
            HEADS=power_of_two(heads),
            DIM=power_of_two(dim),
            num_warps=8 if tile > 4096 else 4,
        )
    return merged


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, 0 where it has one element, so that fewer kernels are compiled."""
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@jit
def _merge_attended_kernel(
    running_ptr,
    running_sums_ptr,
    piece_ptr,
    weight_ptr,
    out_ptr,
    merged_ptr,
    of_total,
    of_weight,
    of_piece,
    skipped,
    RUNNING: tl.constexpr,
    PIECE: tl.constexpr,
    OUT: tl.constexpr,
    PIECES: tl.constexpr,
    heads: tl.constexpr,
    dim: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Merge all heads of one row: cuDNN's outputs lie in memory as [rows, heads, dim].

    RUNNING, PIECE, OUT: strides, known when this is compiled, so that neighbours are loaded together; they do not
    depend on the number of rows. of_total, of_weight: how far apart heads are. of_piece: how far apart pieces are.
    """
    row, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    source = row + skipped
    head, at = tl.arange(0, HEADS).to(tl.int64)[:, None], tl.arange(0, DIM)[None, :]
    there = head < heads
    inside = there & (at < dim)
    first = batch * heads + head
    total = tl.load(running_sums_ptr + first * of_total + source, mask=there, other=0.0)
    running_at = batch * RUNNING[0] + head * RUNNING[1] + source * RUNNING[2] + at * RUNNING[3]
    out = tl.load(running_ptr + running_at, mask=inside, other=0.0).to(tl.float32)
    for number in tl.static_range(PIECES):
        place = number * tl.num_programs(1) + batch
        weight = tl.load(weight_ptr + (place * heads + head) * of_weight + source, mask=there, other=0.0)
        piece_at = place * of_piece + head * PIECE[1] + source * PIECE[2] + at * PIECE[3]
        piece = tl.load(piece_ptr + piece_at, mask=inside, other=0.0).to(tl.float32)
        apart = tl.where(weight == total, 0.0, weight - total)  # both may be -inf
        out += (piece - out) * tl.sigmoid(apart)
        total = tl.maximum(total, weight) + tl.log(1.0 + tl.exp(-tl.abs(apart)))
    tl.store(merged_ptr + first * tl.num_programs(0) + row, total, mask=there)
    out_at = batch * OUT[0] + head * OUT[1] + row * OUT[2] + at * OUT[3]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
