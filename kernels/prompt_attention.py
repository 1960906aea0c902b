"""Causal dense attention of prompts over paged KV by cuDNN and FlashAttention-2, which come with torch.

A part of a prompt attends to all keys before it, and causally to its own. Keys and values are copied out of their
pages, a piece of the sequence at a time, and the pieces' results are merged (kernels/merged_attention.py). The copies
take a hundredth of the time of the arithmetic, at which cuDNN is three times as fast as our Triton kernel on an H200.
cuDNN plans each new shape for some 50 ms: pieces have few sizes.
"""

import itertools
from functools import cache

import torch
from torch import Tensor

from specahead.kernels.backends import default_backend
from specahead.kernels.kv_scales import copy_keys, copy_values
from specahead.kernels.merged_attention import merge_attended
from specahead.kernels.paged_attention import Batch
from specahead.kernels.prompt_reads import UNIT, Ends, PromptPart, PromptReads
from specahead.kernels.ragged_attention import attend_to_last_tokens

TILE = 128  # queries of one of cuDNN's programs


def cudnn_attends(dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether cuDNN attends with heads of `dim` dimensions of `dtype` on a device."""
    if device.type != "cuda" or not torch.backends.cudnn.is_available():
        return False
    fits = dim % 8 == 0 and dim <= 128 and dtype in (torch.bfloat16, torch.float16)
    return fits and torch.cuda.get_device_capability(device) >= (8, 0)


def attend_to_prompts(reads: PromptReads, batch: Batch) -> Tensor:
    """Return the output [rows, heads, dim]; rows of no part are zeros.

    reads: which places of the pages each row reads; tables and lengths of the batch are not looked at.
    """
    out, end = torch.empty_like(batch.queries), 0
    for part in reads.parts:
        if isinstance(part, Ends):
            whole = _attend_to_ends(reads, part, batch, out)
        else:
            whole = _attend_to_part(reads, part, batch, out)
        if whole is not None:
            return whole
        out[end : part.rows.start].zero_()
        end = part.rows.stop
    out[end:].zero_()
    return out


def _attend_to_ends(reads: PromptReads, ends: Ends, batch: Batch, out: Tensor) -> Tensor | None:
    """Write the outputs of short parts to their rows of `out`; or return them, if they are all rows of the pass."""
    keys, values = (each.transpose(0, 1) for each in _copy_places(batch, ends.places, reads.room))
    queries = batch.queries
    attended, total = attend_to_last_tokens(queries[ends.rows], keys, values, ends.ragged, batch.scale, reads.cudnn)
    if len(attended) == len(out) and not any(part.before for part in ends.parts):
        return attended
    for part in ends.parts:
        here = slice(part.rows.start - ends.rows.start, part.rows.stop - ends.rows.start)
        if part.before:
            own = _padded(queries[part.rows], part)
            running = attended[here].transpose(0, 1)[None], total[None, :, here, None]
            _merge_before(reads, part, own, running, batch, out)
        else:
            out[part.rows] = attended[here]
    return None


def _attend_to_part(reads: PromptReads, part: PromptPart, batch: Batch, out: Tensor) -> Tensor | None:
    """Write the output of a part to its rows of `out`; or return it, if it is all rows of the pass."""
    assert part.own is not None
    own = _padded(batch.queries[part.rows], part)
    keys, values = _copy_places(batch, part.own, reads.room)
    attended, total = attend_to_piece(own, keys[None], values[None], True, batch.scale, reads.cudnn)
    if part.before:
        _merge_before(reads, part, own, (attended, total), batch, out)
        return None
    new = part.rows.stop - part.rows.start
    rows = attended[0, :, part.skipped : part.skipped + new].transpose(0, 1)
    if new == len(out):
        return rows.contiguous()  # as cuDNN's output is in memory: nothing is copied
    out[part.rows] = rows
    return None


def _padded(new: Tensor, part: PromptPart) -> Tensor:
    """Return the queries of a part's own piece, [1, heads, size, dim], zeros where it has no new tokens."""
    if len(new) < part.size:
        own = new.new_zeros(part.size, *new.shape[1:])
        own[part.skipped : part.skipped + len(new)] = new
        new = own
    return new.transpose(0, 1)[None]


def _merge_before(
    reads: PromptReads, part: PromptPart, own: Tensor, running: tuple[Tensor, Tensor], batch: Batch, out: Tensor
) -> None:
    """Attend to the pieces before a part, and write the output of all to its rows of `out`.

    own: the queries, as `_padded` returns them. running: the output so far and its log-sum-exp, [1, heads, rows, dim]
    and [1, heads, rows, 1].
    """
    backend = default_backend(out.device)

    def attend(places: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = _copy_places(batch, places, reads.room)
        return attend_to_piece(own, keys[None], values[None], False, batch.scale, reads.cudnn)

    attended, total = running
    for piece in part.before[:-1]:
        merged = torch.empty_like(attended, dtype=torch.float32)
        total = merge_attended(attended, total, *attend(piece), merged, backend=backend)
        attended = merged
    here = out[part.rows].transpose(0, 1)[None]
    merge_attended(attended, total, *attend(part.before[-1]), here, part.skipped, backend)


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
    """Launch every kind of merge that prompts take, so that it is compiled: from each dtype into each, of one piece and
    of two halves.
    """
    pieces = torch.zeros(2, UNIT, heads, dim, dtype=dtype, device=device).transpose(1, 2)
    totals, dtypes, backend = (
        torch.zeros(2, heads, UNIT, 1, device=device),
        (dtype, torch.float32),
        default_backend(device),
    )
    for running, into, count in itertools.product(dtypes, dtypes, (1, 2)):
        out = torch.empty_like(pieces[:1], dtype=into)
        merge_attended(pieces[:1].to(running), totals[:1], pieces[:count], totals[:count], out, backend=backend)


def are_halved(programs: int, processors: int) -> bool:
    """Return whether a launch ends sooner as twice as many programs, each of which reads half of the keys.

    programs: of the launch over all keys. processors: of the GPU; each runs its programs one after another.

    In the last turn some processors have no program. With 1,792 queries of 32
    heads, of 128 queries a program, 448 programs take 132 processors four turns, and 896 take them seven half ones.
    """
    return -(-2 * programs // processors) < 2 * -(-programs // processors)


@cache
def processors_of(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _copy_places(batch: Batch, places: Tensor, room: Tensor) -> list[Tensor]:
    """Copy the KV at `places` of a batch's pages to `room`, and return it: [kv_heads, tokens, dim] of each.

    places: int64, head by head, as `PromptPart` has them.
    """
    size, copies = batch.page_size * batch.dim, []
    for copy_scaled, source, own in zip((copy_keys, copy_values), (batch.k_pages, batch.v_pages), room, strict=True):
        copy = own[: len(places) * size].view(-1, size)
        if batch.scales is None:
            torch.index_select(source.view(-1, size), 0, places, out=copy)
        else:
            copy_scaled(source, places, batch.scales, copy, default_backend(copy.device))
        copies.append(copy.view(batch.kv_heads, -1, batch.dim))
    return copies


def attend_to_piece(
    queries: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float, cudnn: bool
) -> tuple[Tensor, Tensor]:
    """Attend with queries [batch, heads, rows, dim] to keys and values [batch, kv_heads, tokens, dim].

    Returns the output, of the queries' shape, and the log-sum-exp of the scores [batch, heads, rows, 1], float32. Where
    a GPU reads two halves of the keys sooner (`are_halved`), both are of these: [2, ...].
    cudnn: whether cuDNN attends, for a batch of one and an even number of tokens.
    """
    if cudnn:
        if not causal and are_halved(queries.shape[1] * -(-queries.shape[2] // TILE), processors_of(queries.device)):
            heads, tokens, dim = keys.shape[1:]
            keys, values = (each[0].view(heads, 2, tokens // 2, dim).transpose(0, 1) for each in (keys, values))
            queries = queries.expand(2, -1, -1, -1)
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
