"""Sequences advanced by what a step has accepted of them, on the device: where a launch that follows it begins."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, jit, tl

MOST_CHOICES = 3  # that the kernel has arguments for


class Verdicts(NamedTuple):
    """The verdicts of the last step, a row a sequence: int32 [rows] each."""

    accepted: Tensor
    """Drafted tokens that the step accepted."""
    following: Tensor
    """The token that the step added after these."""
    alternative: Tensor
    """The last accepted token where it is another than the drafted one, else -1."""


class Followers(NamedTuple):
    """Which sequences of a launch follow the last step: int32 [sequences] each."""

    rows: Tensor
    """The row of each one's verdict; negative: it does not follow the step."""
    judged: Tensor
    """The largest number of tokens that the step may have accepted of each; 0 for sequences that do not follow."""


class LaunchRows(NamedTuple):
    """The tokens that a launch runs first, laid out as if the last step had accepted none; contiguous."""

    starts: Tensor
    """[sequences + 1] int32, the first row of each sequence."""
    lengths: Tensor
    """[sequences] int32, tokens with KV, those of the launch included."""
    tables: Tensor
    """[sequences, pages] int32, block tables."""
    token_ids: Tensor
    """[rows] int64."""
    positions: Tensor
    """[rows] int64."""
    slots: Tensor
    """[rows] int64, page * page size + offset."""


Choice = tuple[Tensor, Tensor]  # [sequences, accepted, n], and [sequences, n] of the same dtype, both of any strides


def advance_rows(
    verdicts: Verdicts,
    followers: Followers,
    rows: LaunchRows,
    previous: Tensor | None,
    choices: list[Choice],
    page_size: int,
    backend: Backend = "torch",
) -> Tensor:
    """Advance the sequences that follow a step by what it has accepted, in place. Launches only.

    rows: lengths, positions and slots of followers are advanced. The token that the step added becomes the first one of
        each follower or, with `previous`, the last one
    previous: [sequences, accepted] int64 of any strides: the token before the one that the step added, by the number of
        accepted tokens; it becomes the last but one, unless the step accepted an alternative, which does then
    choices: at most MOST_CHOICES. The numbers of each sequence for the number of accepted tokens (the first dimension
        after sequences) are copied to the second tensor; those for 0 of sequences that do not follow
    Returns [3, sequences] int32: accepted, following and alternative of each; of sequences that do not follow, those of
    the first row.
    """
    if len(choices) > MOST_CHOICES:
        raise ValueError(f"{len(choices)} choices, expected at most {MOST_CHOICES}")
    if backend == "torch":
        return _advance_by_torch(verdicts, followers, rows, previous, choices, page_size)
    sequences = len(followers.rows)
    taken = torch.empty(3, sequences, dtype=torch.int32, device=followers.rows.device)
    of_choices: list[Any] = []
    for source, out in choices:
        of_choices += [source, out, out.shape[1], *source.stride(), *out.stride()]
    of_choices += [None, None, 0, 0, 0, 0, 0, 0] * (MOST_CHOICES - len(choices))
    _advance_rows_kernel[(sequences,)](
        followers,
        verdicts,
        rows,
        taken,
        previous,
        *((0, 0) if previous is None else previous.stride()),
        *of_choices,
        sequences,
        rows.tables.shape[1],
        PAGE=page_size,
        CHUNK=128,
    )
    return taken


