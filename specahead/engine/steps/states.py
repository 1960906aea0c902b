"""Which states the rows of a head read (engine.model.head), in passes over prompts and in rounds.

A round of a head runs all tokens again that were committed since the last one, since it has drafted them on states of
its own. Where it follows a step that still runs, it runs as many rows as the step may commit, up to the token that the
step adds. Those of them that were committed before have KV, and write none.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV, slots_of
from specahead.engine.staging import Layout
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.requests import RoundRequest
from specahead.engine.steps.shapes import RoundShape


def states_layout(shape: RoundShape, gamma: int) -> Layout:
    """Lay out what a round reads of states and texts, by position, from the first row of each sequence on as if a step
    before had accepted nothing (`origins`).

    state_windows: places of the target's states. text_windows: tokens, where rounds may follow a step. gamma: tokens
    that a step may accept.
    """
    windows = (shape.sequences, shape.queries + gamma), torch.int64
    layout: Layout = {"origins": ((shape.sequences,), torch.int64), "state_windows": windows}
    return layout | ({"text_windows": windows} if shape.chained else {})


def lay_out_states(slots: np.ndarray, inputs: Sequence[SequenceInput]) -> None:
    """Write the place of the state that each row of a pass reads; -1 for rows of no token. slots: [rows] int64."""
    slots[:] = -1
    row = 0
    for item in inputs:
        _write_places(slots[row : row + len(item.tokens)], item.kv, item.kv.length)
        row += len(item.tokens)


def lay_out_windows(host: dict[str, np.ndarray], requests: Sequence[RoundRequest], starts: Sequence[int]) -> None:
    """Write `states_layout`. starts: the position of each one's first row, as if a step before had accepted nothing."""
    host["state_windows"][:] = -1
    host["origins"][: len(starts)] = starts
    for i, (item, start) in enumerate(zip(requests, starts, strict=True)):
        _write_places(host["state_windows"][i], item.kv, start)
        if "text_windows" in host:
            known = item.tokens if item.follows is None else [*item.tokens[:-2], *item.follows.previous]
            host["text_windows"][i, : len(known)] = known


def _write_places(places: np.ndarray, kv: SequenceKV, start: int) -> None:
    """Write where the target's states lie from a position on, as far as it has pages."""
    if kv.target is not None:
        table = kv.target.table()
        count = max(0, min(len(places), len(table) * PAGE_SIZE - start))
        places[:count] = slots_of(table, np.arange(start, start + count))


def take_states(given: dict[str, Tensor]) -> Tensor:
    """Return the place of the state that each row of a round reads, [rows] int64, once sequences have advanced.

    Where they follow a step, rows get their tokens, but for the last two, which the step decides over, and those with
    KV no place for it. given: the buffers of the round. Launches only.
    """
    ends, rows = given["query_starts"][1:].long(), torch.arange(len(given["token_ids"]), device=given["slots"].device)
    sequence = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
    last = given["state_windows"].shape[1] - 1
    offset = (given["positions"] - given["origins"][sequence]).clamp(0, last)
    if "text_windows" in given:
        given["slots"].copy_(given["slots"].where(offset >= given["judged"][sequence], -1))
        known = given["text_windows"][sequence, offset]
        given["token_ids"].copy_(known.where(rows < ends[sequence] - 2, given["token_ids"]))
    return given["state_windows"][sequence, offset]
