"""The pages that lists of blocks name, in torch and for kernels."""

import torch
from torch import Tensor

from specahead.kernels.backends import jit, tl
from specahead.kernels.residency.tables import ListedBlocks


def pages_of_blocks(pages: int, listed_blocks: ListedBlocks) -> Tensor:
    """[rows, sequences, kv_heads, width * pages_per_block] int32: the listed heads' pages, -1 where there is none.

    pages: of all heads, as `ResidencyTables.pages` counts them.
    """
    lists, counts, page_tables = listed_blocks.lists, listed_blocks.counts, listed_blocks.page_tables
    _, sequences, kv_heads, width = lists.shape
    pages_per_block = listed_blocks.pages_per_block
    device, end = lists.device, page_tables.shape[1]
    part = torch.arange(pages_per_block, device=device)
    logical = (lists[..., None].long() * pages_per_block + part).flatten(3)
    place = torch.arange(width * pages_per_block, device=device)
    listed = (place < counts[..., None].long() * pages_per_block) & (logical >= 0) & (logical < end)
    sequence = torch.arange(sequences, device=device)[:, None, None]
    padded = torch.nn.functional.pad(page_tables, (0, 1), value=-1)
    page = padded[sequence, logical.where(listed, end)]
    listed = (page >= 0) & (page < pages // kv_heads)
    head = torch.arange(kv_heads, device=device, dtype=torch.int32)[:, None]
    return torch.where(listed, page, 0) * kv_heads + head.where(listed, 0) - (~listed).int()


@jit
def pages_at(list_ptr, page_table_ptr, place, inside, pages, head, kv_heads, max_pages, PER_BLOCK: tl.constexpr):
    """The head's pages at `place` among all that a list names, and which of them there are."""
    block = tl.load(list_ptr + place // PER_BLOCK, mask=inside, other=-1)
    known = (block >= 0) & (block < (max_pages + PER_BLOCK - 1) // PER_BLOCK)
    logical = block * PER_BLOCK + place % PER_BLOCK
    page = tl.load(page_table_ptr + logical, mask=known & (logical < max_pages), other=-1)
    return page * kv_heads + head, (page >= 0) & (page < pages // kv_heads)
