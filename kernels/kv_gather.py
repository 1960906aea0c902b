"""Copying scattered KV blocks, from pinned host memory or from a GPU, into rows of a GPU buffer.

The Triton kernel reads host memory through its mapped address, so which rows move is known to the device alone: no
host planning, no copy per row, and a captured graph serves any list. Over PCIe a read takes about 2 µs, so that
53 GB/s need some 100 KB on the way at any time; each program keeps IN_FLIGHT bytes there.
"""

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, tl

IN_FLIGHT = (
    32 * 1024
)  # bytes that a program loads before it stores: WARPS * 32 threads, 8 loads of 16 bytes each
MAX_PIECE = 4096  # bytes of a row that are taken at once
MIN_PIECE = 512  # one 16-byte load of each lane of a warp
WARPS = 8


def gather_blocks(
    source: Tensor,
    destination: Tensor,
    source_rows: Tensor,
    destination_rows: Tensor,
    count: Tensor,
    programs: int,
    backend: str = "torch",
) -> None:
    """destination[destination_rows[i]] = source[source_rows[i]] for i < count, in place.

    source: [n, size], any dtype, contiguous; on the destination's device, or pinned on the host
    destination: [m, size], the same dtype, contiguous; no part of the source
    source_rows, destination_rows: [capacity] int32 on the destination's device; no destination row twice
    count: [1] int32 there, at most `capacity`
    programs: how many programs copy, each at most a multiprocessor's worth; the rest is left to the model
    """
    check_backend("gather_blocks", backend, ("torch", "triton"))
    _check_arguments(source, destination, source_rows, destination_rows, count, programs)
    if backend == "torch":
        valid = int(count)
        rows = source.index_select(0, source_rows[:valid].to(source.device).long())
        destination.index_copy_(0, destination_rows[:valid].long(), rows.to(destination.device))
        return
    if source.device != destination.device and not source.is_pinned():
        raise ValueError("gather_blocks: a source on the host must be pinned for the GPU to read it")
    row_bytes = source.shape[1] * source.element_size()
    if row_bytes % 16 or source.data_ptr() % 16 or destination.data_ptr() % 16:
        raise ValueError(
            f"gather_blocks: Triton copies rows of whole 16-byte words, not of {row_bytes} bytes"
        )
    if not source_rows.numel() or not row_bytes:
        return
    # The largest power of two in a row wastes no lanes; below MIN_PIECE it would waste transactions instead.
    piece = min(MAX_PIECE, max(MIN_PIECE, row_bytes & -row_bytes))
    _gather_blocks_kernel[(programs,)](
        source.view(torch.int32),
        destination.view(torch.int32),
        source_rows,
        destination_rows,
        count,
        WORDS=row_bytes // 4,
        PIECE=piece // 4,
        LANES=max(IN_FLIGHT // piece, 1),
        num_warps=WARPS,
    )


def _check_arguments(
    source: Tensor,
    destination: Tensor,
    source_rows: Tensor,
    destination_rows: Tensor,
    count: Tensor,
    programs: int,
) -> None:
    if source.dim() != 2 or destination.dim() != 2 or source.shape[1] != destination.shape[1]:
        raise ValueError(
            f"gather_blocks: rows differ, {tuple(source.shape)} into {tuple(destination.shape)}; both are [n, size]"
        )
    if source.dtype != destination.dtype:
        raise ValueError(f"gather_blocks: {source.dtype} into {destination.dtype}")
    if source_rows.dim() != 1 or source_rows.shape != destination_rows.shape or count.numel() != 1:
        raise ValueError(
            f"gather_blocks: {tuple(source_rows.shape)} source rows, {tuple(destination_rows.shape)} destination "
            f"rows, {count.numel()} counts; there is one list of each, and one count"
        )
    for tensor in (source_rows, destination_rows, count):
        if tensor.dtype != torch.int32 or tensor.device != destination.device:
            raise ValueError(
                f"gather_blocks: lists are int32 on {destination.device}, not {tensor.dtype} on {tensor.device}"
            )
    if not all(t.is_contiguous() for t in (source, destination, source_rows, destination_rows)):
        raise ValueError("gather_blocks: the source, the destination and the lists must be contiguous")
    if programs < 1:
        raise ValueError(f"gather_blocks: {programs} programs copy nothing")


@jit
def _gather_blocks_kernel(
    source_ptr,
    destination_ptr,
    source_rows_ptr,
    destination_rows_ptr,
    count_ptr,
    WORDS: tl.constexpr,
    PIECE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Persistent: of all pieces of all rows each program takes every programs-th, LANES at a time."""
    PARTS: tl.constexpr = (WORDS + PIECE - 1) // PIECE
    programs = tl.num_programs(0)
    pieces = tl.load(count_ptr) * PARTS
    word = tl.arange(0, PIECE)
    piece = tl.program_id(0) + tl.arange(0, LANES) * programs
    here = piece < pieces
    source = tl.load(source_rows_ptr + piece // PARTS, mask=here, other=0)
    destination = tl.load(destination_rows_ptr + piece // PARTS, mask=here, other=0)
    for _ in tl.range(0, pieces, programs * LANES):
        at = (piece % PARTS)[:, None] * PIECE + word[None, :]
        inside = here[:, None] & (at < WORDS)
        # Read once: L1 is passed by. (PTX takes no eviction policy beside it, and Triton 3.6 loads no ".cs".)
        data = tl.load(
            source_ptr + source.to(tl.int64)[:, None] * WORDS + at, mask=inside, cache_modifier=".cg"
        )
        place = destination_ptr + destination.to(tl.int64)[:, None] * WORDS + at
        # The next rows are looked up while the data is on its way.
        piece += programs * LANES
        here = piece < pieces
        source = tl.load(source_rows_ptr + piece // PARTS, mask=here, other=0)
        destination = tl.load(destination_rows_ptr + piece // PARTS, mask=here, other=0)
        tl.store(place, data, mask=inside)
