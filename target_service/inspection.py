"""What a person may look at: which blocks a round of a session read, by layer. Nothing is gathered unless it is asked.

Who asks has the session's next round looked at, and gets the round that was looked at last. So a page that asks every
second costs one session's round a second a copy of its lists.
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
    """Have the session's next round looked at; return what the last one that was looked at read."""
    session.reads_wanted = True
    nothing = At(session.id, session.epoch, session.round, 0)
    return session.reads or SessionReads(nothing, kv.num_layers, kv.kv_heads, plan.block_size, 0, 1, [], [])


def take_reads(session: TargetSession, plan: Plan, kv: KVCache) -> None:
    """Note which blocks a round read, if that is wanted and known. Comes before the round's KV is cut."""
    if not session.reads_wanted:
        return
    if session.reader is None:
        read = torch.ones(kv.num_layers, kv.kv_heads, plan.num_blocks(session.kv.length), dtype=torch.bool)
    elif session.reader.chosen is None:  # it was planned before anyone asked
        return
    else:
        read = session.reader.chosen  # of fewer tokens than have KV where a step is under way behind it
    session.reads_wanted, blocks = False, read.shape[-1]
    per_column = -(-blocks // MOST_COLUMNS)
    fetched = kv.fetched_pages(session.kv)
    session.reads = SessionReads(
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
    """Count what is marked, bool [layers, kv_heads, blocks], by layer and column; flat."""
    padded = torch.nn.functional.pad(marked, (0, -marked.shape[-1] % per_column))
    counts: list[int] = padded.unflatten(2, (-1, per_column)).sum((1, 3)).flatten().tolist()
    return counts


def _by_block(pages: Tensor, block_size: int, blocks: int) -> Tensor:
    """From pages, bool [layers, kv_heads, pages], to blocks of which some token lies in a marked page."""
    tokens = pages.repeat_interleave(PAGE_SIZE, 2)[..., : blocks * block_size]
    padded = torch.nn.functional.pad(tokens, (0, blocks * block_size - tokens.shape[-1]))
    return padded.unflatten(2, (blocks, block_size)).any(3)
