"""Weights of linear layers in 4 or 8 bits with a scale for each group of inputs, as checkpoints bring them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUPS = (32, 64, 128)  # inputs of a group; or all inputs of a layer


@dataclass(frozen=True)
class GroupedWeight:
    """The weight of a linear layer in words of four 8-bit floats (e4m3), or of eight 4-bit integers.

    A weight is number * scale, of 4-bit integers (number - zero) * scale; scale and zero are those of its row and of
    the group of its input.
    """

    words: Tensor
    """[outputs, inputs / numbers] int32.

    Of each `span` inputs, number n of word w, from the lowest bits on, stands for input span / numbers * n + w
    (kernels.linear.few_rows says why)."""
    scales: Tensor
    """[groups, outputs], of 16 or 32 bits."""
    zeros: Tensor | None
    """[groups, outputs] uint8; None: the numbers are 8-bit floats."""
    dtype: torch.dtype
    """The dtype of the layer's results."""

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, rows: slice) -> "GroupedWeight":
        zeros = None if self.zeros is None else self.zeros[:, rows].contiguous()
        return replace(self, words=self.words[rows], scales=self.scales[:, rows].contiguous(), zeros=zeros)

    @property
    def numbers(self) -> int:
        """The numbers of a word."""
        return 4 if self.zeros is None else 8

    @property
    def inputs(self) -> int:
        return self.words.shape[1] * self.numbers

    @property
    def group(self) -> int:
        """The inputs of a group."""
        return self.inputs // len(self.scales)

    @property
    def span(self) -> int:
        """The inputs that words side by side stand for."""
        return _span(self.inputs, self.numbers)

    @property
    def nbytes(self) -> int:
        """The bytes of words, scales and zeros."""
        return self.words.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def in_order(self) -> Tensor:
        """Return the weight that the kernels multiply by, with its inputs in order: [outputs, inputs] float32."""
        numbers = self.words.view(torch.float8_e4m3fn) if self.zeros is None else split_words(self.words)
        lines = numbers.view(len(self), -1, self.span // self.numbers, self.numbers).transpose(2, 3)
        values = lines.reshape(len(self), len(self.scales), -1).float()
        if self.zeros is not None:
            values = values - self.zeros.t()[..., None]
        return (values * self.scales.t()[..., None].float()).flatten(1)


def group_weight(values: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> GroupedWeight:
    """Return the weight of numbers that are rounded already.

    values: [outputs, inputs], inputs in order: float8_e4m3fn, or uint8 of 4-bit integers, which have zeros.
    scales, zeros: [outputs, groups] of equal length, each of one of GROUPS or of all inputs. dtype: of the results.
    Raises ValueError for other groups, and for inputs that are no multiple of 128.
    """
    outputs, inputs = values.shape
    group, numbers = inputs // scales.shape[1], 4 if zeros is None else 8
    if inputs % 128 or (group not in GROUPS and group != inputs) or inputs % group:
        raise ValueError(
            f"{inputs} inputs in {scales.shape[1]} groups: expected a multiple of 128 inputs, in groups of "
            f"{', '.join(map(str, GROUPS))} or one group"
        )
    lines = values.view(outputs, -1, numbers, _span(inputs, numbers) // numbers).transpose(2, 3)
    if zeros is None:
        octets = lines
    else:
        octets = lines[..., 0::2] | lines[..., 1::2] << 4
        zeros = zeros.t().contiguous()
    words = octets.reshape(outputs, -1).view(torch.int32)
    return GroupedWeight(words, scales.t().contiguous(), zeros, dtype)


def split_words(words: Tensor) -> Tensor:
    """Return the 4-bit integers of words [..., n] int32, from the lowest bits on: [..., 8 n] uint8."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack([octets & 15, octets >> 4], -1).flatten(-2)


def _span(inputs: int, numbers: int) -> int:
    """Return how many inputs stand side by side in words: 32 words if the inputs allow it, else 16."""
    return 256 if numbers == 8 and inputs % 256 == 0 else 128
