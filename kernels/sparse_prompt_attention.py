"""Block-sparse causal attention of prompts over paged KV: each unit of queries reads the blocks that weigh most for it.

A unit is UNIT neighbouring tokens of a prompt. It attends causally to its own tokens and, of those before it, to as
many blocks of BLOCK tokens as its share of them says. Each KV head chooses its own, by an estimate that costs a
thousandth of dense attention: a sample of the unit's queries attends to the mean keys of blocks, as the mean queries of
MInference (arXiv 2407.02490) and FlexPrefill (arXiv 2502.20766) do. Chosen blocks are copied side by side, so that
attention to them is dense, by cuDNN on a GPU. All units of a part of a prompt read the same number of blocks: its time
follows from the share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.kernels.backends import default_backend, power_of_two
from specahead.kernels.merged_attention import merge_attended
from specahead.kernels.prompt_attention import (
    PIECE,
    UNIT,
    PromptPart,
    PromptReads,
    attend_to_piece,
    attend_to_prompts,
    copy_places,
    filled_up,
    own_pages,
    pieces_before,
    plan_part,
)

BLOCK = 64  # tokens; a unit reads whole blocks
WINDOW = 2  # blocks before a unit that it always reads, like the first block of all
SAMPLE = 16  # every SAMPLE-th query of a unit takes part in the choice


@dataclass(frozen=True)
class SparsePart:
    """The reads of one sequence's new tokens."""

    rows: slice  # the queries of the new tokens in the pass
    skipped: int  # tokens of the first unit before the first new one
    units: int  # units that the new tokens lie in
    first: int  # tokens before these units
    chosen: int  # blocks before it that each unit reads
    pages: Tensor  # int64, pages of the sequence up to the end of the last unit


@dataclass(frozen=True)
class SparsePromptReads:
    """The reads of a pass over prompts: parts that read a share of the tokens before them, and parts that read all."""

    parts: list[SparsePart]
    dense: PromptReads


