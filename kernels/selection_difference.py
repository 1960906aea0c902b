"""The difference of two block selections, coded on the device, as specahead/wire/selection_codec.py sends it."""

from typing import NamedTuple

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, follow, jit, overlapping_launch, power_of_two, tl

_WEIGHT = 0x9E3779B97F4A7C15 - (1 << 64)  # of the checksum (specahead/wire/selection_codec.py), as a signed number
_CHUNK = 512  # words of a row that a program takes at once, at most


class CodedDifferences(NamedTuple):
    """Differences of several sequences.

    flags: [sequences, rows, words] uint8, a bit for each byte of a word, least significant first: whether it differs
    values: [sequences, rows * words * 8] uint8, the differences of these bytes in their order; the rest is undefined
    counts: [sequences] int32, the number of these bytes. checksums: [sequences] int64, of the new selections
    """

    flags: Tensor
    values: Tensor
    counts: Tensor
    checksums: Tensor


def code_difference(
    bitmaps: Tensor, before: Tensor, widths: Tensor, into: CodedDifferences, backend: Backend = "torch"
) -> None:
    """Code the difference of selections from earlier ones. The host does not wait for the device.

    bitmaps, before: int64 [sequences, rows, words], contiguous, a bit for each block, zero in words from a sequence's
        width on. widths: [sequences] int32, the words of a row that count
    into: contiguous tensors that are written
    """
    if backend == "torch":
        for out, coded in zip(into, _code_in_torch(bitmaps, before, widths), strict=True):
            out.copy_(coded)
        return
    sequences, rows, words = bitmaps.shape
    row_counts = torch.empty(sequences, rows, dtype=torch.int32, device=bitmaps.device)
    row_checksums = torch.empty(sequences, rows, dtype=torch.int64, device=bitmaps.device)
    chunk = min(_CHUNK, max(32, power_of_two(words)))
    how = {"CHUNK": chunk, "num_warps": max(1, chunk // 128), **overlapping_launch(bitmaps.device)}
    _flags_kernel[(sequences * rows,)](
        bitmaps, before, widths, into.flags, row_counts, row_checksums, rows, words, WEIGHT=_WEIGHT, **how
    )
    _values_kernel[(sequences * rows,)](
        bitmaps_ptr=bitmaps,
        before_ptr=before,
        row_counts_ptr=row_counts,
        row_checksums_ptr=row_checksums,
        values_ptr=into.values,
        counts_ptr=into.counts,
        checksums_ptr=into.checksums,
        rows=rows,
        words=words,
        ROWS=power_of_two(rows),
        **how,
    )


def _code_in_torch(bitmaps: Tensor, before: Tensor, widths: Tensor) -> CodedDifferences:
    sequences, rows, words = bitmaps.shape
    parts = (bitmaps ^ before).view(torch.uint8).view(sequences, rows, words, 8)
    differs = parts != 0
    bit = torch.arange(8, dtype=torch.uint8, device=bitmaps.device)
    flags = (differs.to(torch.uint8) << bit).sum(-1, dtype=torch.uint8)
    # A running sum over the words of all sequences, and a table for the eight bytes of each, are many times as fast as
    # a running sum over the bytes of each sequence.
    of_words = differs.sum(-1, dtype=torch.int32)
    ends = of_words.flatten().cumsum(0, dtype=torch.int32).view(sequences, -1)
    begins = ends - of_words.flatten(1)
    counts = ends[:, -1] - begins[:, 0]
    places = (begins - begins[:, :1])[..., None] + _ranks(bit)[flags.long()].flatten(1, 2)
    size = rows * words * 8
    values = torch.zeros(sequences, size + 1, dtype=torch.uint8, device=bitmaps.device)
    values.scatter_(1, places.flatten(1).where(differs.flatten(1), size).long(), parts.flatten(1))
    row, column = torch.arange(rows, device=bitmaps.device), torch.arange(words, device=bitmaps.device)
    index = row[:, None] * widths.long()[:, None, None] + column
    checksums = (bitmaps * (index * _WEIGHT | 1)).sum((1, 2))
    return CodedDifferences(flags, values[:, :size], counts, checksums)


def _ranks(bit: Tensor) -> Tensor:
    """Return, for each byte of flags, how many flags stand before each of its eight: [256, 8] int32. bit: 0 to 7."""
    flags = torch.arange(256, device=bit.device)[:, None]
    set_ = (flags >> bit) & 1
    return (set_.cumsum(1) - set_).int()


@jit
def _load_words(bitmaps_ptr, before_ptr, at, inside):
    """Return new words, and where they differ from the old ones."""
    bitmap = tl.load(bitmaps_ptr + at, mask=inside, other=0)
    return bitmap, bitmap ^ tl.load(before_ptr + at, mask=inside, other=0)


@jit
def _flags_kernel(
    bitmaps_ptr,
    before_ptr,
    widths_ptr,
    flags_ptr,
    row_counts_ptr,
    row_checksums_ptr,
    rows,
    words,
    WEIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the flags of one row, how many are set, and what the row adds to its sequence's checksum."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = row % rows * tl.load(widths_ptr + row // rows)  # of the row's first word among those that count
    count = tl.zeros([CHUNK], tl.int32)
    checksum = tl.zeros([CHUNK], tl.int64)
    for start in tl.range(0, words, CHUNK):
        column = start + tl.arange(0, CHUNK)
        bitmap, difference = _load_words(bitmaps_ptr, before_ptr, row * words + column, column < words)
        flags = tl.zeros([CHUNK], tl.int32)
        for place in tl.static_range(8):
            differs = (((difference >> (8 * place)) & 255) != 0).to(tl.int32)
            flags = flags | (differs << place)
            count += differs
        tl.store(flags_ptr + row * words + column, flags.to(tl.uint8), mask=column < words)
        checksum += bitmap * ((index + column) * WEIGHT | 1)
    tl.store(row_counts_ptr + row, tl.sum(count, 0))
    tl.store(row_checksums_ptr + row, tl.sum(checksum, 0))


@jit
def _values_kernel(
    bitmaps_ptr,
    before_ptr,
    row_counts_ptr,
    row_checksums_ptr,
    values_ptr,
    counts_ptr,
    checksums_ptr,
    rows,
    words,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the bytes of one row after those of earlier rows; a sequence's first program adds up all its rows."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    sequence, number = row // rows, row % rows
    other = tl.arange(0, ROWS)
    counts = tl.load(row_counts_ptr + sequence * rows + other, mask=other < rows, other=0)
    if number == 0:
        checksums = tl.load(row_checksums_ptr + sequence * rows + other, mask=other < rows, other=0)
        tl.store(counts_ptr + sequence, tl.sum(counts, 0))
        tl.store(checksums_ptr + sequence, tl.sum(checksums, 0))
    values_ptr += sequence * rows * words * 8
    begin = tl.sum(tl.where(other < number, counts, 0), 0)
    for start in tl.range(0, words, CHUNK):
        column = start + tl.arange(0, CHUNK)
        _, difference = _load_words(bitmaps_ptr, before_ptr, row * words + column, column < words)
        of_word = tl.zeros([CHUNK], tl.int32)
        for place in tl.static_range(8):
            of_word += (((difference >> (8 * place)) & 255) != 0).to(tl.int32)
        at = begin + tl.cumsum(of_word, 0) - of_word
        for place in tl.static_range(8):
            byte = (difference >> (8 * place)) & 255
            tl.store(values_ptr + at, byte.to(tl.uint8), mask=byte != 0)
            at += (byte != 0).to(tl.int32)
        begin += tl.sum(of_word, 0)
