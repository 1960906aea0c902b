"""From a plan to the settings of a draft's rounds, and to their announcements."""

import numpy as np

from specahead.engine.steps.requests import AnnouncementRequest, RoundSettings
from specahead.sparsity.announce import announced_limits, announcer_of
from specahead.sparsity.plan import Plan
from specahead.sparsity.selection import BlockSelection, row_words


def round_settings(plan: Plan, gamma: int, support: int, read_share: float) -> RoundSettings:
    """Return the settings of rounds that can announce by a plan."""
    return RoundSettings(
        gamma=gamma,
        support=support,
        block_size=plan.block_size,
        read_share=read_share,
        sink_blocks=plan.sink_blocks,
        window_blocks=plan.window_blocks,
        announcer=announcer_of(plan),
    )


def announcement_request(plan: Plan, base: int, last: BlockSelection | None) -> AnnouncementRequest:
    """Return the request for the announcement of a round on `base` tokens. last: that of the round before."""
    first, end, count = announced_limits(plan, base)
    return AnnouncementRequest(
        first=first,
        last=end,
        count=count,
        before=None if last is None else last.resized(plan.num_blocks(base)).words,
        words=row_words(plan.num_blocks(base)),
    )


def announced_selection(bitmap: np.ndarray, plan: Plan, base: int) -> BlockSelection:
    """Return the bitmap of a RoundOutput, uint64 [rows, words or more], as a selection of blocks of `base` tokens."""
    blocks = plan.num_blocks(base)
    return BlockSelection(len(bitmap), blocks, np.ascontiguousarray(bitmap[:, : row_words(blocks)]))
