"""How the work of the Triton attention kernel is shared out, made on the device from lengths and lists.

Nothing is planned on the host: where items begin in the row of tiles is a cumulative sum on the device. So these
launches can stand in a CUDA graph.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from specahead.kernels.backends import jit, power_of_two, tl
from specahead.kernels.paged_attention.inputs import BlockLists, GroupMeans
from specahead.kernels.paged_attention.items import first_tile

MAX_ROWS = 64  # of a tile of queries: heads of a group times queries
LEAST_ROWS = 16  # that a tile has in any case
GROUP_TILE = 32  # group means that the kernel takes at once
GROUP_TILE_APART = 16  # group means that programs apart take at once, of one warp mostly
# Programs that copy KV (specahead.engine.kv.tiered) for which attention over lists leaves room, each in the place of
# two or of a third of a multiprocessor's. So none has to wait for another to end, which would nearly double the time of
# a layer's attention. The same everywhere: a result does not depend on where its KV comes from.
LEFT_FREE = 8


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut."""

    tile: int = 128  # tokens
    # Steps in flight. A tile takes two, since where it lies is read from tables: Triton's pipeliner holds one tile in
    # shared memory for 2 to 4 stages (for 3 and 4 also what is read from tables), two for 5 and 6, three for 7 and 8.
    stages: int = 2
    warps: int = 4  # of a program
    programs: int = 2  # of a multiprocessor
    min_tiles: int = 2  # of a program
    # Tiles of one item that a program takes, so that a result depends on nothing else in the batch; 0: equal stretches
    # of all tiles.
    segment: int = 0
    # For pages in 8 bits: whether tokens are the rows of products and queries the columns; else the reverse.
    columns: bool = False
    apart: int = 2  # with columns: further programs for each item, which attend to its group means alone

    def for_tiles_of(self, tokens: int) -> "Tuning":
        """Return this cut with larger tiles, of as many tokens a warp, up to four warps."""
        warps = max(self.warps, min(4, self.warps * tokens // self.tile))
        return replace(self, tile=tokens, warps=warps, programs=max(1, self.programs * self.warps // warps))

    def programs_apart(self, means: GroupMeans | None) -> int:
        """Return how many programs of each item attend to its group means alone."""
        return self.apart if self.columns and means is not None else 0

    @property
    def least_tiles(self) -> int:
        """The least number of tiles of a program, which the kernels divide by."""
        return self.segment or self.min_tiles


@dataclass(frozen=True)
class Work:
    """How work is shared out, as it follows from lengths and lists: for all layers of a step, or for one.

    With a leading dimension for layers, or without:

    tile_starts: [items + 1] int32, where each item's tiles begin
    first_items: [programs] int32, the item that each program begins in
    pieces: [sequences, kv_heads, width * pieces of a block] int32, where listed blocks lie in the pages, in pieces of
        a block or a page, whichever is smaller: (page * kv_heads + head) * pieces of a page + piece
    unread: [sequences, kv_heads, max_groups] int32, tokens of a group that are not read; None without means
    """

    tuning: Tuning
    tile_starts: Tensor
    first_items: Tensor
    pieces: Tensor | None = None
    unread: Tensor | None = None

    def layer(self, index: int) -> "Work":
        every = (self.tile_starts, self.first_items, self.pieces, self.unread)
        return Work(self.tuning, *(None if tensor is None else tensor[index] for tensor in every))  # type: ignore[arg-type]


def plan_work(
    kv_heads: int,
    group: int,
    dim: int,
    max_queries: int,
    block_tables: Tensor,
    kv_lengths: Tensor,
    page_size: int,
    blocks: BlockLists | None = None,
    means: GroupMeans | None = None,
    tuning: Tuning | None = None,
    eight_bit: bool = False,
) -> Work:
    """Return how the work is shared out. The host does not wait, so that a CUDA graph can capture this.

    block_tables, kv_lengths, max_queries: as for `paged_attention`; group: query heads of a KV head; dim: of a head;
    eight_bit: whether pages are in 8 bits.
    blocks: may hold the lists of all layers, [layers, sequences, kv_heads, …]: then the result has a leading dimension
    for layers; `Work.layer` takes one.
    """
    tile_queries, row_tiles = row_tiles_of(max_queries, group)
    block_size = 0 if blocks is None else blocks.block_size
    tuning = tuning or default_tuning(dim, block_size, tile_queries * group, kv_heads, eight_bit)
    longest = block_tables.shape[1] * page_size if blocks is None else blocks.lists.shape[-1] * blocks.block_size
    per_sequence = kv_heads * row_tiles
    starts, first_items = _share_tiles(kv_lengths, longest, per_sequence, row_tiles, blocks, means, tuning)
    if blocks is None:
        return Work(tuning, starts, first_items)
    pieces = _find_pieces(blocks, block_tables, page_size) if blocks.slots is None else blocks.slots
    return Work(tuning, starts, first_items, pieces, None if means is None else _count_unread(blocks, means))


def _share_tiles(
    kv_lengths: Tensor,
    longest: int,
    per_sequence: int,
    row_tiles: int,
    blocks: BlockLists | None,
    means: GroupMeans | None,
    tuning: Tuning,
) -> tuple[Tensor, Tensor]:
    """Return `Work.tile_starts` and first_items.

    longest: tokens that an item reads, at most; per_sequence: items of a sequence.
    """
    device = kv_lengths.device
    items = len(kv_lengths) * per_sequence
    layers = () if blocks is None else blocks.counts.shape[:-2]
    groups = 0 if means is None else means.tables.shape[1]
    apart = 0
    if tuning.columns:
        groups, apart = 0, tuning.programs_apart(means) * items
    tiles = -(-longest // tuning.tile) + -(-groups // GROUP_TILE)  # of an item, at most
    if tuning.segment:
        programs = items * -(-tiles // tuning.segment)
    else:
        room = tuning.programs * _multiprocessors(device)
        if blocks is not None:
            room -= LEFT_FREE * max(2, -(-tuning.programs // 3))
        room -= min(apart, room // 8)
        programs = min(room, -(-items * tiles // tuning.min_tiles))  # more would have nothing to do
    programs = max(1, programs)
    counts = kv_lengths if blocks is None else blocks.counts
    starts = torch.empty(*layers, items + 1, dtype=torch.int32, device=device)
    first_items = torch.empty(*layers, programs, dtype=torch.int32, device=device)
    _tile_starts_kernel[(*layers, 1)](
        tokens_ptr=counts,
        groups_ptr=counts if means is None else means.counts,
        tile_starts_ptr=starts,
        first_items_ptr=first_items,
        items=items,
        programs=programs,
        per_sequence=per_sequence,
        per_tokens=per_sequence if blocks is None else row_tiles,
        UNIT=1 if blocks is None else blocks.block_size,
        TILE=tuning.tile,
        GROUP_TILE=GROUP_TILE,
        MEANS=groups > 0,
        ITEMS=power_of_two(items),
        MIN_TILES=tuning.least_tiles,
        SEGMENT=max(1, tuning.segment),
        PROGRAMS=max(1, 4096 // power_of_two(items)),
    )
    return starts, first_items


def _find_pieces(blocks: BlockLists, block_tables: Tensor, page_size: int) -> Tensor:
    """Return `Work.pieces`."""
    width, per_block = blocks.lists.shape[-1], max(1, blocks.block_size // page_size)
    shape = (*blocks.counts.shape, width * per_block)
    pieces = torch.empty(shape, dtype=torch.int32, device=blocks.lists.device)
    sequences, kv_heads = blocks.counts.shape[-2:]
    _pieces_kernel[(blocks.counts.numel(), -(-width * per_block // 1024) or 1)](
        blocks.lists,
        blocks.counts,
        block_tables,
        pieces,
        list_width=width,
        table_stride=block_tables.shape[1],
        sequences=sequences,
        KV_HEADS=kv_heads,
        PER_BLOCK=per_block,
        PER_PAGE=max(1, page_size // blocks.block_size),
        CHUNK=1024,
    )
    return pieces


def _count_unread(blocks: BlockLists, means: GroupMeans) -> Tensor:
    """Return `Work.unread`."""
    shape = (*blocks.counts.shape, max(1, means.tables.shape[1]))
    unread = torch.empty(shape, dtype=torch.int32, device=blocks.lists.device)
    _unread_kernel[(blocks.counts.numel(),)](
        blocks.lists,
        blocks.counts,
        unread,
        list_width=blocks.lists.shape[-1],
        group_stride=shape[-1],
        PER_GROUP=means.group_size // blocks.block_size,
        BLOCK=blocks.block_size,
        GROUPS=power_of_two(shape[-1]),
        CHUNK=512,
    )
    return unread


def default_tuning(dim: int, block_size: int, rows: int, kv_heads: int, eight_bit: bool = False) -> Tuning:
    """Return the fastest cut measured on an H200: as many tiles in flight as shared memory holds.

    block_size: tokens of a listed block, 0 without lists; rows: of a tile. For more than 32 rows Triton keeps keys and
    values in other places of it: 148 KB a program with tiles of 128 tokens, so that a multiprocessor holds one program
    and not two; 82 KB with tiles of 64 (compiled for sm_90, not measured). Where there are hardly any KV heads, lists
    are short in all, and are read sooner by more and smaller programs.
    """
    if eight_bit:
        return _tuning_of_eight_bit(dim, rows, bool(block_size))
    if dim > 64:
        if rows > 32:
            return Tuning(tile=64, stages=3)
        if rows > 16:
            return Tuning()
        return Tuning(programs=3) if block_size else Tuning(stages=3)
    if rows <= 16:
        if 0 < block_size <= 32 and kv_heads <= 2:
            return Tuning(tile=32, warps=1, programs=12)
        return Tuning(tile=64, stages=4 if block_size else 3, warps=2, programs=6)
    return Tuning(programs=3) if block_size else Tuning(stages=3, programs=3)


def _tuning_of_eight_bit(dim: int, rows: int, of_lists: bool) -> Tuning:
    """Return a cut for pages in 8 bits, for up to 40 rows of 128 dimensions the fastest measured on an H200.

    A program of one warp waits for no other one. It has the registers for 16 rows and for 32 columns of 128 dimensions.
    Heads of 256 dimensions are not measured.
    """
    if rows <= 16 and not of_lists:
        return Tuning(tile=32, stages=4, warps=1, programs=8)
    if dim > 128:
        return Tuning(tile=32, stages=3, columns=True)
    if rows <= 32:
        return Tuning(tile=32, stages=3 if of_lists else 5, warps=1, programs=8, columns=True)
    return Tuning(tile=64, stages=3, warps=2, programs=4, columns=True)


def pinned_tuning(dim: int, group: int, max_queries: int, eight_bit: bool = False) -> Tuning:
    """Return a tuning whose results depend on nothing else in the batch, as long as `max_queries` is the same."""
    tile_queries, _ = row_tiles_of(max_queries, group)
    tuning = default_tuning(dim, 0, max(32, tile_queries * group), 1, eight_bit)
    return replace(tuning, segment=64 if tuning.warps == 1 else 32)


def row_tiles_of(max_queries: int, group: int) -> tuple[int, int]:
    """Return how many queries a tile of rows has, and how many such tiles cover `max_queries`."""
    queries = min(max_queries, max(1, MAX_ROWS // group))
    return queries, -(-max_queries // queries)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter: enough programs for items to be split
        return 10
    return torch.cuda.get_device_properties(device).multi_processor_count


@jit
def _tile_starts_kernel(
    tokens_ptr,
    groups_ptr,
    tile_starts_ptr,
    first_items_ptr,
    items,
    programs,
    per_sequence,
    per_tokens,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    MEANS: tl.constexpr,
    ITEMS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SEGMENT: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Store where each item's tiles begin, [items + 1], and in which item each program of the attention begins.

    One program a layer. A count of tokens serves per_tokens items.
    """
    layer = tl.program_id(0)
    item = tl.arange(0, ITEMS)
    inside = item < items
    at = layer * (items // per_tokens) + item // per_tokens
    tiles = tl.cdiv(tl.load(tokens_ptr + at, mask=inside, other=0) * UNIT, TILE)
    if MEANS:
        tiles += tl.cdiv(tl.load(groups_ptr + item // per_sequence, mask=inside, other=0), GROUP_TILE)
    tiles = tl.cdiv(tiles, SEGMENT) * SEGMENT
    tile_starts_ptr += layer * (items + 1)
    tl.store(tile_starts_ptr, 0)
    ends = tl.cumsum(tiles, 0)
    tl.store(tile_starts_ptr + 1 + item, ends, mask=inside)
    total = tl.sum(tiles, 0)
    for chunk in tl.range(0, programs, PROGRAMS):
        program = chunk + tl.arange(0, PROGRAMS)
        first = first_tile(program, total, programs, MIN_TILES)
        before = (ends[None, :] <= first[:, None]) & inside[None, :]
        first_item = tl.sum(before.to(tl.int32), 1)
        tl.store(first_items_ptr + layer * programs + program, first_item, mask=program < programs)


@jit
def _pieces_kernel(
    lists_ptr,
    counts_ptr,
    tables_ptr,
    pieces_ptr,
    list_width,
    table_stride,
    sequences,
    KV_HEADS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    PER_PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Turn logical blocks into places in the pages (`Work.pieces`); a row is a (layer, sequence, KV head)."""
    row = tl.program_id(0)
    kv_head = row % KV_HEADS
    sequence = (row // KV_HEADS) % sequences
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = place < tl.load(counts_ptr + row) * PER_BLOCK
    block = tl.load(lists_ptr + row * list_width + place // PER_BLOCK, mask=inside, other=0)
    piece = block * PER_BLOCK + place % PER_BLOCK
    logical = piece // PER_PAGE
    # A last block of several pages may reach beyond the table; those tokens lie beyond the length too.
    page = tl.load(tables_ptr + sequence * table_stride + logical, mask=inside & (logical < table_stride), other=0)
    at = (page * KV_HEADS + kv_head) * PER_PAGE + piece % PER_PAGE
    tl.store(pieces_ptr + row * (list_width * PER_BLOCK) + place, at, mask=inside)


@jit
def _unread_kernel(
    lists_ptr,
    counts_ptr,
    unread_ptr,
    list_width,
    group_stride,
    PER_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count the tokens of each group that a list leaves out; one program a (layer, sequence, KV head)."""
    row = tl.program_id(0)
    count = tl.load(counts_ptr + row)
    read = tl.zeros([GROUPS], tl.int32)
    for first in tl.range(0, count, CHUNK):
        place = first + tl.arange(0, CHUNK)
        inside = place < count
        group = tl.load(lists_ptr + row * list_width + place, mask=inside, other=0) // PER_GROUP
        # Blocks after the last whole group belong to none.
        read += tl.histogram(tl.where(inside & (group < GROUPS), group, 0), GROUPS, mask=inside & (group < GROUPS))
    group = tl.arange(0, GROUPS)
    tl.store(unread_ptr + row * group_stride + group, (PER_GROUP - read) * BLOCK, mask=group < group_stride)
