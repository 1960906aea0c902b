"""The proposals of a round in one message, made of single ones, and taken apart again."""

import numpy as np

from specahead.wire.messages import Proposal, Proposals


def together(*items: Proposal, selection: bytes = b"") -> Proposals:
    """Return the message that has these proposals for one round. At least one, all but base and tokens alike.

    selection: what the round announces.
    """
    base = min(item.at.base for item in items)
    supports = [support for item in items for support in item.supports]
    return Proposals(
        at=items[0].at._replace(base=base),
        offsets=[item.at.base - base for item in items],
        assumed_tokens=[item.assumed_token for item in items],
        counts=[len(item.tokens) for item in items],
        tokens=[token for item in items for token in item.tokens],
        support_counts=[len(support.ids) for support in supports],
        support_ids=np.concatenate([np.empty(0, np.uint32), *(s.ids.astype(np.uint32) for s in supports)]),
        support_probs=np.concatenate([np.empty(0, np.float32), *(s.probs for s in supports)]).astype(np.float32),
        draft_seconds=items[0].draft_seconds,
        selection=selection,
    )


def apart(event: Proposals) -> list[Proposal]:
    """Return the single proposals of a message, in order."""
    found = [event.after(*outcome) for outcome in event.outcomes]
    return [item for item in found if item is not None]
