"""Which experts a router chooses for each row, and which tile multiplies which rows by which expert.

All of it stays on the device, in shapes that do not depend on the choice. In Triton two launches do it, where torch
takes about forty: at few rows these would take longer than reading the experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, follow, jit, overlapping_launch, power_of_two, tl

_SIZES = 16, 64, 128  # rows of a tile
# Rows of a program: few, so that a step's rows go to several programs; of prompts more, so that there are fewer counts.
_FEW, _MANY = 4, 32
_MOST_OF_FEW = 256  # rows that go by _FEW


class Choice(NamedTuple):
    """The experts of each row."""

    ids: Tensor
    """[rows, chosen] int32, the likeliest first."""
    weights: Tensor
    """[rows, chosen] float32."""
    counts: Tensor | None
    """[blocks, experts] int32: how many rows of each block of rows chose an expert; None: torch has none."""


class Tiles(NamedTuple):
    """Pairs of a row and an expert, sorted by expert and cut into tiles of at most `size` pairs of one expert.

    There is room for as many tiles as there can be; those behind the last are empty.
    """

    order: Tensor
    """[pairs] int32: the pairs in their order. Pair p is number p % chosen of row p // chosen."""
    experts: Tensor
    """[tiles] int32: the expert of each tile; any, where a tile is empty."""
    starts: Tensor
    """[tiles] int32: the place of a tile's first pair in that order."""
    ends: Tensor
    """[tiles] int32: the place behind its last pair."""
    size: int
    """Pairs of a tile, at most."""


def tile_rows(pairs: int, experts: int) -> int:
    """Return the rows of a tile: the least size with which an expert's even share of the pairs fills at most four."""
    return next((size for size in _SIZES if pairs <= 4 * size * experts), _SIZES[-1])


def count_tiles(pairs: int, experts: int, size: int) -> int:
    """Return how many tiles there can be: one for each expert's first pair, one more for each `size` further ones."""
    begun = min(pairs, experts)
    return begun + (pairs - begun) // size