def _advance_by_torch(
    verdicts: Verdicts,
    followers: Followers,
    rows: LaunchRows,
    previous: Tensor | None,
    choices: list[Choice],
    page_size: int,
) -> Tensor:
    follows, row = followers.rows >= 0, followers.rows.long().clamp(min=0)
    taken = torch.stack((verdicts.accepted[row], verdicts.following[row], verdicts.alternative[row]))
    accepted = torch.minimum(taken[0].clamp(min=0), followers.judged).where(follows, 0).long()
    rows.lengths.add_(accepted.int())
    starts, index = rows.starts.long(), torch.arange(len(rows.positions), device=row.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), index, right=True).clamp(max=len(row) - 1)
    number, runs = index - starts[sequence], follows[sequence] & (index < starts[-1])
    rows.positions.add_(accepted[sequence].where(runs, 0))
    page = rows.tables[sequence, (rows.positions // page_size).clamp(max=rows.tables.shape[1] - 1)].long()
    rows.slots.copy_((page * page_size + rows.positions % page_size).where(runs, rows.slots))
    following, place = taken[1].long()[sequence], torch.zeros_like(number)
    if previous is not None:
        before = taken[2].long().where(taken[2] >= 0, previous.gather(1, accepted[:, None])[:, 0])
        place = (starts[1:] - starts[:-1])[sequence] - 1
        rows.token_ids.copy_(before[sequence].where(runs & (number == place - 1), rows.token_ids))
    rows.token_ids.copy_(following.where(runs & (number == place), rows.token_ids))
    for source, out in choices:
        out.copy_(source.gather(1, accepted[:, None, None].expand(-1, 1, out.shape[1]))[:, 0])
    return taken


@jit
def _advance_rows_kernel(
    followers,
    verdicts,
    rows,
    taken_ptr,
    previous_ptr,
    previous_by_sequence,
    previous_by_accepted,
    a_ptr,
    a_out_ptr,
    a_count,
    a_by_sequence,
    a_by_accepted,
    a_by_number,
    a_out_by_sequence,
    a_out_by_number,
    b_ptr,
    b_out_ptr,
    b_count,
    b_by_sequence,
    b_by_accepted,
    b_by_number,
    b_out_by_sequence,
    b_out_by_number,
    c_ptr,
    c_out_ptr,
    c_count,
    c_by_sequence,
    c_by_accepted,
    c_by_number,
    c_out_by_sequence,
    c_out_by_number,
    sequences,
    pages,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One sequence."""
    sequence = tl.program_id(0)
    row = tl.load(followers.rows + sequence)
    at = tl.maximum(row, 0)
    accepted, following = tl.load(verdicts.accepted + at), tl.load(verdicts.following + at)
    alternative = tl.load(verdicts.alternative + at)
    tl.store(taken_ptr + sequence, accepted)
    tl.store(taken_ptr + sequences + sequence, following)
    tl.store(taken_ptr + 2 * sequences + sequence, alternative)
    accepted = tl.minimum(tl.maximum(accepted, 0), tl.load(followers.judged + sequence))
    accepted = tl.where(row >= 0, accepted, 0)

    if a_ptr is not None:
        source, out = a_ptr + sequence * a_by_sequence + accepted * a_by_accepted, a_out_ptr
        _copy(source, out + sequence * a_out_by_sequence, a_count, a_by_number, a_out_by_number, CHUNK)
    if b_ptr is not None:
        source, out = b_ptr + sequence * b_by_sequence + accepted * b_by_accepted, b_out_ptr
        _copy(source, out + sequence * b_out_by_sequence, b_count, b_by_number, b_out_by_number, CHUNK)
    if c_ptr is not None:
        source, out = c_ptr + sequence * c_by_sequence + accepted * c_by_accepted, c_out_ptr
        _copy(source, out + sequence * c_out_by_sequence, c_count, c_by_number, c_out_by_number, CHUNK)

    if row >= 0:
        tl.store(rows.lengths + sequence, tl.load(rows.lengths + sequence) + accepted)
        first, end = tl.load(rows.starts + sequence), tl.load(rows.starts + sequence + 1)
        for start in tl.range(first, end, CHUNK):
            number = start + tl.arange(0, CHUNK)
            inside = number < end
            position = tl.load(rows.positions + number, mask=inside, other=0) + accepted
            page = tl.load(rows.tables + sequence.to(tl.int64) * pages + position // PAGE, mask=inside, other=0)
            tl.store(rows.positions + number, position, mask=inside)
            tl.store(rows.slots + number, page.to(tl.int64) * PAGE + position % PAGE, mask=inside)
        if previous_ptr is not None:
            before = tl.load(previous_ptr + sequence * previous_by_sequence + accepted * previous_by_accepted)
            before = tl.where(alternative >= 0, alternative.to(tl.int64), before)
            tl.store(rows.token_ids + end - 2, before, mask=first + 1 < end)
            tl.store(rows.token_ids + end - 1, following.to(tl.int64), mask=first < end)
        else:
            tl.store(rows.token_ids + first, following.to(tl.int64), mask=first < end)


@jit
def _copy(source_ptr, out_ptr, count, by_number, out_by_number, CHUNK: tl.constexpr):
    """Copy `count` numbers of one sequence."""
    for start in tl.range(0, count, CHUNK):
        number = start + tl.arange(0, CHUNK)
        tl.store(
            out_ptr + number * out_by_number,
            tl.load(source_ptr + number * by_number, mask=number < count),
            mask=number < count,
        )
