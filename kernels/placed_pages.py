"""What a request to the residency tables has placed: kept for a copy that runs beside the next request, and counted."""

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, tl
from kernels.residency import Transfers

_CHUNK = 1024
_PROGRAMS = 4  # that share a row


def keep_placed(transfers: Transfers, backend: str = "torch") -> Transfers:
    """A copy of what was placed, with as much room; pages without a slot are counted, but not named."""
    check_backend("keep_placed", backend, ("torch", "triton"))
    pages, slots = torch.empty_like(transfers.pages), torch.empty_like(transfers.slots)
    kept = Transfers(pages, slots, transfers.counts.clone(), transfers.unplaced.clone())
    if backend == "torch":
        placed = _placed(transfers)
        pages[placed], slots[placed] = transfers.pages[placed], transfers.slots[placed]
    elif pages.numel():
        _keep_placed_kernel[(_PROGRAMS, len(pages))](
            transfers.pages, transfers.slots, transfers.counts, pages, slots, pages.shape[1], CHUNK=_CHUNK
        )
    return kept


def count_unread(stamps: Tensor, transfers: Transfers, round: int, backend: str = "torch") -> Tensor:
    """[1] int32: placed pages whose slots bear the stamp of `round`, in which they were placed: unused since.

    stamps: [rows, slots] int32, of kernels.residency's tables
    """
    check_backend("count_unread", backend, ("torch", "triton"))
    if backend == "torch":
        placed = _placed(transfers)
        bears = stamps.gather(1, transfers.slots.where(placed, 0).long()) == round
        return (placed & bears).sum(dtype=torch.int32)[None]
    unread = torch.zeros(1, dtype=torch.int32, device=stamps.device)
    if transfers.slots.numel():
        _count_unread_kernel[(_PROGRAMS, len(stamps))](
            stamps,
            transfers.slots,
            transfers.counts,
            unread,
            round,
            stamps.shape[1],
            transfers.slots.shape[1],
            CHUNK=_CHUNK,
        )
    return unread


def _placed(transfers: Transfers) -> Tensor:
    place = torch.arange(transfers.slots.shape[1], device=transfers.slots.device)
    return place < transfers.counts[:, None]


@jit
def _keep_placed_kernel(
    pages_ptr, slots_ptr, counts_ptr, kept_pages_ptr, kept_slots_ptr, capacity, CHUNK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    count = tl.load(counts_ptr + row)
    for start in tl.range(tl.program_id(0) * CHUNK, count, tl.num_programs(0) * CHUNK):
        at = row * capacity + start + tl.arange(0, CHUNK)
        placed = start + tl.arange(0, CHUNK) < count
        tl.store(kept_pages_ptr + at, tl.load(pages_ptr + at, mask=placed, other=0), mask=placed)
        tl.store(kept_slots_ptr + at, tl.load(slots_ptr + at, mask=placed, other=0), mask=placed)


@jit
def _count_unread_kernel(
    stamps_ptr, slots_ptr, counts_ptr, unread_ptr, round, slots, capacity, CHUNK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    count = tl.load(counts_ptr + row)
    unread = count * 0
    for start in tl.range(tl.program_id(0) * CHUNK, count, tl.num_programs(0) * CHUNK):
        at = start + tl.arange(0, CHUNK)
        slot = tl.load(slots_ptr + row * capacity + at, mask=at < count, other=0)
        stamp = tl.load(stamps_ptr + row * slots + slot, mask=at < count, other=-2)
        unread += tl.sum(((stamp == round) & (at < count)).to(tl.int32), 0)
    tl.atomic_add(unread_ptr, unread, sem="relaxed")
