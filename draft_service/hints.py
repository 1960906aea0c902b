"""Hints: what a draft says of a round before its selection is known, for a target that fetches KV from the host.

A hint is a part of the round's announcement. It names blocks that the target need not have on the GPU yet and is likely
to want, the heaviest, as many as its bytes allow. Nothing depends on one: what counts is the selection, the last part.
"""

from dataclasses import dataclass

import numpy as np

from sparsity.hints import Ranked
from sparsity.selection import WORD, BlockSelection
from wire.selection_codec import encode_blocks

LIKELY, FIRST_QUERY, SELECTION = 0, 1, 2  # parts of a round that has hints


@dataclass(frozen=True)
class Hint:
    """part: LIKELY (the last round's runners-up) or FIRST_QUERY. data: encoded. blocks: that it names."""

    part: int
    data: bytes
    blocks: Ranked


def make_hint(
    part: int,
    ranked: Ranked,
    last: BlockSelection | None,
    said: list[Hint],
    heads: int,
    blocks: int,
    most_bytes: int,
) -> Hint | None:
    """Of `ranked` what neither the `last` selection nor a hint that was `said` names, cut to `most_bytes`.

    heads, blocks: shape of the round's selection. None: there is nothing to say.
    """
    left = without(ranked, last, [hint.blocks for hint in said])
    count = len(left)
    while count:
        data = encode_blocks(heads, blocks, left[:count])
        if len(data) <= most_bytes:
            return Hint(part, data, left[:count])
        count = min(count - 1, count * most_bytes // len(data))
    return None


def without(ranked: Ranked, last: BlockSelection | None, said: list[Ranked]) -> Ranked:
    """What of `ranked` is named by none of them, in the same order."""
    row, block = ranked.T.astype(np.int64)
    new = np.ones(len(ranked), dtype=bool)
    if last is not None and last.num_blocks:
        place = np.minimum(block // WORD, last.words.shape[1] - 1)
        named = last.words[row, place] >> (block % WORD).astype(np.uint64) & np.uint64(1)
        new &= (named == 0) | (block >= last.num_blocks)
    for other in said:
        new &= ~np.isin(row << 32 | block, other[:, 0].astype(np.int64) << 32 | other[:, 1])
    return ranked[new]
