"""Causal dense attention of prompts over paged KV by cuDNN, which comes with torch.

A part of a prompt attends to all keys before it, and causally to its own. Keys and values are copied out of their
pages, a piece of the sequence at a time, and the pieces' results are merged (kernels/merged_attention.py). The copies
take a hundredth of the time of the arithmetic, at which cuDNN is three times as fast as our Triton kernel on an H200.
cuDNN plans each new shape for some 50 ms: pieces have few sizes.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.kernels.backends import default_backend
from specahead.kernels.merged_attention import merge_attended

PIECE = 65536  # tokens whose keys are copied at once, at most
STEP = 4096  # tokens; what longer pieces are a multiple of
UNIT = 512  # tokens; what all pieces are a multiple of


@dataclass(frozen=True)
class PromptPart:
    """The reads of one sequence's new tokens: of its own piece, and of the pieces before it.

    Places of a piece are int64 [kv_heads * pages of the piece]: rows of the pages taken as [pages * kv_heads,
    page_size * head_dim].
    """

    rows: slice  # the queries of the new tokens in the pass
    skipped: int  # tokens of the own piece before the first new one
    size: int  # tokens of the own piece, filling included
    before: list[Tensor]  # places of the pieces before it
    own: Tensor  # places of the own piece


@dataclass(frozen=True)
class PromptReads:
    """The reads of a pass over prompts."""

    parts: list[PromptPart]  # in the order of their rows
    room: Tensor  # [2, elements], where keys and values are copied to, in every layer
    cudnn: bool  # whether cuDNN attends; else torch does


def cudnn_attends(dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether cuDNN attends with heads of `dim` dimensions of `dtype` on a device."""
    if device.type != "cuda" or not torch.backends.cudnn.is_available():
        return False
    fits = dim % 8 == 0 and dim <= 128 and dtype in (torch.bfloat16, torch.float16)
    return fits and torch.cuda.get_device_capability(device) >= (8, 0)


