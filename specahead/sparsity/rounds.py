"""From a plan to the settings of a draft's rounds, and to their announcements."""

import numpy as np

from specahead.engine.steps.requests import AnnouncementRequest, RoundSettings
from specahead.sparsity.methods import METHODS, Method, methods_of
from specahead.sparsity.plan import Plan
from specahead.sparsity.selection import BlockSelection, row_words


def round_settings(plan: Plan, gamma: int, support: int, read_share: float = 1.0) -> RoundSettings:
    """Return the settings of rounds that can announce by every method that a plan allows."""
    methods = [METHODS[name] for name in methods_of(plan)]
    return RoundSettings(
        gamma=gamma,
        support=support,
        block_size=plan.block_size,
        read_share=read_share,
        sink_blocks=plan.sink_blocks,
        window_blocks=plan.window_blocks,
        announcers={
            method.name: method.announcing.announcer(plan, method.rule_of(plan))
            for method in methods
            if method.announcing is not None
        },
    )


def announcement_request(method: Method, plan: Plan, base: int, last: BlockSelection | None) -> AnnouncementRequest:
    """Return the request for the announcement of a round on `base` tokens. last: that of the round before."""
    announcing = method.announcing
    assert announcing is not None
    before = None if last is None else last.resized(plan.num_blocks(base)).words
    limits = announcing.limits(plan, method.rule_of(plan), base)
    return AnnouncementRequest(method.name, *limits, before, row_words(plan.num_blocks(base)))


def announced_selection(bitmap: np.ndarray, plan: Plan, base: int) -> BlockSelection:
    """Return the bitmap of a RoundOutput, uint64 [rows, words or more], as a selection of blocks of `base` tokens."""
    blocks = plan.num_blocks(base)
    return BlockSelection(len(bitmap), blocks, np.ascontiguousarray(bitmap[:, : row_words(blocks)]))
