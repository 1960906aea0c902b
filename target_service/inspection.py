"""Shows a person which blocks a round of a session read, by layer. Nothing is gathered unless someone asks.

A request returns the round that was recorded last, and has the session's next round recorded. So polling each second
copies one round's lists per second.
"""

import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.sparsity.plan import Plan
from specahead.wire.messages import At, SessionReads
from target_service.session import TargetSession

MOST_COLUMNS = 256


def ask_for_reads(session: TargetSession, plan: Plan, kv: KVCache) -> SessionReads:
    """Have the session's next round recorded; return what the last recorded round read."""
    session.reading.is_watched = True
    nothing = At(session.id, session.epoch, session.round, 0)
    return session.reading.seen or SessionReads(nothing, kv.num_layers, kv.kv_heads, plan.block_size, 0, 1, [], [])


def take_reads(session: TargetSession, plan: Plan, kv: KVCache) -> None:
    """Record which blocks a round read, if someone asked and it is known. Call before the round's KV is cut."""
    if not session.reading.is_watched:
        return
    if session.reading.reader is None:
        read = torch.ones(kv.num_layers, kv.kv_heads, plan.num_blocks(session.kv.length), dtype=torch.bool)
    elif session.reading.reader.chosen is None:  # it was planned before anyone asked
        return
    else:
        read = session.reading.reader.chosen  # of fewer tokens than have KV where a later step is queued
    session.reading.is_watched, blocks = False, read.shape[-1]
    per_column = -(-blocks // MOST_COLUMNS)
    fetched = kv.fetched_pages(session.kv)
    session.reading.seen = SessionReads(
        at=session.at,
        layers=kv.num_layers,
        kv_heads=kv.kv_heads,
        block_size=plan.block_size,
        blocks=blocks,
        blocks_per_column=per_column,
        read=_count(read, per_column),
        fetched=[] if fetched is None else _count(read & _by_block(fetched, plan.block_size, blocks), per_column),
    )


def _count(marked: Tensor, per_column: int) -> list[int]:
    """Return how many of bool [layers, kv_heads, blocks] are true in each layer and column of blocks, flat."""
    padded = torch.nn.functional.pad(marked, (0, -marked.shape[-1] % per_column))
    counts: list[int] = padded.unflatten(2, (-1, per_column)).sum((1, 3)).flatten().tolist()
    return counts


def _by_block(pages: Tensor, block_size: int, blocks: int) -> Tensor:
    """Return bool [layers, kv_heads, blocks]: which blocks have a token in a page that `pages` marks."""
    tokens = pages.repeat_interleave(PAGE_SIZE, 2)[..., : blocks * block_size]
    padded = torch.nn.functional.pad(tokens, (0, blocks * block_size - tokens.shape[-1]))
    return padded.unflatten(2, (blocks, block_size)).any(3)
