"""Copying scattered KV blocks between pinned host memory and a GPU, either way, by lists that the device holds.

The Triton kernel reads and writes host memory at its mapped address, so that only the device has to know which rows
move: the host plans nothing, and a captured graph serves any list. Over PCIe a read takes about 2 µs, so that 53 GB/s
need some 100 KB in flight at any time; each program keeps IN_FLIGHT bytes there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, jit, tl
from specahead.kernels.compiling import compiles_only

IN_FLIGHT = 32 * 1024  # bytes that a program loads before it stores: WARPS * 32 threads, 8 loads of 16 bytes each
MAX_PIECE = 4096  # bytes of a row that are taken at once
MIN_PIECE = 512  # one 16-byte load of each lane of a warp
WARPS = 8

Pair = tuple[Tensor, Tensor]  # keys and values


def gather_blocks(
    sources: Pair,
    destinations: Pair,
    source_rows: Tensor,
    destination_rows: Tensor,
    count: Tensor,
    programs: int,
    backend: Backend = "torch",
) -> None:
    """Do destination[destination_rows[i]] = source[source_rows[i]] for i < count, in place, for keys and for values.

    sources: [n, size] both, any dtype, contiguous; on the lists' device, or pinned on the host
    destinations: [m, size] both, the sources' dtype, contiguous; in one of these places; no part of a source
    source_rows, destination_rows: [capacity] int32, both on one device; no destination row twice. Nothing is copied
        where the source row is negative
    count: [1] int32 on that device, at most `capacity`
    programs: how many programs copy, each on up to one multiprocessor; the others are left to the model
    Triton raises ValueError for rows of no whole 16-byte words.
    """
    assert sources[0].shape[1:] == destinations[0].shape[1:] and sources[0].dtype == destinations[0].dtype
    assert source_rows.shape == destination_rows.shape and source_rows.dtype == destination_rows.dtype == torch.int32
    assert all(t.is_contiguous() for t in (*sources, *destinations, source_rows, destination_rows))
    if backend == "torch":
        source_rows, destination_rows = source_rows[: int(count)], destination_rows[: int(count)]
        kept = source_rows >= 0
        source_rows, destination_rows = source_rows[kept], destination_rows[kept]
        for source, destination in zip(sources, destinations, strict=True):
            rows = source.index_select(0, source_rows.to(source.device).long())
            places = destination_rows.to(destination.device).long()
            destination.index_copy_(0, places, rows.to(destination.device))
        return
    tensors = *sources, *destinations
    # A launch that only compiles has fake tensors, which are never pinned.
    assert compiles_only() or all(t.device == source_rows.device or not t.numel() or t.is_pinned() for t in tensors)
    how = _row_layout(tensors)
    if source_rows.numel() and how["WORDS"]:
        _gather_blocks_kernel[(programs,)](
            source_ptr=sources[0].view(torch.int32),
            destination_ptr=destinations[0].view(torch.int32),
            source2_ptr=sources[1].view(torch.int32),
            destination2_ptr=destinations[1].view(torch.int32),
            source_rows_ptr=source_rows,
            destination_rows_ptr=destination_rows,
            count_ptr=count,
            **how,
        )


@dataclass(frozen=True)
class LayerCopies:
    """The sources and destinations of each layer's rows: keys and values [n, size] of one shape, dtype and device.

    offsets: [4, layers] int64 on the GPU, where the sources' keys and values and the destinations' begin, in words of
        16 bytes from `anchor` [4] int32 on, so that the compiler knows that they are aligned
    """

    sources: list[Pair]
    destinations: list[Pair]
    offsets: Tensor
    anchor: Tensor


def layer_copies(sources: list[Pair], destinations: list[Pair], device: torch.device) -> LayerCopies:
    """Return the copies of all layers. device: of the lists. Sources and destinations are as for `gather_blocks`, and
    must stay where they are.
    """
    anchor = torch.zeros(4, dtype=torch.int32, device=device)
    begins = [[pair[i].data_ptr() for pair in side] for side in (sources, destinations) for i in range(2)]
    offsets = (torch.tensor(begins, dtype=torch.int64) - anchor.data_ptr()) // 16
    return LayerCopies(sources, destinations, offsets.to(device), anchor)


def gather_layers(
    copies: LayerCopies,
    source_rows: Tensor,
    destination_rows: Tensor,
    counts: Tensor,
    done: Tensor,
    programs: int,
    backend: Backend = "torch",
) -> None:
    """Do `gather_blocks` layer after layer, in one launch. `wait_for_layer` waits for a layer.

    source_rows, destination_rows: [layers, capacity] int32; counts: [layers] int32
    done: [layers] int32, zeros before; each program adds 1 for each layer that it has finished
    """
    assert source_rows.shape == destination_rows.shape
    assert len(source_rows) == len(counts) == len(done) == len(copies.sources)
    if backend == "torch":
        for layer, pairs in enumerate(zip(copies.sources, copies.destinations, strict=True)):
            gather_blocks(*pairs, source_rows[layer], destination_rows[layer], counts[layer : layer + 1], programs)
        done += programs
        return
    _gather_layers_kernel[(programs,)](
        offsets_ptr=copies.offsets,
        anchor_ptr=copies.anchor,
        source_rows_ptr=source_rows,
        destination_rows_ptr=destination_rows,
        counts_ptr=counts,
        done_ptr=done,
        layers=len(counts),
        capacity=source_rows.shape[1],
        **_row_layout((*copies.sources[0], *copies.destinations[0])),
    )


def wait_for_layer(done: Tensor, layer: int, programs: int, backend: Backend = "torch") -> None:
    """Let the stream wait until `programs` programs of `gather_layers`, on another stream, have finished a layer."""
    if backend == "triton":
        _wait_for_layer_kernel[(1,)](done, layer, programs, num_warps=1)


def _row_layout(tensors: tuple[Tensor, ...]) -> dict[str, int]:
    """Return how the kernels cut rows, as keyword arguments. Raises ValueError for rows of no whole 16-byte words."""
    row_bytes = tensors[0].shape[1] * tensors[0].element_size()
    if row_bytes % 16 or any(t.data_ptr() % 16 for t in tensors):
        raise ValueError(f"gather_blocks: Triton copies rows of whole 16-byte words, not of {row_bytes} bytes")
    # The largest power of two in a row wastes no lanes; below MIN_PIECE it would waste transactions instead.
    piece = min(MAX_PIECE, max(MIN_PIECE, row_bytes & -row_bytes))
    lanes = max(IN_FLIGHT // (2 * piece), 1)
    return {"WORDS": row_bytes // 4, "PIECE": piece // 4, "LANES": lanes, "num_warps": WARPS}


@jit
def _copy_rows(first, second, rows, count, WORDS: tl.constexpr, PIECE: tl.constexpr, LANES: tl.constexpr):
    """Copy every programs-th of all pieces of all rows, LANES at a time, of keys and of values.

    first, second: a source and its destination; rows: the lists of source rows and of destination rows.
    """
    source_ptr, destination_ptr = first
    source2_ptr, destination2_ptr = second
    source_rows_ptr, destination_rows_ptr = rows
    PARTS: tl.constexpr = (WORDS + PIECE - 1) // PIECE
    programs = tl.num_programs(0)
    pieces = count * PARTS
    word = tl.arange(0, PIECE)
    piece = tl.program_id(0) + tl.arange(0, LANES) * programs
    here = piece < pieces
    source = tl.load(source_rows_ptr + piece // PARTS, mask=here, other=0)
    destination = tl.load(destination_rows_ptr + piece // PARTS, mask=here, other=0)
    for _ in tl.range(0, pieces, programs * LANES):
        at = (piece % PARTS)[:, None] * PIECE + word[None, :]
        inside = (here & (source >= 0))[:, None] & (at < WORDS)
        origin = source.to(tl.int64)[:, None] * WORDS + at
        # Read once: L1 is passed by. (PTX takes no eviction policy beside it, and Triton 3.6 loads no ".cs".)
        data = tl.load(source_ptr + origin, mask=inside, cache_modifier=".cg")
        data2 = tl.load(source2_ptr + origin, mask=inside, cache_modifier=".cg")
        place = destination.to(tl.int64)[:, None] * WORDS + at
        # The next rows are looked up while the data is on its way.
        piece += programs * LANES
        here = piece < pieces
        source = tl.load(source_rows_ptr + piece // PARTS, mask=here, other=0)
        destination = tl.load(destination_rows_ptr + piece // PARTS, mask=here, other=0)
        tl.store(destination_ptr + place, data, mask=inside)
        tl.store(destination2_ptr + place, data2, mask=inside)


@jit
def _gather_blocks_kernel(
    source_ptr,
    destination_ptr,
    source2_ptr,
    destination2_ptr,
    source_rows_ptr,
    destination_rows_ptr,
    count_ptr,
    WORDS: tl.constexpr,
    PIECE: tl.constexpr,
    LANES: tl.constexpr,
):
    first, second = (source_ptr, destination_ptr), (source2_ptr, destination2_ptr)
    rows = (source_rows_ptr, destination_rows_ptr)
    _copy_rows(first, second, rows, tl.load(count_ptr), WORDS, PIECE, LANES)


@jit
def _gather_layers_kernel(
    offsets_ptr,
    anchor_ptr,
    source_rows_ptr,
    destination_rows_ptr,
    counts_ptr,
    done_ptr,
    layers,
    capacity,
    WORDS: tl.constexpr,
    PIECE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Copy a program's share of all layers. A program goes on to the next layer without waiting for the others."""
    for layer in tl.range(0, layers):
        at = capacity.to(tl.int64) * layer
        keys = anchor_ptr + tl.load(offsets_ptr + layer) * 4
        keys_to = anchor_ptr + tl.load(offsets_ptr + 2 * layers + layer) * 4
        values = anchor_ptr + tl.load(offsets_ptr + layers + layer) * 4
        values_to = anchor_ptr + tl.load(offsets_ptr + 3 * layers + layer) * 4
        rows = (source_rows_ptr + at, destination_rows_ptr + at)
        _copy_rows((keys, keys_to), (values, values_to), rows, tl.load(counts_ptr + layer), WORDS, PIECE, LANES)
        tl.debug_barrier()  # all threads have stored; the release makes that seen
        tl.atomic_add(done_ptr + layer, 1, sem="release", scope="gpu")


@jit
def _wait_for_layer_kernel(done_ptr, layer, programs):
    finished = tl.atomic_add(done_ptr + layer, 0, sem="acquire", scope="gpu")
    while finished < programs:
        finished = tl.atomic_add(done_ptr + layer, 0, sem="acquire", scope="gpu")
