"""Causal attention of the last tokens of several sequences over contiguous keys, in one launch.

On a GPU by FlashAttention-2 (arXiv 2307.08691), which comes with torch. cuDNN is up to twice as fast over long contexts
(prompt_attention.py), but attends to one sequence at a time, in shapes that it has to plan before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """Which keys each sequence reads: its queries are the last of its tokens, and each reads up to its own."""

    query_starts: Tensor
    """[sequences + 1] int32: the first query of each, and where the last one ends."""
    key_starts: Tensor
    """[sequences + 1] int32: the first key of each, and where the room of the last one ends."""
    used: Tensor
    """[sequences] int32: the keys of each, of those that it has room for."""
    most_queries: int
    """Of a sequence."""
    most_keys: int
    """That a sequence has room for."""


def attend_to_last_tokens(
    queries: Tensor, keys: Tensor, values: Tensor, ragged: Ragged, scale: float, fused: bool
) -> tuple[Tensor, Tensor]:
    """Return the output [queries, heads, dim], and the log-sum-exp of the scores [heads, queries] float32.

    queries: [queries, heads, dim]; keys, values: [keys, kv_heads, dim], of any strides of the first two. fused: whether
    FlashAttention attends, which takes 16-bit numbers on a GPU; else torch does.
    """
    if fused:
        starts, most = (ragged.query_starts, ragged.key_starts), (ragged.most_queries, ragged.most_keys)
        attend = torch.ops.aten._flash_attention_forward
        out, total = attend(
            queries, keys, values, *starts, *most, 0.0, True, False, scale=scale, seqused_k=ragged.used
        )[:2]
        return out, total
    out, total = torch.empty_like(queries), queries.new_empty(queries.shape[1], len(queries), dtype=torch.float32)
    group = queries.shape[1] // keys.shape[1]
    starts_and_ends = zip(*(each.tolist() for each in (ragged.query_starts[:-1], ragged.query_starts[1:])), strict=True)
    for rows, first, count in zip(
        (slice(*each) for each in starts_and_ends), ragged.key_starts.tolist(), ragged.used.tolist(), strict=False
    ):
        own, read = queries[rows].float().transpose(0, 1), slice(first, first + count)
        k, v = (each[read].float().transpose(0, 1).repeat_interleave(group, 0) for each in (keys, values))
        scores = own @ k.transpose(1, 2) * scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1 + count - own.shape[1])
        scores = scores.masked_fill(later, -torch.inf)
        out[rows] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
        total[:, rows] = scores.logsumexp(-1)
    return out, total
