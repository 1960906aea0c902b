"""`specahead bench codec`: what announcements of block selections cost, in bytes and in time on one core.

Over recorded selections (benchmarks/selection_trace.py), as recorded and stretched to an 8B target at 100K context.
Encoding starts from a BlockSelection and ends with bytes, decoding the other way round; every result is compared.
"""

import argparse
import gc
import json
import os
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np
from pyroaring import BitMap

from benchmarks.selection_trace import BUNDLED, ROUNDS, Trace, churn_of, load_traces, record_traces
from benchmarks.stack import _processor as processor
from sparsity.selection import BlockSelection
from wire.selection_codec import MAX_REFERENCES, NamedSelection, decode_selection, encode_selection

PASSAGES = 48  # sessions of a trace as recorded
FIRST_STEADY = 4  # the first round that counts; it has all references
GOAL_BYTES, GOAL_MS = 25_000, 1.0

Held = list[NamedSelection]  # the newest first


@dataclass(frozen=True)
class Coding:
    """encode, decode: with earlier selections that both sides hold."""

    name: str
    encode: Callable[[BlockSelection, Held], bytes]
    decode: Callable[[bytes, Held, BlockSelection], BlockSelection] | None = None


@dataclass(frozen=True)
class CodecRow:
    """Bytes a session and round. first: of a session; mean, most: from its fifth round on."""

    trace: str
    heads: int
    blocks: int
    coding: str
    first: float
    mean: float
    most: int
    encode_ms: float
    decode_ms: float | None


@dataclass(frozen=True)
class Churn:
    """Of one trace: share of a round's blocks that the last round, or none of the last four, had."""

    trace: str
    selected: float
    churn: float
    churn4: float
    recorded_churn: float
    recorded_churn4: float
    weight_lost: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that `run` takes."""
    parser.add_argument("--repeats", type=int, default=20, help="of each encoding and decoding that is timed")
    parser.add_argument("--record", nargs="+", metavar="TEXT", help="record the selections from these files first")
    parser.add_argument("--json", metavar="FILE")


def run(flags: argparse.Namespace) -> None:
    """Measure, print the tables, and write them to the JSON file if one is named. Raises ValueError for no repeats."""
    if flags.repeats < 1:
        raise ValueError(f"repeats must be 1 or more, got {flags.repeats}")
    if flags.record:
        record_traces(flags.record, BUNDLED)
    traces, about = load_traces(BUNDLED)
    head = {
        "machine": f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before",
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"specahead bench codec --repeats {flags.repeats}",
        **{f"trace {key}": value for key, value in about.items()},
    }
    churn = [_churn(trace) for trace in traces]
    rows = [row for trace in traces for row in _rows(trace, flags.repeats)]
    print(_report(head, churn, rows))
    if flags.json:
        content = head | {"churn": [asdict(c) for c in churn], "rows": [asdict(row) for row in rows]}
        Path(flags.json).write_text(json.dumps(content, indent=1) + "\n")


def _churn(trace: Trace) -> Churn:
    rounds = trace.selections()
    selected = fmean(np.bitwise_count(r.words).sum() / (r.num_heads * r.num_blocks) for r in rounds)
    return Churn(
        trace=trace.name,
        selected=selected,
        churn=churn_of(rounds, 1),
        churn4=churn_of(rounds, 4),
        recorded_churn=trace.churn,
        recorded_churn4=trace.churn4,
        weight_lost=trace.weight_lost,
    )


def _rows(trace: Trace, repeats: int) -> list[CodecRow]:
    stretched = [trace.selections()]
    recorded = list(trace.passages(PASSAGES))
    return [
        *(_measure(f"{trace.name}, recorded", recorded, coding, 1) for coding in CODINGS[:1]),
        *(_measure(trace.name, stretched, coding, repeats) for coding in CODINGS),
    ]


def _measure(name: str, sessions: list[list[BlockSelection]], coding: Coding, repeats: int) -> CodecRow:
    first, steady, encoding, decoding = [], [], [], []
    gc.disable()  # what it collects is not the codec's
    try:
        for rounds in sessions:
            first.append(len(coding.encode(rounds[0], [])))
            for i in range(FIRST_STEADY, len(rounds)):
                selection = rounds[i]
                held = [((0, i - k), rounds[i - k]) for k in range(1, MAX_REFERENCES + 1)]
                data = coding.encode(selection, held)
                steady.append(len(data))
                encoding += _times(partial(coding.encode, selection, held), repeats)
                if coding.decode is not None:
                    decode = partial(coding.decode, data, held, selection)
                    if not np.array_equal(decode().words, selection.words):
                        raise AssertionError(f"{coding.name}: what was decoded is not what was encoded")
                    decoding += _times(decode, repeats)
    finally:
        gc.enable()
    return CodecRow(
        trace=name,
        heads=sessions[0][0].num_heads,
        blocks=sessions[0][0].num_blocks,
        coding=coding.name,
        first=fmean(first),
        mean=fmean(steady),
        most=max(steady),
        encode_ms=median(encoding),
        decode_ms=median(decoding) if decoding else None,
    )


def _times(call: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


# Codings


def _encode_one(selection: BlockSelection, held: Held) -> bytes:
    return encode_selection(selection, held[:1])


def _encode_plain(selection: BlockSelection, held: Held) -> bytes:
    return encode_selection(selection, compact=False)


def _decode(data: bytes, held: Held, shape: BlockSelection) -> BlockSelection:
    return decode_selection(data, dict(held), shape.num_heads, shape.num_blocks)


def _encode_bitmap(selection: BlockSelection, held: Held) -> bytes:
    return np.packbits(selection.matrix()).tobytes()


def _decode_bitmap(data: bytes, held: Held, shape: BlockSelection) -> BlockSelection:
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=shape.num_heads * shape.num_blocks)
    return BlockSelection.from_matrix(bits.view(bool).reshape(shape.num_heads, shape.num_blocks))


def _to_roaring(selection: BlockSelection) -> BitMap:
    keys = np.flatnonzero(selection.matrix())  # not selection.keys, which are kept
    return BitMap(array("I", keys.astype(np.uint32).tobytes()))


def _from_roaring(bits: BitMap, shape: BlockSelection) -> BlockSelection:
    return BlockSelection.from_keys(shape.num_heads, shape.num_blocks, np.asarray(bits.to_array()))


def _encode_roaring(selection: BlockSelection, held: Held) -> bytes:
    bits = _to_roaring(selection)
    bits.run_optimize()
    return bits.serialize()


def _decode_roaring(data: bytes, held: Held, shape: BlockSelection) -> BlockSelection:
    return _from_roaring(BitMap.deserialize(data), shape)


def _encode_roaring_difference(selection: BlockSelection, held: Held) -> bytes:
    bits = _to_roaring(selection)
    if held:
        bits ^= _to_roaring(held[0][1])
    bits.run_optimize()
    return bits.serialize()


def _decode_roaring_difference(data: bytes, held: Held, shape: BlockSelection) -> BlockSelection:
    bits = BitMap.deserialize(data)
    if held:
        bits ^= _to_roaring(held[0][1])
    return _from_roaring(bits, shape)


def _encode_varints(selection: BlockSelection, held: Held) -> bytes:
    """Gaps of the difference to the last selection as LEB128: the codec's first version."""
    chosen = selection.matrix()
    if held:
        chosen = chosen ^ held[0][1].matrix()
    gaps = np.diff(np.flatnonzero(chosen), prepend=-1) - 1
    sizes = np.ones(len(gaps), dtype=np.int64)
    for i in range(1, 4):
        sizes += gaps >= 1 << 7 * i
    ends = np.cumsum(sizes)
    out = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    for i in range(4):
        has = sizes > i
        more = (sizes[has] > i + 1).astype(np.uint8) << 7
        out[(ends - sizes)[has] + i] = (gaps[has] >> 7 * i & 127).astype(np.uint8) | more
    return out.tobytes()


