"""How many listed blocks must still be fetched when a pass begins."""

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, power_of_two, tl
from kernels.residency.listed import pages_of_blocks


def count_missing_blocks(
    line_of: Tensor,
    lists: Tensor,
    counts: Tensor,
    page_tables: Tensor,
    kv_heads: int,
    pages_per_block: int,
    backend: str = "torch",
) -> Tensor:
    """Count the blocks of each sequence that are not cached, over all layers and heads; returns [sequences] int32.

    line_of: [layers, pages * kv_heads] int32 of kernels.residency's tables, before the blocks are requested
    lists: [layers, sequences, kv_heads, width] int32 blocks; counts: [layers, sequences, kv_heads] int32
    page_tables: [sequences, max_pages] int32, negative where there is no page; a block is cached if all its pages are
    """
    check_backend("count_missing_blocks", backend)
    layers, sequences, _, width = lists.shape
    if backend == "torch":
        pages = pages_of_blocks(line_of.shape[1], lists, counts, page_tables, pages_per_block)
        row = torch.arange(layers, device=lists.device)[:, None, None, None]
        absent = (pages >= 0) & (line_of[row, pages.clamp(min=0).long()] < 0)
        return absent.unflatten(3, (width, pages_per_block)).any(4).sum((0, 2, 3), dtype=torch.int32)
    if not (lists.is_contiguous() and counts.is_contiguous()):
        raise ValueError("count_missing_blocks: the Triton backend needs contiguous lists and counts")
    missing = torch.zeros(sequences, dtype=torch.int32, device=lists.device)
    _count_missing_blocks_kernel[(layers * sequences * kv_heads,)](
        *(line_of, lists, counts, page_tables, missing, width, line_of.shape[1], page_tables.shape[1], sequences),
        KV_HEADS=kv_heads,
        PER_BLOCK=pages_per_block,
        CHUNK=min(1024, power_of_two(width)),
    )
    return missing


@jit
def _count_missing_blocks_kernel(
    line_of_ptr,
    lists_ptr,
    counts_ptr,
    page_tables_ptr,
    missing_ptr,
    width,
    pages,
    table_width,
    sequences,
    KV_HEADS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One list a program."""
    row = tl.program_id(0).to(tl.int64)
    head = row % KV_HEADS
    sequence = row // KV_HEADS % sequences
    layer = row // KV_HEADS // sequences
    count = tl.minimum(tl.load(counts_ptr + row), width)
    lists_ptr += row * width
    missing = count * 0
    for start in tl.range(0, count, CHUNK):
        place = start + tl.arange(0, CHUNK)
        listed = place < count
        block = tl.load(lists_ptr + place, mask=listed, other=0)
        is_missing = place < 0
        for part in tl.static_range(PER_BLOCK):
            logical = block * PER_BLOCK + part
            there = listed & (logical < table_width)
            page = tl.load(page_tables_ptr + sequence * table_width + logical, mask=there, other=-1)
            there = there & (page >= 0)
            at = layer * pages + page.to(tl.int64) * KV_HEADS + head
            is_missing = is_missing | (there & (tl.load(line_of_ptr + at, mask=there, other=0) < 0))
        missing += tl.sum(is_missing.to(tl.int32), 0)
    tl.atomic_add(missing_ptr + sequence, missing, sem="relaxed")
