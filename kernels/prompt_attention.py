"""Causal dense attention of prompts over paged KV by cuDNN, which torch brings along.

A part of a prompt attends to all keys before it, and causally to its own. Keys and values are copied out of their
pages, a piece of the sequence at a time, and the pieces' results are merged by their log-sum-exp (FlashAttention-2,
arXiv 2307.08691, section 3.1). The copies are a hundredth of the arithmetic, at which cuDNN is three times as fast as
our Triton kernel on an H200 (docs/performance.md). cuDNN plans each new shape for some 50 ms: pieces have few sizes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 65536  # tokens whose keys are copied at once, at most
STEP = 4096  # tokens; what longer pieces are a multiple of
UNIT = 512  # tokens; what all pieces are a multiple of


@dataclass(frozen=True)
class PromptPart:
    """What the new tokens of one sequence read.

    rows: their queries in the pass. skipped: tokens before the first of them that its own piece begins with. size:
    tokens of its own piece, those that fill it up included. before, own: where the pages of the pieces before it and
    of its own lie: int64 [kv_heads * pages of the piece], rows of the pages taken as [pages * kv_heads, page_size *
    head_dim].
    """

    rows: slice
    skipped: int
    size: int
    before: list[Tensor]
    own: Tensor


@dataclass(frozen=True)
class PromptReads:
    """What a pass over prompts reads. room: [2, elements], where keys and values are copied to, of every layer."""

    parts: list[PromptPart]
    room: Tensor


def cudnn_attends(dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether cuDNN attends with heads of `dim` dimensions of `dtype` on a device."""
    if device.type != "cuda" or not torch.backends.cudnn.is_available():
        return False
    fits = dim % 8 == 0 and dim <= 128 and dtype in (torch.bfloat16, torch.float16)
    return fits and torch.cuda.get_device_capability(device) >= (8, 0)


def make_room(tokens: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return room for the pieces of sequences of up to so many tokens.

    It is made once: rooms of many sizes would have to be allocated one by one as prompts grow.
    """
    return torch.empty(2, min(PIECE, size_of_own(tokens)) * kv_heads * dim, dtype=dtype, device=device)


def plan_prompts(
    starts: Sequence[int], lengths: Sequence[int], tables: Tensor, kv_heads: int, page_size: int, room: Tensor
) -> PromptReads:
    """Return what each sequence with queries reads; made once for all layers of a pass.

    starts: the first query row of each sequence, and where the last one ends. lengths: tokens of each with KV, the
    queries' own included. tables: [sequences, max_pages] int32, on the device. room: of `make_room`, for the longest.
    Raises ValueError for more queries of a sequence than a piece may have.
    """
    heads = torch.arange(kv_heads, device=tables.device)[:, None]

    def places(pages: Tensor) -> Tensor:
        return (pages.long()[None] * kv_heads + heads).flatten()

    parts = []
    for i, length in enumerate(lengths):
        rows = slice(starts[i], starts[i + 1])
        if rows.start == rows.stop:
            continue
        base = length - (rows.stop - rows.start)
        skipped = base % UNIT
        first, size = base - skipped, size_of_own(length - base + skipped)
        pieces = [places(tables[i, a // page_size : b // page_size]) for a, b in pieces_before(first)]
        if size > PIECE:
            raise ValueError(f"{length - base} tokens of a prompt in one pass, at most {PIECE}: lower prefill_chunk")
        # What fills the piece up comes after every query: no weight is given to it, whatever page it is.
        held = torch.arange(first // page_size, (first + size) // page_size, device=tables.device)
        own = tables[i].index_select(0, held.clamp(max=(length - 1) // page_size))
        parts.append(PromptPart(rows, skipped, size, pieces, places(own)))
    return PromptReads(parts, room)


def pieces_before(length: int) -> Iterator[tuple[int, int]]:
    """Cut the first `length` tokens, a multiple of UNIT, into pieces of few sizes."""
    start = 0
    while start < length:
        left = length - start
        size = min(PIECE, left // STEP * STEP) or 1 << (left.bit_length() - 1)
        yield start, start + size
        start += size


def size_of_own(tokens: int) -> int:
    """Return the size of the piece that so many tokens are filled up to: one or one and a half times a power of two."""
    size = UNIT
    while size < tokens:
        if size * 3 // 2 >= tokens and size > UNIT:
            return size * 3 // 2
        size *= 2
    return size


def attend_to_prompts(
    reads: PromptReads, queries: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, cudnn: bool = True
) -> Tensor:
    """Return the output [rows, heads, dim]; rows of no part are zeros.

    queries: [rows, heads, dim]. k_pages, v_pages: [pages, kv_heads, page_size, dim]. cudnn: False: by torch, anywhere.
    """
    out = torch.zeros_like(queries)
    for part in reads.parts:
        count = part.rows.stop - part.rows.start
        filled = queries[part.rows]
        if count < part.size:
            filled = queries.new_zeros(part.size, *queries.shape[1:])
            filled[part.skipped : part.skipped + count] = queries[part.rows]
        own = filled.transpose(0, 1)[None]
        attended, total = _attend(own, *_copy(k_pages, v_pages, part.own, reads.room), True, scale, cudnn)
        if part.before:
            attended = attended.float()
        for piece in part.before:
            of_piece, weight = _attend(own, *_copy(k_pages, v_pages, piece, reads.room), False, scale, cudnn)
            attended.lerp_(of_piece.float(), torch.sigmoid(weight - total))
            total = torch.logaddexp(total, weight)
        out[part.rows] = attended[0, :, part.skipped : part.skipped + count].transpose(0, 1)
    return out


def _copy(k_pages: Tensor, v_pages: Tensor, places: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the keys and values of a piece to `room`, and return them: [1, kv_heads, tokens, dim] each."""
    _, kv_heads, page_size, dim = k_pages.shape
    copies = []
    for pages, own in zip((k_pages, v_pages), room, strict=True):
        copy = own[: len(places) * page_size * dim].view(-1, page_size * dim)
        torch.index_select(pages.view(-1, page_size * dim), 0, places, out=copy)
        copies.append(copy.view(1, kv_heads, -1, dim))
    return copies[0], copies[1]


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float, cudnn: bool
) -> tuple[Tensor, Tensor]:
    """Return the output [1, heads, rows, dim] and the log-sum-exp of the scores [1, heads, rows, 1], float32."""
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
