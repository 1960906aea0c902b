"""Rounds of a draft cut behind what a step has accepted: where they begin, and the numbers that they go by there."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specahead.kernels.backends import check_backend, jit, tl

BEGINNING = 2  # tokens that a sequence behind a step runs first: one before the verdict's, and that one
_MOST_CUT = 4  # pairs that the kernel has arguments for


@dataclass(frozen=True)
class StepsVerdicts:
    """What a step has left, and who goes on behind it.

    behind: [sequences] int32, the place of each in the step; negative: it is behind none. judged: [sequences] int32,
    tokens that the step judges. accepted, following: [places] int32 each, how many of them it accepts, and the token
    that it adds. alternative: the same, the last accepted token where it is another than was judged; else negative.
    """

    behind: Tensor
    judged: Tensor
    accepted: Tensor
    following: Tensor
    alternative: Tensor


@dataclass(frozen=True)
class RoundsRows:
    """The tokens that rounds run first, as they are where all that is judged is accepted; contiguous.

    starts: [sequences + 1] int32, the first row of each sequence, from 0 on. lengths: [sequences] int32. tables:
    [sequences, pages] int32. token_ids, positions, slots: [rows] int64. A sequence behind a step has BEGINNING rows.
    """

    starts: Tensor
    lengths: Tensor
    tables: Tensor
    token_ids: Tensor
    positions: Tensor
    slots: Tensor


@dataclass(frozen=True)
class CutRounds:
    """Rounds behind what was accepted, in new tensors.

    rejected: [sequences] int64, tokens that are. began: [3, sequences] int32, what was accepted, what follows, and the
    alternative; of sequences behind no step those of the first place. lengths, token_ids, positions, slots: as of
    RoundsRows. numbers: as many as there are pairs.
    """

    rejected: Tensor
    began: Tensor
    lengths: Tensor
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    numbers: list[Tensor]


def cut_rounds(
    left: StepsVerdicts, rows: RoundsRows, pairs: list[tuple[Tensor, Tensor]], page_size: int, backend: str = "torch"
) -> CutRounds:
    """Return rounds as they are behind the verdicts that a step has left: cut by what it rejects.

    pairs: numbers of each sequence where nothing is rejected, [..., sequences], and where one token is, or two, and so
        on, [most, ..., sequences]; contiguous. The first pair is of the tokens before those that the step adds,
        [sequences] int64: what a sequence behind a step runs first. There are four pairs at most.
    """
    check_backend("cut_rounds", backend)
    return _cut_by_torch(left, rows, pairs, page_size) if backend == "torch" else _cut(left, rows, pairs, page_size)


def _cut_by_torch(
    left: StepsVerdicts, rows: RoundsRows, pairs: list[tuple[Tensor, Tensor]], page_size: int
) -> CutRounds:
    taken, place = left.behind >= 0, left.behind.long().clamp(min=0)
    starts, judged = rows.starts.long(), left.judged
    began = torch.stack((left.accepted[place], left.following[place], left.alternative[place]))
    rejected = torch.minimum((judged - began[0]).clamp(min=0), judged).where(taken, 0).long()
    row = torch.arange(len(rows.positions), device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True).clamp(max=len(taken) - 1)
    number = row - starts[sequence]
    begins = taken[sequence] & (number < BEGINNING) & (row < starts[-1])
    positions = rows.positions - rejected[sequence].where(begins, 0)
    page = rows.tables[sequence, positions // page_size].long()
    slots = (page * page_size + positions % page_size).where(begins, rows.slots)
    numbers = [torch.cat((now[None], cut)).gather(0, rejected.expand_as(now)[None])[0] for now, cut in pairs]
    numbers[0] = began[2].long().where(taken & (began[2] >= 0), numbers[0])
    begin = torch.where(number == 0, numbers[0][sequence], began[1].long()[sequence])
    lengths, token_ids = rows.lengths - rejected.int(), begin.where(begins, rows.token_ids)
    return CutRounds(rejected, began, lengths, token_ids, positions, slots, numbers)


def _cut(left: StepsVerdicts, rows: RoundsRows, pairs: list[tuple[Tensor, Tensor]], page_size: int) -> CutRounds:
    sequences = len(left.behind)
    rejected = torch.empty(sequences, dtype=torch.int64, device=left.behind.device)
    began = torch.empty(3, sequences, dtype=torch.int32, device=left.behind.device)
    lengths, token_ids, positions, slots = (
        torch.empty_like(each) for each in (rows.lengths, rows.token_ids, rows.positions, rows.slots)
    )
    numbers = [torch.empty_like(now) for now, _ in pairs]
    cut: list[Any] = []
    for (now, where_rejected), out in zip(pairs, numbers, strict=True):
        cut += [now, where_rejected, out, now.numel() // sequences]
    cut += [None, None, None, 0] * (_MOST_CUT - len(pairs))
    _cut_rounds_kernel[(sequences,)](
        *(left.behind, left.judged, left.accepted, left.following, left.alternative),
        *(rows.starts, rows.lengths, rows.tables, rows.token_ids, rows.positions, rows.slots),
        *(rejected, began, lengths, token_ids, positions, slots),
        *cut,
        *(sequences, len(rows.slots), rows.tables.shape[1]),
        BEGINNING=BEGINNING,
        PAGE=page_size,
        CHUNK=128,
    )
    return CutRounds(rejected, began, lengths, token_ids, positions, slots, numbers)


@jit
def _cut_rounds_kernel(
    behind_ptr,
    judged_ptr,
    accepted_ptr,
    following_ptr,
    alternative_ptr,
    starts_ptr,
    lengths_ptr,
    tables_ptr,
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    rejected_ptr,
    began_ptr,
    new_lengths_ptr,
    new_token_ids_ptr,
    new_positions_ptr,
    new_slots_ptr,
    previous_ptr,
    previous_cut_ptr,
    new_previous_ptr,
    previous_count,
    second_ptr,
    second_cut_ptr,
    new_second_ptr,
    second_count,
    third_ptr,
    third_cut_ptr,
    new_third_ptr,
    third_count,
    fourth_ptr,
    fourth_cut_ptr,
    new_fourth_ptr,
    fourth_count,
    sequences,
    rows,
    pages,
    BEGINNING: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One sequence; that of the last one copies the rows of no sequence as well."""
    sequence = tl.program_id(0)
    behind = tl.load(behind_ptr + sequence)
    place = tl.maximum(behind, 0)
    accepted, following = tl.load(accepted_ptr + place), tl.load(following_ptr + place)
    alternative = tl.load(alternative_ptr + place)
    tl.store(began_ptr + sequence, accepted)
    tl.store(began_ptr + sequences + sequence, following)
    tl.store(began_ptr + 2 * sequences + sequence, alternative)
    judged = tl.load(judged_ptr + sequence)
    rejected = tl.where(behind >= 0, tl.minimum(tl.maximum(judged - accepted, 0), judged), 0)
    tl.store(rejected_ptr + sequence, rejected.to(tl.int64))
    tl.store(new_lengths_ptr + sequence, tl.load(lengths_ptr + sequence) - rejected)

    previous = _choose(previous_ptr, previous_cut_ptr, sequence, sequences, rejected, sequence >= 0)
    previous = tl.where((behind >= 0) & (alternative >= 0), alternative.to(tl.int64), previous)
    tl.store(new_previous_ptr + sequence, previous)
    if second_ptr is not None:
        _cut_numbers(second_ptr, second_cut_ptr, new_second_ptr, second_count, sequence, sequences, rejected, CHUNK)
    if third_ptr is not None:
        _cut_numbers(third_ptr, third_cut_ptr, new_third_ptr, third_count, sequence, sequences, rejected, CHUNK)
    if fourth_ptr is not None:
        _cut_numbers(fourth_ptr, fourth_cut_ptr, new_fourth_ptr, fourth_count, sequence, sequences, rejected, CHUNK)

    first, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    begun = tl.minimum(end, first + tl.where(behind >= 0, BEGINNING, 0))
    stop = tl.where(sequence == sequences - 1, rows, end)
    for start in tl.range(first, stop, CHUNK):
        row = start + tl.arange(0, CHUNK)
        inside, begins = row < stop, row < begun
        position = tl.load(positions_ptr + row, mask=inside, other=0) - tl.where(begins, rejected, 0)
        at = sequence.to(tl.int64) * pages + position // PAGE
        page = tl.load(tables_ptr + at, mask=begins, other=0).to(tl.int64)
        slot = tl.load(slots_ptr + row, mask=inside, other=0)
        token = tl.load(token_ids_ptr + row, mask=inside, other=0)
        begin = tl.where(row == first, previous, following.to(tl.int64))
        tl.store(new_positions_ptr + row, position, mask=inside)
        tl.store(new_slots_ptr + row, tl.where(begins, page * PAGE + position % PAGE, slot), mask=inside)
        tl.store(new_token_ids_ptr + row, tl.where(begins, begin, token), mask=inside)


@jit
def _cut_numbers(now_ptr, cut_ptr, new_ptr, count, sequence, sequences, rejected, CHUNK: tl.constexpr):
    """All numbers of one sequence, `count` of them."""
    for start in tl.range(0, count, CHUNK):
        number = start + tl.arange(0, CHUNK)
        at = number * sequences + sequence
        chosen = _choose(now_ptr, cut_ptr, at, count * sequences, rejected, number < count)
        tl.store(new_ptr + at, chosen, mask=number < count)


@jit
def _choose(now_ptr, cut_ptr, at, size, rejected, inside):
    """What holds where so many tokens are rejected. size: of what holds where none is."""
    rejected = tl.where(inside, rejected, -1)
    now = tl.load(now_ptr + at, mask=rejected == 0, other=0)
    of_cut = (rejected - 1).to(tl.int64) * size + at
    return tl.where(rejected == 0, now, tl.load(cut_ptr + of_cut, mask=rejected > 0, other=0))
