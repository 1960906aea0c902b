"""`specahead bench codec`: what announcements of block selections cost, in bytes and in time on one core.

Over recorded selections (selection_trace.py), as recorded and stretched to an 8B target at 100K context.
Encoding starts from a BlockSelection and ends with bytes, decoding the other way round; every result is compared.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np

from specahead.config.garbage import no_garbage_collected
from specahead.lab.benchmarks.selection_trace import ANNOUNCED, ROUNDS, Trace, churn_of, load_trace, record_trace
from specahead.lab.benchmarks.stack import processor
from specahead.sparsity.selection import BlockSelection
from specahead.wire.selection_codec import decode_selection, encode_selection

PASSAGES = 48  # sessions of a trace as recorded
FIRST_STEADY = 4  # the first round that counts
GOAL_BYTES, GOAL_MS = 65_536, 0.2


@dataclass(frozen=True)
class CodecRow:
    """Bytes of a session's rounds, and the median time of coding one."""

    trace: str
    """recorded: sessions as recorded; stretched: one of an 8B target at 100K."""
    heads: int
    blocks: int
    coding: str
    """announcement: coded against the round before; no reference: by itself."""
    first: float
    """Bytes of a session's first round; the next two are of rounds from the fifth on."""
    mean: float
    most: int
    encode_ms: float
    decode_ms: float


@dataclass(frozen=True)
class Churn:
    """Share of a round's blocks that rounds before did not select."""

    selected: float
    """Share of all blocks that a round selects."""
    churn: float
    """Not selected in the last round."""
    churn4: float
    """Selected in none of the last four rounds."""
    recorded_churn: float
    recorded_churn4: float


def run(flags: argparse.Namespace) -> None:
    """Measure, print the tables, and write them to the JSON file if one is named. Raises ValueError for no repeats."""
    if flags.repeats < 1:
        raise ValueError(f"repeats must be 1 or more, got {flags.repeats}")
    if flags.record:
        record_trace(flags.record, ANNOUNCED)
    trace, about = load_trace(ANNOUNCED)
    head = {
        "machine": f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before",
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"specahead bench codec --repeats {flags.repeats}",
        **{f"trace {key}": value for key, value in about.items()},
    }
    churn, rows = _churn(trace), _rows(trace, flags.repeats)
    print(_report(head, churn, rows))
    if flags.json:
        content = head | {"churn": asdict(churn), "rows": [asdict(row) for row in rows]}
        Path(flags.json).write_text(json.dumps(content, indent=1) + "\n")


def _churn(trace: Trace) -> Churn:
    rounds = trace.selections()
    selected = fmean(np.bitwise_count(r.words).sum() / (r.num_heads * r.num_blocks) for r in rounds)
    return Churn(
        selected=selected,
        churn=churn_of(rounds, 1),
        churn4=churn_of(rounds, 4),
        recorded_churn=trace.churn,
        recorded_churn4=trace.churn4,
    )


def _rows(trace: Trace, repeats: int) -> list[CodecRow]:
    stretched = [trace.selections()]
    recorded = list(trace.passages(PASSAGES))
    return [
        _measure("recorded", recorded, True, 1),
        _measure("stretched", stretched, True, repeats),
        _measure("stretched", stretched, False, repeats),
    ]


def _measure(name: str, sessions: list[list[BlockSelection]], refers: bool, repeats: int) -> CodecRow:
    """Encode and decode all rounds. refers: whether a round is coded against the one before."""
    first, steady, encoding, decoding = [], [], [], []
    with no_garbage_collected():  # what is collected is not the codec's
        for rounds in sessions:
            first.append(len(encode_selection(rounds[0])))
            for i in range(FIRST_STEADY, len(rounds)):
                selection, held = rounds[i], {(0, i - 1): rounds[i - 1]}
                encode = partial(encode_selection, selection, *held.items() if refers else ())
                data = encode()
                decode = partial(decode_selection, data, held, selection.num_heads, selection.num_blocks)
                if not np.array_equal(decode().words, selection.words):
                    raise AssertionError(f"{name}: what was decoded is not what was encoded")
                steady.append(len(data))
                encoding += _times(encode, repeats)
                decoding += _times(decode, repeats)
    return CodecRow(
        trace=name,
        heads=sessions[0][0].num_heads,
        blocks=sessions[0][0].num_blocks,
        coding="announcement" if refers else "no reference",
        first=fmean(first),
        mean=fmean(steady),
        most=max(steady),
        encode_ms=median(encoding),
        decode_ms=median(decoding),
    )


def _times(call: Callable[[], object], repeats: int) -> list[float]:
    """Return how many milliseconds each call takes."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


# Tables


def _report(head: dict[str, str], churn: Churn, rows: list[CodecRow]) -> str:
    lines = [f"{name}: {value}" for name, value in head.items()]
    lines.append(
        f"\nselected {churn.selected:.2%}, not in the last round {churn.churn:.1%} (recorded "
        f"{churn.recorded_churn:.1%}), in none of the last four {churn.churn4:.1%} ({churn.recorded_churn4:.1%})"
    )
    lines.append(
        f"\n{'trace':<10} {'heads x blocks':>14} {'coding':<12} {'first':>8} {'mean':>8} {'max':>7} "
        f"{'encode':>8} {'decode':>8}"
    )
    for row in rows:
        lines.append(
            f"{row.trace:<10} {f'{row.heads} x {row.blocks}':>14} {row.coding:<12} {row.first:>8.0f} "
            f"{row.mean:>8.0f} {row.most:>7} {row.encode_ms:>5.3f} ms {row.decode_ms:>5.3f} ms"
        )
    lines.append(
        f"Bytes: first of a session; mean and max of rounds {FIRST_STEADY + 1} to {ROUNDS}. Times: p50.\n"
        f"Goal, stretched: {GOAL_BYTES} bytes on average, {GOAL_MS} ms each way."
    )
    return "\n".join(lines)
