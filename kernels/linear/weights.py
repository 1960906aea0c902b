"""The weights of linear layers, in 16 bits and in 8. Those in groups of inputs are in kernels.linear.grouped."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specahead.kernels.linear.grouped import GroupedWeight

BLOCK = 128  # inputs of a block of an 8-bit weight
LARGEST = torch.finfo(torch.float8_e4m3fn).max  # number of e4m3
LEAST_SCALE = 1e-12  # of a row, which may be all zeros
_TRIED = 8  # scales, within a factor of two: from there on the steps of e4m3 are the same
_AT_ONCE = 2**24  # numbers of a weight that are rounded together: as float32 they take four times the memory


@dataclass(frozen=True)
class EightBitWeight:
    """The weight of a linear layer in 8 bits: row i is values[i] * scales[i]."""

    values: Tensor
    """[outputs, inputs] float8_e4m3fn.

    Of each BLOCK inputs, number 4 i + b stands for input 32 b + i of the block (kernels.linear.few_rows says why). A
    weight whose inputs are no multiple of BLOCK holds them in their order."""
    scales: Tensor
    """[outputs] float32."""
    dtype: torch.dtype
    """The dtype of the layer's results."""

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> "EightBitWeight":
        return replace(self, values=self.values[rows], scales=self.scales[rows])

    @property
    def nbytes(self) -> int:
        """The bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def in_order(self) -> Tensor:
        """Return the weight that the kernels multiply by, with its inputs in order: [outputs, inputs] float32."""
        values = self.values
        if values.shape[1] % BLOCK == 0:
            values = _transpose_blocks(values, BLOCK // 4, 4)
        return values.float() * self.scales[:, None]


@dataclass(frozen=True)
class LinearWeight:
    """All that a linear layer holds."""

    values: Tensor | EightBitWeight | GroupedWeight
    """[outputs, inputs], in the model's dtype or in fewer bits; of a gated layer the rows of the gates come first."""
    bias: Tensor | None = None
    """[outputs]."""
    eight_bit: EightBitWeight | None = None
    """A second copy of `values`, which passes of few rows read. Values in 8 or 4 bits have none."""

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def outputs(self) -> int:
        return len(self.values)

    def with_eight_bit(self) -> "LinearWeight":
        """Return the same layer with a second copy of its weight in 8 bits, if it is held in 16 bits."""
        return replace(self, eight_bit=quantize(self.values)) if isinstance(self.values, Tensor) else self


def quantize(weight: Tensor) -> EightBitWeight:
    """Return a weight [outputs, inputs] in 8 bits. Of _TRIED scales a row gets the one that changes its numbers least.

    The smallest takes a row's largest number to the largest of e4m3.
    """
    weight = weight.detach()  # or autograd would keep a parameter's float32 numbers as long as the result
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    count = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), count):
        there = slice(start, start + count)
        rows = weight[there].float()
        best = _best_scales(rows)
        values[there], scales[there] = _rounded(rows, best), best[:, 0]
    return hold(values, scales, weight.dtype)


def _best_scales(rows: Tensor) -> Tensor:
    """Return the scale of each row, [rows, 1], by the sum of squares of what rounding changes."""
    least = rows.abs().amax(1, keepdim=True).clamp(min=LEAST_SCALE) / LARGEST
    tried = [least * (1 + step / _TRIED) for step in range(_TRIED)]
    changes = [(_rounded(rows, scales).float() * scales - rows).square().sum(1) for scales in tried]
    return torch.cat(tried, 1).gather(1, torch.stack(changes, 1).argmin(1, keepdim=True))


def _rounded(rows: Tensor, scales: Tensor) -> Tensor:
    return (rows / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def hold(values: Tensor, scales: Tensor, dtype: torch.dtype) -> EightBitWeight:
    """Return the weight of rows that are rounded already, in the order of EightBitWeight.

    values: [outputs, inputs] float8_e4m3fn, inputs in order; scales: [outputs] float32; dtype: of the layer's results.
    """
    return EightBitWeight(in_blocks(values), scales, dtype)


def in_blocks(values: Tensor) -> Tensor:
    """Return rows of 8-bit numbers [rows, inputs], whose inputs are in order, in the order of EightBitWeight."""
    return _transpose_blocks(values, 4, BLOCK // 4) if values.shape[1] % BLOCK == 0 else values


def _transpose_blocks(values: Tensor, lines: int, columns: int) -> Tensor:
    """Return rows whose blocks of `lines * columns` numbers are transposed, each taken as a [lines, columns] matrix."""
    return values.view(len(values), -1, lines, columns).transpose(2, 3).reshape(values.shape)
