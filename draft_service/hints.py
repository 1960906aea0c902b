"""Hints: what a draft says of a round before its selection is known, for a target that fetches KV from the host.

A hint is a part of the round's announcement. It names blocks that the target need not have on the GPU yet and is likely
to want, the heaviest, as many as its bytes allow. Nothing depends on one: what counts is the selection, the last part.
"""

import math
from dataclasses import dataclass

import numpy as np

from sparsity.hints import Ranked
from sparsity.selection import WORD, BlockSelection
from wire.selection_codec import encode_blocks

LIKELY, FIRST_QUERY, SELECTION = 0, 1, 2  # parts of a round that has hints
_GROWTH = 0.8  # bytes grow as this power of the blocks, to begin with: of fewer blocks each takes more
_AIM = 0.98  # of the bytes that there are


@dataclass(frozen=True)
class Hint:
    """part: LIKELY (the last round's runners-up) or FIRST_QUERY. data: encoded. blocks: that it names."""

    part: int
    data: bytes
    blocks: Ranked


def make_hint(
    part: int,
    ranked: Ranked,
    held: BlockSelection | None,
    said: list[Hint],
    heads: int,
    blocks: int,
    most_bytes: int,
    like: Hint | None = None,
) -> Hint | None:
    """Of `ranked` what neither `held` nor a hint that was `said` names, cut to `most_bytes`, and to a block a byte.

    held: what the target had announced of late. heads, blocks: shape of the round's selection. like: the last round's
    hint of this part: as many blocks will about fit again, which saves tries. None: there is nothing to say.
    """
    left = without(ranked, held, [hint.blocks for hint in said])[:most_bytes]
    count, growth, tried = len(left), _GROWTH, None
    if like is not None and len(like.data) > most_bytes // 2:  # else it was not cut for its bytes
        count = min(count, max(1, int(_AIM * len(like.blocks) * most_bytes / len(like.data))))
    while count:
        data = encode_blocks(heads, blocks, left[:count])
        if len(data) <= most_bytes:
            return Hint(part, data, left[:count])
        if tried is not None:
            growth = max(0.1, math.log(tried[1] / len(data)) / math.log(tried[0] / count))
        tried = count, len(data)
        count = min(count - 1, int(count * (_AIM * most_bytes / len(data)) ** (1 / growth)))
    return None


def without(ranked: Ranked, held: BlockSelection | None, said: list[Ranked]) -> Ranked:
    """What of `ranked` is named by none of them, in the same order."""
    row, block = ranked.T.astype(np.int64)
    new = np.ones(len(ranked), dtype=bool)
    if held is not None and held.num_blocks:
        place = np.minimum(block // WORD, held.words.shape[1] - 1)
        named = held.words[row, place] >> (block % WORD).astype(np.uint64) & np.uint64(1)
        new &= (named == 0) | (block >= held.num_blocks)
    keys = row << 32 | block
    for other in said:
        known = np.sort(other[:, 0].astype(np.int64) << 32 | other[:, 1])
        place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        new &= known[place] != keys
    return ranked[new]
