"""Recorded selections, laid out for the sessions of a row: the draft announces them where weights are random.

Random weights select anew each round, so that a benchmark over tiers would fetch half of what it reads. A trace
(read_trace.py) has 20 rounds. A longer session goes through them forwards and backwards. At each turn the blocks that
are not selected change places by chance within their row, so that a block which returns later is cold again.
"""

from pathlib import Path

import numpy as np

from specahead.lab.benchmarks.read_trace import ReadTrace
from specahead.lab.benchmarks.selection_trace import ROWS
from specahead.sparsity.selection import BlockSelection, row_words


def write_replay(file: Path, trace: ReadTrace, sessions: int, rounds: int, rows: int, blocks: int) -> None:
    """Write the selections of all rounds of all sessions: an array uint64 [sessions, rounds, rows, words], .npy.

    Raises ValueError if the trace has fewer rows.
    """
    if rows > ROWS:
        raise ValueError(f"a target of {rows} sparse heads: the recorded traces have {ROWS}; replay nothing")
    shape = (sessions, rounds, rows, row_words(blocks))
    laid_out = np.lib.format.open_memmap(file, "w+", np.dtype("<u8"), shape)
    for session in range(sessions):
        for number, chosen in enumerate(lay_out(trace.shifted(session), rounds, rows, blocks)):
            laid_out[session, number] = chosen.words
    laid_out.flush()


def lay_out(trace: ReadTrace, rounds: int, rows: int, blocks: int) -> list[BlockSelection]:
    """Return the selections of a session's rounds."""
    chance = np.random.default_rng(trace.session)
    places = np.tile(np.arange(blocks), (rows, 1))  # the trace's block at each place of a row
    selections = []
    last = trace.rounds - 1
    for number in range(rounds):
        turn, step = divmod(number, last)
        chosen = trace.matrix(step if turn % 2 == 0 else last - step, blocks)[:rows]
        if step == 0 and number > 0:
            _swap_free(places, np.take_along_axis(chosen, places, 1), chance)
        selections.append(BlockSelection.from_matrix(np.take_along_axis(chosen, places, 1)))
    return selections


def _swap_free(places: np.ndarray, chosen: np.ndarray, chance: np.random.Generator) -> None:
    """Exchange what stands at the places that are not chosen, within each row."""
    for row, taken in zip(places, chosen, strict=True):
        row[~taken] = chance.permutation(row[~taken])
