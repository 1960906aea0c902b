"""`specahead bench residency`: what a hot buffer of KV pages would miss, by its size and by who shares it.

A prediction for KV tiers, on a CPU: recorded selections (what a draft would announce, selection_trace.py, or
what the target read behind the real services, lab/benchmarks/read_trace.py; 256 rows, which stand for 32 layers of 8 KV
heads, at 100K context) are requested round by round from residency tables (kernels/residency/). A block is a page.
Nothing is timed; the link's time is bytes over its measured rate.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from tqdm import tqdm

from specahead.kernels.residency import ListedBlocks, empty_tables, request_blocks
from specahead.lab.benchmarks.read_trace import about_reads, load_reads
from specahead.lab.benchmarks.selection_trace import BUNDLED, ROWS, load_traces
from specahead.sparsity.selection import BlockSelection

KV_HEADS = 8  # rows of a layer
PAGE_BYTES = 2 * 16 * 128 * 2  # keys and values of 16 tokens of a head of 128, 16 bits
LINK = 53e9  # bytes a second that a gather from pinned host memory reaches (docs/performance.md)
SETTLED = 5  # rounds after which what a session reads first does not count any more
POOLS = {"head": 1, "layer": KV_HEADS}


class Recorded(Protocol):
    """What both kinds of trace have."""

    @property
    def name(self) -> str: ...

    def selections(self) -> list[BlockSelection]:
        """Of each round, over ROWS rows."""
        ...


@dataclass(frozen=True)
class ResidencyRow:
    """hot: slots, as a share of all pages. missed, unplaced: shares of the pages that a settled round selects: those
    to be fetched, and those for which there is no slot. megabytes, link_ms: fetched a round and session."""

    trace: str
    pool: str
    hot: float
    missed: float
    unplaced: float
    megabytes: float
    link_ms: float


def replay(rounds: list[np.ndarray], pool: int, hot: float) -> tuple[int, int, int]:
    """Pages fetched, without a slot, and selected, over the rounds from SETTLED on.

    rounds: bool [rows, blocks] each; `pool` neighbouring rows share one clock over their share `hot` of slots.
    """
    rows, blocks = rounds[0].shape
    tables = empty_tables(rows // pool, pool * blocks, max(1, int(hot * pool * blocks)))
    page_table = torch.arange(blocks, dtype=torch.int32)[None]
    fetched = unplaced = selected = 0
    for number, chosen in enumerate(rounds):
        counts = chosen.sum(1)
        lists = np.zeros((rows, int(counts.max())), np.int32)
        for row, pages in enumerate(chosen):
            lists[row, : counts[row]] = np.flatnonzero(pages)
        now = torch.tensor([number], dtype=torch.int32)
        pooled = (rows // pool, 1, pool)
        wanted = torch.from_numpy(counts.astype(np.int32)).view(pooled)
        listed = torch.from_numpy(lists).view(*pooled, -1)
        transfers = request_blocks(tables, ListedBlocks(listed, wanted, page_table, pool, 1), now)
        if number >= SETTLED:
            fetched += int(transfers.counts.sum())
            unplaced += int(transfers.overflow.sum())
            selected += int(counts.sum())
    return fetched, unplaced, selected


def measure(trace: Recorded, pool: str, hot: float, layers: int) -> ResidencyRow:
    """layers: evenly spread ones that stand for all."""
    first = np.linspace(0, ROWS // KV_HEADS - 1, layers).astype(int) * KV_HEADS
    rows = (first[:, None] + np.arange(KV_HEADS)).flatten()
    rounds = [selection.matrix()[rows] for selection in trace.selections()]
    fetched, unplaced, selected = replay(rounds, POOLS[pool], hot)
    settled = len(rounds) - SETTLED
    size = fetched / settled * ROWS / len(rows) * PAGE_BYTES
    return ResidencyRow(trace.name, pool, hot, fetched / selected, unplaced / selected, size / 1e6, 1e3 * size / LINK)


def run(flags: argparse.Namespace) -> None:
    """Print the table, and write it to the JSON file if one is named.

    Raises ValueError for shares or layers out of range.
    """
    shares, pools, layers = flags.hot, flags.pools, flags.layers
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(f"shares of slots must lie in (0, 1], got {shares}")
    if not 1 <= layers <= ROWS // KV_HEADS:
        raise ValueError(f"layers must lie in 1 … {ROWS // KV_HEADS}, got {layers}")
    traces: Sequence[Recorded]
    traces, about = (load_reads(), about_reads()) if flags.traces == "reads" else load_traces(BUNDLED)
    cases = [(trace, pool, hot) for trace in traces for pool in pools for hot in shares]
    rows = [measure(*case, layers) for case in tqdm(cases, desc="replaying")]
    head = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"specahead bench residency --hot {' '.join(map(str, shares))} --pools {' '.join(pools)} "
        f"--layers {layers} --traces {flags.traces}",
        "traces": ", ".join(f"{key} {value}" for key, value in about.items()),
    }
    print(_report(head, rows))
    if flags.json:
        content = head | {"rows": [asdict(row) for row in rows]}
        Path(flags.json).write_text(json.dumps(content, indent=1) + "\n")


def _report(head: dict[str, str], rows: list[ResidencyRow]) -> str:
    lines = [f"{name}: {value}" for name, value in head.items()]
    lines.append(f"{'trace':<14} {'shared by':<10} {'hot':>6} {'missed':>8} {'no slot':>8} {'fetched':>10} {'link':>9}")
    for row in rows:
        lines.append(
            f"{row.trace:<14} {row.pool:<10} {row.hot:>6.1%} {row.missed:>8.2%} {row.unplaced:>8.2%} "
            f"{row.megabytes:>7.1f} MB {row.link_ms:>6.2f} ms"
        )
    lines.append(
        f"Hot: slots of all pages. Missed, no slot: of the pages that a round selects, from round {SETTLED + 1} on. "
        "Fetched,\nlink: a round and session of an 8B target at 100K, by 53 GB/s."
    )
    return "\n".join(lines)
