"""Positions of the tokens of a round's passes that run one token of each branch, for all passes at once."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, jit, tl


@dataclass(frozen=True)
class Branches:
    """The branches of sequences; a sequence that does not branch is one. Rows are the branches of all sequences."""

    before: Tensor
    """[rows] int32, tokens of the sequence that a branch sees; 0: there is no branch."""
    own: Tensor
    """[rows] int32, where its own tokens begin in the sequence's KV."""
    kept: Tensor
    """[rows] int32, whether the KV of these is written."""
    tables: Tensor
    """[sequences, pages] int32, block tables."""
    each: int
    """Branches of each sequence."""


class PassPositions(NamedTuple):
    """Where the tokens of each pass stand."""

    starts: Tensor
    """[sequences + 1] int32, the first row of each sequence."""
    positions: Tensor
    """[passes, rows] int64."""
    slots: Tensor
    """[passes, rows] int64, page * page_size + offset; -1: not written."""
    visible: Tensor | None
    """[passes, rows, 3] int32, tokens of its sequence that each sees, and from where to where its own ones lie, as in
    `Batch.visible`; None where no sequence branches."""
    ends: Tensor
    """[passes, rows] int32, the last of these three."""


def pass_positions(branches: Branches, passes: int, page_size: int, backend: Backend = "torch") -> PassPositions:
    """Return where the token of each branch stands in each pass; the first pass runs its first token. Launches only."""
    rows, device = len(branches.before), branches.before.device
    if backend == "torch":
        return _positions_by_torch(branches, passes, page_size)
    made = PassPositions(
        starts=torch.empty(rows // branches.each + 1, dtype=torch.int32, device=device),
        positions=torch.empty(passes, rows, dtype=torch.int64, device=device),
        slots=torch.empty(passes, rows, dtype=torch.int64, device=device),
        visible=torch.empty(passes, rows, 3, dtype=torch.int32, device=device) if branches.each > 1 else None,
        ends=torch.empty(passes, rows, dtype=torch.int32, device=device),
    )
    given = branches.before, branches.own, branches.kept, branches.tables
    numbers = passes, rows, branches.tables.shape[1], branches.each
    grid = (-(-max(1, passes) * (rows + 1) // 128),)
    _pass_positions_kernel[grid](*given, made, *numbers, PAGE=page_size, CHUNK=128)
    return made


def _positions_by_torch(branches: Branches, passes: int, page_size: int) -> PassPositions:
    before, own, present = branches.before, branches.own, branches.before > 0
    rows, device = len(before), before.device
    index = torch.arange(passes, dtype=torch.int32, device=device)[:, None]
    starts = torch.arange(0, rows + 1, branches.each, dtype=torch.int32, device=device)
    sequence = torch.arange(rows, device=device) // branches.each
    at = (own + index).where(branches.kept > 0, 0)
    slots = branches.tables[sequence, at // page_size].long() * page_size + at % page_size
    positions = (before.long() + index).where(present, 0)
    ends = (own + index + 1).where(present, 0)
    visible = None
    if branches.each > 1:
        visible = torch.stack((before.expand_as(ends), own.expand_as(ends), ends), 2)
    return PassPositions(starts, positions, slots.where(branches.kept > 0, -1), visible, ends)


@jit
def _pass_positions_kernel(
    before_ptr, own_ptr, kept_ptr, tables_ptr, made, passes, rows, pages, each, PAGE: tl.constexpr, CHUNK: tl.constexpr
):
    """Make a chunk of the branches of all passes. made: `PassPositions`."""
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    tl.store(made.starts + at, at * each, mask=at * each <= rows)
    inside = at < passes * rows
    index, row = at // rows, at % rows
    before = tl.load(before_ptr + row, mask=inside, other=0)
    own = tl.load(own_ptr + row, mask=inside, other=0)
    kept = inside & (tl.load(kept_ptr + row, mask=inside, other=0) > 0)
    position = own + index
    page = tl.load(tables_ptr + (row // each).to(tl.int64) * pages + position // PAGE, mask=kept, other=0)
    slot = page.to(tl.int64) * PAGE + position % PAGE
    end = tl.where(before > 0, position + 1, 0)
    tl.store(made.positions + at, tl.where(before > 0, before.to(tl.int64) + index, 0), mask=inside)
    tl.store(made.slots + at, tl.where(kept, slot, -1), mask=inside)
    tl.store(made.ends + at, end, mask=inside)
    if made.visible is not None:
        tl.store(made.visible + at * 3, before, mask=inside)
        tl.store(made.visible + at * 3 + 1, own, mask=inside)
        tl.store(made.visible + at * 3 + 2, end, mask=inside)
