"""Which listed blocks must still be fetched when a pass begins, and leaving out those of them that nobody announced."""

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, power_of_two, tl


def count_late_blocks(
    slot_of: Tensor,
    lists: Tensor,
    counts: Tensor,
    page_tables: Tensor,
    kv_heads: int,
    pages_per_block: int,
    announced: Tensor | None,
    leave_out: bool,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Count blocks that are not hot, and those of them that are late: not announced either.

    slot_of: [layers, pages * kv_heads] int32 of kernels.residency's tables, before the blocks are requested
    lists: [layers, sequences, kv_heads, width] int32 blocks; counts: [layers, sequences, kv_heads] int32
    page_tables: [sequences, max_pages] int32, negative where there is no page; a block is hot if all its pages are
    announced: [sequences, layers * kv_heads, blocks] uint8, or None: all are
    leave_out: take late blocks out of `lists` and `counts`, in place; the others keep their order
    Returns cold, late [sequences] int32, over all layers and heads.
    """
    check_backend("count_late_blocks", backend, ("torch", "triton"))
    layers, sequences, _, width = lists.shape
    if backend == "torch":
        return _torch_count(
            slot_of, lists, counts, page_tables, kv_heads, pages_per_block, announced, leave_out
        )
    if not (lists.is_contiguous() and counts.is_contiguous()):
        raise ValueError("count_late_blocks: the Triton backend needs contiguous lists and counts")
    cold, late = torch.zeros(2, sequences, dtype=torch.int32, device=lists.device)
    _count_late_blocks_kernel[(layers * sequences * kv_heads,)](
        slot_of,
        lists,
        counts,
        page_tables,
        lists if announced is None else announced,
        cold,
        late,
        width,
        slot_of.shape[1],
        page_tables.shape[1],
        0 if announced is None else announced.shape[2],
        sequences,
        layers,
        KV_HEADS=kv_heads,
        PER_BLOCK=pages_per_block,
        ANNOUNCED=announced is not None,
        LEAVE_OUT=leave_out,
        CHUNK=min(1024, power_of_two(width)),
    )
    return cold, late


def _torch_count(
    slot_of: Tensor,
    lists: Tensor,
    counts: Tensor,
    page_tables: Tensor,
    kv_heads: int,
    pages_per_block: int,
    announced: Tensor | None,
    leave_out: bool,
) -> tuple[Tensor, Tensor]:
    layers, sequences, _, width = lists.shape
    device = lists.device
    listed = torch.arange(width, device=device) < counts[..., None]
    block = lists.long().where(listed, 0)
    logical = block[..., None] * pages_per_block + torch.arange(pages_per_block, device=device)
    there = logical < page_tables.shape[1]
    sequence = torch.arange(sequences, device=device)[:, None, None, None]
    head = torch.arange(kv_heads, device=device)[:, None, None]
    numbers = page_tables[sequence, logical.where(there, 0)].long()
    there = there & (numbers >= 0)
    page = numbers * kv_heads + head
    row = torch.arange(layers, device=device)[:, None, None, None, None]
    hot = (slot_of[row, page.clamp(0, slot_of.shape[1] - 1)] >= 0) | ~there
    cold = listed & ~hot.all(-1)
    late = torch.zeros_like(cold)
    if announced is not None:
        by_layer = announced.view(sequences, layers, kv_heads, -1).permute(1, 0, 2, 3).bool()
        late = cold & ~by_layer.gather(3, block)
    totals = cold.sum((0, 2, 3), dtype=torch.int32), late.sum((0, 2, 3), dtype=torch.int32)
    if leave_out:
        kept = listed & ~late
        order = (~kept).to(torch.uint8).argsort(dim=3, stable=True)
        lists.copy_(lists.gather(3, order))
        counts.copy_(kept.sum(3, dtype=torch.int32))
    return totals


@jit
def _count_late_blocks_kernel(
    slot_of_ptr,
    lists_ptr,
    counts_ptr,
    page_tables_ptr,
    announced_ptr,
    cold_ptr,
    late_ptr,
    width,
    pages,
    table_width,
    blocks,
    sequences,
    layers,
    KV_HEADS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    ANNOUNCED: tl.constexpr,
    LEAVE_OUT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One list a program. Entries move only to places that have been read: the sum before a store waits for all."""
    row = tl.program_id(0).to(tl.int64)
    head = row % KV_HEADS
    sequence = row // KV_HEADS % sequences
    layer = row // KV_HEADS // sequences
    count = tl.minimum(tl.load(counts_ptr + row), width)
    lists_ptr += row * width
    cold = count * 0
    late = count * 0
    kept = count * 0
    for start in tl.range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        listed = place < count
        block = tl.load(lists_ptr + place, mask=listed, other=0)
        is_cold = place < 0
        for part in tl.static_range(PER_BLOCK):
            logical = block * PER_BLOCK + part
            there = listed & (logical < table_width)
            page = tl.load(page_tables_ptr + sequence * table_width + logical, mask=there, other=-1)
            there = there & (page >= 0)
            at = layer * pages + page.to(tl.int64) * KV_HEADS + head
            is_cold = is_cold | (there & (tl.load(slot_of_ptr + at, mask=there, other=0) < 0))
        is_late = place < 0
        if ANNOUNCED:
            at = ((sequence * layers + layer) * KV_HEADS + head) * blocks + block
            is_late = is_cold & (tl.load(announced_ptr + at, mask=is_cold, other=1) == 0)
        cold += tl.sum(is_cold.to(tl.int32), 0)
        late += tl.sum(is_late.to(tl.int32), 0)
        if LEAVE_OUT:
            stays = (listed & ~is_late).to(tl.int32)
            tl.store(lists_ptr + kept + tl.cumsum(stays, 0) - stays, block, mask=stays != 0)
            kept += tl.sum(stays, 0)
    if LEAVE_OUT:
        tl.store(counts_ptr + row, kept)
    tl.atomic_add(cold_ptr + sequence, cold, sem="relaxed")
    tl.atomic_add(late_ptr + sequence, late, sem="relaxed")