def make_room(tokens: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return room for the pieces of sequences of up to `tokens` tokens.

    It is made once: otherwise larger rooms would be allocated one by one as prompts grow.
    """
    return torch.empty(2, min(PIECE, size_of_own(tokens)) * kv_heads * dim, dtype=dtype, device=device)


def plan_prompts(
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: Tensor,
    kv_heads: int,
    page_size: int,
    room: Tensor,
    cudnn: bool,
) -> PromptReads:
    """Return the reads of each sequence with queries, which are its last tokens, made once for all layers of a pass.

    starts: the first query row of each sequence, and where the last one ends. lengths: tokens of each with KV, the
    queries' own included. tables: [sequences, max_pages] int32, on the device. room: as `make_room` gives it for the
    longest sequence.
    Raises ValueError for more queries of a sequence than a piece may have.
    """
    heads = torch.arange(kv_heads, device=tables.device)[:, None]

    def places(pages: Tensor) -> Tensor:
        return (pages.long()[None] * kv_heads + heads).flatten()

    parts = []
    for i, length in enumerate(lengths):
        rows, table = slice(starts[i], starts[i + 1]), tables[i]
        if rows.start == rows.stop:
            continue
        base = length - (rows.stop - rows.start)
        first, size = base - base % UNIT, size_of_own(length - base + base % UNIT)
        if size > PIECE:
            raise ValueError(f"{length - base} tokens of a prompt in one pass, at most {PIECE}: lower prefill_chunk")
        pieces = [places(table[a // page_size : b // page_size]) for a, b in pieces_before(first)]
        # Pages that fill the own piece up come after every query, which gives them no weight: any page will do.
        held = torch.arange(first // page_size, (first + size) // page_size, device=table.device)
        own = table.index_select(0, held.clamp(max=(length - 1) // page_size))
        parts.append(PromptPart(rows, base % UNIT, size, pieces, places(own)))
    return PromptReads(parts, room, cudnn)


def pieces_before(length: int) -> Iterator[tuple[int, int]]:
    """Cut the first `length` tokens, a multiple of UNIT, into pieces of few sizes."""
    start = 0
    while start < length:
        left = length - start
        size = min(PIECE, left // STEP * STEP) or 1 << (left.bit_length() - 1)
        yield start, start + size
        start += size


def size_of_own(tokens: int) -> int:
    """Return the size of the piece for `tokens` new tokens: one or one and a half times a power of two."""
    size = UNIT
    while size < tokens:
        if size * 3 // 2 >= tokens and size > UNIT:
            return size * 3 // 2
        size *= 2
    return size


def attend_to_prompts(reads: PromptReads, queries: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float) -> Tensor:
    """Return the output [rows, heads, dim]; rows of no part are zeros.

    queries: [rows, heads, dim]. k_pages, v_pages: [pages, kv_heads, page_size, dim].
    """
    out, end, backend = torch.empty_like(queries), 0, default_backend(queries.device)
    for part in reads.parts:
        own = queries[part.rows]
        if len(own) < part.size:
            own = queries.new_zeros(part.size, *queries.shape[1:])
            own[part.skipped : part.skipped + part.rows.stop - part.rows.start] = queries[part.rows]
        own = own.transpose(0, 1)[None]

        def attend(places: Tensor, causal: bool, own: Tensor = own) -> tuple[Tensor, Tensor]:
            keys, values = copy_places((k_pages, v_pages), places, reads.room)
            return attend_to_piece(own, keys[None], values[None], causal, scale, reads.cudnn)

        attended, total = attend(part.own, True)
        for piece in part.before[:-1]:
            merged = torch.empty_like(attended, dtype=torch.float32)
            total = merge_attended(attended, total, *attend(piece, False), merged, backend=backend)
            attended = merged
        here = out[part.rows].transpose(0, 1)[None]
        if part.before:
            merge_attended(attended, total, *attend(part.before[-1], False), here, part.skipped, backend)
        else:
            rows = attended[0, :, part.skipped : part.skipped + here.shape[2]].transpose(0, 1)
            if len(rows) == len(out):
                return rows.contiguous()  # as cuDNN's output is in memory: nothing is copied
            out[part.rows] = rows
        out[end : part.rows.start].zero_()
        end = part.rows.stop
    out[end:].zero_()
    return out


def shapes_of_parts(most: int) -> Iterator[tuple[int, int]]:
    """Yield all sizes of a part's own piece, for up to `most` new tokens at once, each with all sizes of a piece before
    it, 0 for none: the largest first.
    """
    own = sorted({size_of_own(tokens) for tokens in range(UNIT, size_of_own(most) + 1, UNIT)}, reverse=True)
    before = sorted({b - a for tokens in range(0, PIECE + 1, UNIT) for a, b in pieces_before(tokens)})
    yield from itertools.product(own, (0, *before))


def attend_once(own: int, before: int, heads: int, kv_heads: int, dim: int, scale: float, room: Tensor) -> None:
    """Attend with queries of one shape, so that cuDNN plans it.

    own: tokens of a part's own piece. before: tokens of the piece that is attended to; 0: the own one. room: as
    `PromptReads` has it
    """
    tokens = before or own
    queries = torch.zeros(own, heads, dim, dtype=room.dtype, device=room.device).transpose(0, 1)[None]
    keys, values = (each[: kv_heads * tokens * dim].view(1, kv_heads, tokens, dim) for each in room)
    attend_to_piece(queries, keys, values, not before, scale, True)


def merge_in_all_ways(heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Launch every kind of merge that prompts take, so that it is compiled: from each dtype into each."""
    piece = torch.zeros(1, UNIT, heads, dim, dtype=dtype, device=device).transpose(1, 2)
    total = torch.zeros(1, heads, UNIT, 1, device=device)
    for running, into in itertools.product((dtype, torch.float32), repeat=2):
        out = torch.empty_like(piece, dtype=into)
        merge_attended(piece.to(running), total, piece, total, out, backend=default_backend(device))


def copy_places(pages: tuple[Tensor, ...], places: Tensor, room: Tensor) -> list[Tensor]:
    """Copy the KV at `places` of pages to `room`, and return it: [kv_heads, tokens, dim] of each.

    pages: [pages, kv_heads, page_size, dim] each; places: int64, head by head, as `PromptPart` has them.
    """
    _, kv_heads, page_size, dim = pages[0].shape
    copies = []
    for source, own in zip(pages, room, strict=False):
        copy = own[: len(places) * page_size * dim].view(-1, page_size * dim)
        torch.index_select(source.view(-1, page_size * dim), 0, places, out=copy)
        copies.append(copy.view(kv_heads, -1, dim))
    return copies


def attend_to_piece(
    queries: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float, cudnn: bool
) -> tuple[Tensor, Tensor]:
    """Attend with queries [batch, heads, rows, dim] to keys and values [batch, kv_heads, tokens, dim].

    Returns the output, of the queries' shape, and the log-sum-exp of the scores [batch, heads, rows, 1], float32.
    """
    if cudnn:
        out, total = torch.ops.aten._scaled_dot_product_cudnn_attention(
            queries, keys, values, None, True, 0.0, causal, False, scale=scale
        )[:2]
        return out, total
    group = queries.shape[1] // keys.shape[1]
    keys, values = (each.float().repeat_interleave(group, 1) for each in (keys, values))
    scores = queries.float() @ keys.transpose(2, 3) * scale
    if causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ values).to(queries.dtype), scores.logsumexp(-1, keepdim=True)