def plan_sparse_prompts(
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: Tensor,
    kv_heads: int,
    page_size: int,
    room: Tensor,
    cudnn: bool,
    share: float,
) -> SparsePromptReads:
    """Return the reads of each sequence with queries, where a unit reads at least `share` of the tokens up to it.

    The arguments before are those of `plan_prompts`. Parts with no more than that before them read everything. Raises
    ValueError for more queries of a sequence than a piece may have.
    """
    parts: list[SparsePart] = []
    dense: list[PromptPart] = []
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        if rows.start == rows.stop:
            continue
        base, chosen = length - (rows.stop - rows.start), blocks_read(share, length)
        skipped = base % UNIT
        first, units = base - skipped, -(-(length - base + skipped) // UNIT)
        if chosen * BLOCK >= first or units * UNIT > PIECE:
            dense.append(plan_part(rows, length, tables[i], kv_heads, page_size))
        else:
            pages = own_pages(tables[i], 0, first + units * UNIT, length, page_size).long()
            parts.append(SparsePart(rows, skipped, units, first, chosen, pages))
    return SparsePromptReads(parts, PromptReads(dense, room, cudnn))


def blocks_read(share: float, length: int) -> int:
    """Return how many blocks each unit reads, in a part that ends at the token `length`: no fewer than its share.

    There are four sizes from one power of two to the next, as cuDNN plans each anew, and PIECE tokens are the most.
    """
    asked = max(1 + WINDOW, math.ceil(share * length / BLOCK))
    step = max(1, power_of_two(asked) // 8)
    return min(PIECE // BLOCK, -(-asked // step) * step)


def attend_sparsely(
    reads: SparsePromptReads, queries: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float
) -> Tensor:
    """Return the output [rows, heads, dim]; rows of no part are zeros.

    queries: [rows, heads, dim]. k_pages, v_pages: [pages, kv_heads, page_size, dim].
    """
    out = attend_to_prompts(reads.dense, queries, k_pages, v_pages, scale)
    for part in reads.parts:
        filled = filled_up(queries[part.rows], part.skipped, part.units * UNIT)
        of_units = filled.view(part.units, UNIT, *filled.shape[1:]).transpose(1, 2)
        chosen = choose_blocks(part, of_units, k_pages, reads.dense.room, scale)
        attended = _attend_to_chosen(part, chosen, of_units, (k_pages, v_pages), reads.dense, scale)
        end = part.skipped + part.rows.stop - part.rows.start
        out[part.rows] = attended.transpose(1, 2).flatten(0, 1)[part.skipped : end]
    return out


def choose_blocks(part: SparsePart, queries: Tensor, k_pages: Tensor, room: Tensor, scale: float) -> Tensor:
    """Return the blocks that each unit of a part reads, for each KV head: int64 [units, kv_heads, part.chosen].

    queries: [units, heads, UNIT, dim].
    """
    kv_heads, dim = k_pages.shape[1], k_pages.shape[3]
    means = _block_means(part, k_pages, room)
    sample = queries[:, :, SAMPLE - 1 :: SAMPLE].unflatten(1, (kv_heads, -1))  # [units, kv_heads, group, sample, dim]
    rows = sample.transpose(0, 1).reshape(kv_heads, -1, dim)
    scores = (rows @ means.mT).float().mul_(scale).unflatten(1, (part.units, -1))
    before = (part.first + UNIT * torch.arange(part.units, device=queries.device)) // BLOCK
    block = torch.arange(scores.shape[3], device=queries.device)
    later = block >= before[:, None]  # [units, blocks]
    weights = scores.masked_fill_(later[:, None], -torch.inf).softmax(3).sum(2)
    always = ~later & ((block == 0) | (block >= before[:, None] - WINDOW))
    # A block before the unit may have a weight of 0, too.
    weights = weights.masked_fill_(later, -1.0).masked_fill_(always, torch.inf)
    return weights.topk(part.chosen, 2).indices.transpose(0, 1)


def _block_means(part: SparsePart, k_pages: Tensor, room: Tensor) -> Tensor:
    """Return the mean keys of the blocks before a part's last unit: [kv_heads, blocks, dim]."""
    heads = torch.arange(k_pages.shape[1], device=part.pages.device)[:, None]
    means = []
    for start, stop in pieces_before(part.first + (part.units - 1) * UNIT):
        pages = part.pages[start // k_pages.shape[2] : stop // k_pages.shape[2]]
        (keys,) = copy_places((k_pages,), (pages * len(heads) + heads).flatten(), room)
        means.append(keys.unflatten(1, (-1, BLOCK)).mean(2))
    return torch.cat(means, 1)


def _attend_to_chosen(
    part: SparsePart, chosen: Tensor, queries: Tensor, pages: tuple[Tensor, Tensor], reads: PromptReads, scale: float
) -> Tensor:
    """Return the output of all units, [units, heads, UNIT, dim], over their own tokens and the chosen blocks."""
    _, kv_heads, page_size, dim = pages[0].shape
    heads = torch.arange(kv_heads, device=chosen.device)[:, None]
    places = part.pages[part.first // page_size :] * kv_heads + heads
    own = (each.unflatten(1, (part.units, UNIT)) for each in copy_places(pages, places.flatten(), reads.room))
    keys, values = (each.transpose(0, 1) for each in own)
    attended, total = attend_to_piece(queries, keys, values, True, scale, reads.cudnn)
    at_once = power_of_two(max(1, reads.room.shape[1] // (part.chosen * BLOCK * kv_heads * dim)) + 1) // 2
    of_blocks, backend = part.pages.view(-1, BLOCK // page_size), default_backend(queries.device)
    for start in range(0, part.units, at_once):
        here = slice(start, start + at_once)
        places = of_blocks[chosen[here]].flatten(2) * kv_heads + heads
        copies = copy_places(pages, places.flatten(), reads.room)
        keys, values = (each.view(-1, kv_heads, part.chosen * BLOCK, dim) for each in copies)
        of_chosen, weight = attend_to_piece(queries[here], keys, values, False, scale, reads.cudnn)
        merge_attended(attended[here], total[here], of_chosen, weight, attended[here], backend=backend)
    return attended
