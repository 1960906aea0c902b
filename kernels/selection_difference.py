"""The difference of two block selections, coded on the device: what wire/selection_codec.py puts behind its header."""

from dataclasses import dataclass

import torch
from torch import Tensor

_WEIGHT = 0x9E3779B97F4A7C15 - (1 << 64)  # of the checksum (wire/selection_codec.py), as a signed number


@dataclass(frozen=True)
class CodedDifferences:
    """Differences of several sequences.

    flags: [sequences, rows, words] uint8, a bit for each byte of a word, least significant first: whether it is not
    zero. values: [sequences, rows * words * 8] uint8, these bytes in their order. counts: [sequences] int32, how many.
    checksums: [sequences] int64, of the new selections.
    """

    flags: Tensor
    values: Tensor
    counts: Tensor
    checksums: Tensor


def code_difference(bitmaps: Tensor, before: Tensor, widths: Tensor) -> CodedDifferences:
    """Code what selections are different in from earlier ones. Launches only.

    bitmaps, before: int64 [sequences, rows, words], a bit for each block, zero in words from a sequence's width on.
    widths: [sequences] int32, words of a row that count.
    """
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
    """Of each byte of flags, how many flags stand before each of its eight: [256, 8] int32. bit: 0 to 7."""
    flags = torch.arange(256, device=bit.device)[:, None]
    set_ = (flags >> bit) & 1
    return (set_.cumsum(1) - set_).int()
