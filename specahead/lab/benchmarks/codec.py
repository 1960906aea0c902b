"""`specahead bench codec`: what announcements of block selections cost, in bytes and in time on one core.

The rounds are those of a recording (announced_trace.py), stretched to an 8B target at 100K context. Each is coded
against the one before, from a BlockSelection to bytes and back, and every result is compared.
"""

import argparse
import timeit
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, median

import numpy as np

from specahead.config.garbage import no_garbage_collected
from specahead.lab.benchmarks.announced_trace import ANNOUNCED, ROUNDS, load_trace
from specahead.lab.results import describe, describe_run, processor, write_json
from specahead.sparsity.selection import BlockSelection
from specahead.wire.selection_codec import decode_selection, encode_selection

FIRST_STEADY = 4  # the first round that counts
GOAL_BYTES, GOAL_MS = 65_536, 0.2


@dataclass(frozen=True)
class CodecRow:
    """Bytes of a session's rounds, and the median time of coding one."""

    heads: int
    blocks: int
    first: int
    """Bytes of the first round; the next two are of rounds from the fifth on."""
    mean: float
    most: int
    encode_ms: float
    decode_ms: float


def run(flags: argparse.Namespace) -> None:
    """Measure, print the figures, and write them to the JSON file if one is named. Raises ValueError for no repeats."""
    if flags.repeats < 1:
        raise ValueError(f"repeats must be 1 or more, got {flags.repeats}")
    rounds, about = load_trace(ANNOUNCED)
    head = describe_run(flags, processor()) | {f"trace {key}": value for key, value in about.items()}
    row = _measure(rounds, flags.repeats)
    print(f"{describe(head)}\n\n{_report(row)}")
    write_json(flags.json, head | asdict(row))


def _measure(rounds: list[BlockSelection], repeats: int) -> CodecRow:
    """Encode and decode the rounds of a session."""
    sizes: list[int] = []
    encoding: list[float] = []  # seconds
    decoding: list[float] = []
    with no_garbage_collected():  # what is collected is not the codec's
        for i in range(FIRST_STEADY, len(rounds)):
            selection, held = rounds[i], {(0, i - 1): rounds[i - 1]}
            encode = partial(encode_selection, selection, *held.items())
            data = encode()
            decode = partial(decode_selection, data, held, selection.num_heads, selection.num_blocks)
            if not np.array_equal(decode().words, selection.words):
                raise AssertionError("what was decoded is not what was encoded")
            sizes.append(len(data))
            encoding += timeit.repeat(encode, number=1, repeat=repeats)
            decoding += timeit.repeat(decode, number=1, repeat=repeats)
    return CodecRow(
        heads=rounds[0].num_heads,
        blocks=rounds[0].num_blocks,
        first=len(encode_selection(rounds[0])),
        mean=fmean(sizes),
        most=max(sizes),
        encode_ms=1e3 * median(encoding),
        decode_ms=1e3 * median(decoding),
    )


def _report(row: CodecRow) -> str:
    return (
        f"{row.heads} heads x {row.blocks} blocks: {row.first} bytes in a session's first round; in rounds "
        f"{FIRST_STEADY + 1} to {ROUNDS} {row.mean:.0f} on average, {row.most} at most\n"
        f"encoding {row.encode_ms:.3f} ms, decoding {row.decode_ms:.3f} ms, medians\n"
        f"Goal: {GOAL_BYTES} bytes on average, {GOAL_MS} ms each way."
    )
