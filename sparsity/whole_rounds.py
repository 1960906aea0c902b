"""`ahead` where a runner drafts whole rounds: what the plan asks of them, and what they announce."""

import numpy as np

from engine.draft_rounds import AnnouncementRequest, RoundSettings
from sparsity.announce import blend_matrix, shared_limits
from sparsity.methods import methods_of
from sparsity.plan import Plan
from sparsity.selection import BlockSelection, row_words


def round_settings(
    plan: Plan,
    gamma: int,
    support: int,
    read_share: float = 1.0,
    refresh_every: int = 1,
) -> RoundSettings:
    """The projection speaks for `ahead`, if the plan has it. Raises ValueError as RoundSettings does."""
    return RoundSettings(
        gamma=gamma,
        support=support,
        block_size=plan.block_size,
        read_share=read_share,
        sink_blocks=plan.sink_blocks,
        window_blocks=plan.window_blocks,
        projection=blend_matrix(plan).flatten(1) if "ahead" in methods_of(plan) else None,
        stickiness=plan.stickiness,
        refresh_every=refresh_every,
    )


def announcement_request(plan: Plan, base: int, last: BlockSelection | None) -> AnnouncementRequest:
    """What a round that builds on `base` tokens is to announce; last: the round before."""
    before = None if last is None else last.resized(plan.num_blocks(base)).words
    return AnnouncementRequest(*shared_limits(plan, base), before)


def announced_selection(words: np.ndarray, plan: Plan, base: int) -> BlockSelection:
    """words: uint64 [rows, words or more], of a RoundOutput."""
    blocks = plan.num_blocks(base)
    return BlockSelection.from_words(len(words), blocks, np.ascontiguousarray(words[:, : row_words(blocks)]))