CODINGS = (
    Coding("announcement", encode_selection, _decode),
    Coding("announcement, one reference", _encode_one, _decode),
    Coding("announcement, plain words", _encode_plain, _decode),
    Coding("bitmap", _encode_bitmap, _decode_bitmap),
    Coding("pyroaring", _encode_roaring, _decode_roaring),
    Coding("pyroaring of the difference", _encode_roaring_difference, _decode_roaring_difference),
    Coding("varints of the difference", _encode_varints),
)


# Tables


def _report(head: dict[str, str], churn: list[Churn], rows: list[CodecRow]) -> str:
    lines = [f"{name}: {value}" for name, value in head.items()]
    lines.append(
        f"\n{'trace':<14} {'selected':>9} {'churn 1':>8} {'churn 4':>8} {'recorded 1':>11} {'recorded 4':>11} "
        f"{'weight lost':>12}"
    )
    for c in churn:
        lines.append(
            f"{c.trace:<14} {c.selected:>9.2%} {c.churn:>8.1%} {c.churn4:>8.1%} {c.recorded_churn:>11.1%} "
            f"{c.recorded_churn4:>11.1%} {c.weight_lost:>12.2%}"
        )
    lines.append(
        f"\n{'trace':<22} {'heads x blocks':>14} {'coding':<34} {'first':>8} {'mean':>8} {'max':>7} "
        f"{'encode':>8} {'decode':>8}"
    )
    for row in rows:
        decode = "" if row.decode_ms is None else f"{row.decode_ms:.2f} ms"
        lines.append(
            f"{row.trace:<22} {f'{row.heads} x {row.blocks}':>14} {row.coding:<34} {row.first:>8.0f} "
            f"{row.mean:>8.0f} {row.most:>7} {row.encode_ms:>5.2f} ms {decode:>8}"
        )
    lines.append(
        f"Bytes: first of a session; mean and max of rounds {FIRST_STEADY + 1} to {ROUNDS}, which have all "
        f"references. Times: p50.\nGoal, stretched: {GOAL_BYTES} bytes on average, {GOAL_MS:.0f} ms each way. "
        "One reference: not drafting ahead."
    )
    return "\n".join(lines)