def choose_experts(logits: Tensor, chosen: int, renormed: bool, backend: Backend = "torch") -> Choice:
    """Return each row's likeliest experts, and their weights by a softmax over all experts.

    logits: [rows, experts], or [parts, rows, experts] to be summed. renormed: whether a row's weights are scaled to a
    sum of 1. Of equal experts Triton takes the first.
    """
    if backend == "torch":
        wide = logits.float() if logits.dim() == 2 else logits.float().sum(0)
        weights, ids = wide.softmax(-1).topk(chosen)
        return Choice(ids.int(), weights / weights.sum(-1, keepdim=True) if renormed else weights, None)
    rows, experts = logits.shape[-2:]
    of_program = _FEW if rows <= _MOST_OF_FEW else _MANY
    blocks = -(-rows // of_program)
    choice = Choice(
        ids=torch.empty(rows, chosen, dtype=torch.int32, device=logits.device),
        weights=torch.empty(rows, chosen, dtype=torch.float32, device=logits.device),
        counts=torch.empty(blocks, experts, dtype=torch.int32, device=logits.device),
    )
    _choose_kernel[(blocks,)](
        *(logits, choice, rows),
        experts=experts,
        PARTS=1 if logits.dim() == 2 else len(logits),
        CHOSEN=chosen,
        RENORMED=renormed,
        ROWS=of_program,
        EXPERTS=power_of_two(experts),
        num_warps=4,
        **overlapping_launch(logits.device),
    )
    return choice


def plan_tiles(choice: Choice, experts: int, size: int, backend: Backend = "torch") -> Tiles:
    """Return the tiles of at most `size` pairs. Launches only. Triton takes what its `choose_experts` has returned."""
    pairs, device = choice.ids.numel(), choice.ids.device
    most = count_tiles(pairs, experts, size)
    if backend == "torch":
        flat = choice.ids.flatten().long()
        counts = torch.zeros(experts, dtype=torch.int64, device=device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        needed = (counts + size - 1) // size
        behind = needed.cumsum(0)
        tile = torch.arange(most, device=device)
        expert = torch.searchsorted(behind, tile, right=True).clamp(max=experts - 1)
        ends_of_expert = counts.cumsum(0)[expert]
        starts = ends_of_expert - counts[expert] + (tile - (behind - needed)[expert]) * size
        starts = starts.where(tile < behind[-1], ends_of_expert)
        ends = torch.minimum(starts + size, ends_of_expert)
        return Tiles(flat.argsort(stable=True).int(), expert.int(), starts.int(), ends.int(), size)
    assert choice.counts is not None
    rows, chosen = choice.ids.shape
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    expert_of, starts, ends = (torch.empty(most, dtype=torch.int32, device=device) for _ in range(3))
    few = rows <= _MOST_OF_FEW
    _plan_kernel[(len(choice.counts),)](
        choice.ids,
        choice.counts,
        order,
        expert_of,
        starts,
        ends,
        rows,
        len(choice.counts),
        most,
        experts=experts,
        CHOSEN=chosen,
        SIZE=size,
        ROWS=_FEW if few else _MANY,
        BLOCKS=16 if few else 64,
        EXPERTS=power_of_two(experts),
        num_warps=4,
        **overlapping_launch(device),
    )
    return Tiles(order, expert_of, starts, ends, size)


@jit
def _choose_kernel(
    logits_ptr,
    choice,
    rows,
    experts: tl.constexpr,
    PARTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    RENORMED: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose for a block of ROWS rows. Whatever the logits are, also none, a row's experts differ from one another."""
    follow(PDL)
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, EXPERTS)
    exists, of_row = (expert < experts)[None, :], row < rows
    there = of_row[:, None] & exists
    at = row[:, None] * experts + expert[None, :]
    logits = tl.zeros([ROWS, EXPERTS], tl.float32)
    for part in tl.static_range(PARTS):
        logits += tl.load(logits_ptr + part * rows * experts + at, mask=there, other=0.0).to(tl.float32)
    likelihoods = tl.exp(logits - tl.max(tl.where(exists, logits, float("-inf")), 1)[:, None])
    likelihoods = tl.where(exists & (likelihoods == likelihoods), likelihoods, 0.0)
    likelihoods /= tl.maximum(tl.sum(likelihoods, 1), 1e-30)[:, None]
    left = tl.where(exists, likelihoods, -1.0)
    number_of = tl.full([ROWS, EXPERTS], -1, tl.int32)
    for number in tl.static_range(CHOSEN):
        best = tl.argmax(left, 1)
        is_best = expert[None, :] == best[:, None]
        number_of, left = tl.where(is_best, number, number_of), tl.where(is_best, -1.0, left)
        tl.store(choice.ids + row * CHOSEN + number, best, mask=of_row)
    is_chosen = (number_of >= 0) & there
    if RENORMED:
        likelihoods /= tl.maximum(tl.sum(tl.where(is_chosen, likelihoods, 0.0), 1), 1e-30)[:, None]
    tl.store(choice.weights + row[:, None] * CHOSEN + number_of, likelihoods, mask=is_chosen)
    counts = tl.sum(is_chosen.to(tl.int32), 0)
    tl.store(choice.counts + tl.program_id(0) * experts + expert, counts, mask=expert < experts)


@jit
def _plan_kernel(
    ids_ptr,
    counts_ptr,
    order_ptr,
    experts_ptr,
    starts_ptr,
    ends_ptr,
    rows,
    blocks,
    tiles,
    experts: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Place the pairs of a block of ROWS rows; the first program also cuts the tiles."""
    follow(PDL)
    own, expert = tl.program_id(0), tl.arange(0, EXPERTS)
    exists = expert < experts
    before, totals = tl.zeros([EXPERTS], tl.int32), tl.zeros([EXPERTS], tl.int32)
    for at in range(0, blocks, BLOCKS):  # BLOCKS blocks at once
        block = at + tl.arange(0, BLOCKS)
        mask = (block < blocks)[:, None] & exists[None, :]
        counts = tl.load(counts_ptr + block[:, None] * experts + expert[None, :], mask=mask, other=0)
        totals += tl.sum(counts, 0)
        before += tl.sum(tl.where((block < own)[:, None], counts, 0), 0)
    firsts = tl.cumsum(totals, 0) - totals
    row = own * ROWS + tl.arange(0, ROWS)
    number_of = tl.full([ROWS, EXPERTS], -1, tl.int32)
    for number in tl.static_range(CHOSEN):
        chosen = tl.load(ids_ptr + row * CHOSEN + number, mask=row < rows, other=-1)
        number_of = tl.where(expert[None, :] == chosen[:, None], number, number_of)
    is_chosen = (number_of >= 0).to(tl.int32)
    places = (firsts + before)[None, :] + tl.cumsum(is_chosen, 0) - is_chosen
    tl.store(order_ptr + places, row[:, None] * CHOSEN + number_of, mask=is_chosen > 0)
    if own == 0:
        needed = (totals + SIZE - 1) // SIZE
        behind = tl.cumsum(needed, 0)
        for turn in range(0, tl.max(needed, 0)):
            start, tile = firsts + turn * SIZE, behind - needed + turn
            tl.store(experts_ptr + tile, expert, mask=turn < needed)
            tl.store(starts_ptr + tile, start, mask=turn < needed)
            tl.store(ends_ptr + tile, tl.minimum(start + SIZE, firsts + totals), mask=turn < needed)
        for at in range(tl.max(behind, 0), tiles, EXPERTS):
            tl.store(starts_ptr + at + expert, 0, mask=at + expert < tiles)
            tl.store(ends_ptr + at + expert, 0, mask=at + expert < tiles)
