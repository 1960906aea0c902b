"""Checkpoints of weights in groups of inputs, seen in one layout whatever wrote them.

A linear layer has `weight` [outputs, inputs], `weight_scale` [outputs, groups], and for 4-bit integers
`weight_zero_point` [outputs, groups] uint8. All other tensors are as they are.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from specahead.engine.loading.checkpoint import Checkpoint
from specahead.kernels.linear import BLOCK

_Change = Callable[[Tensor], Tensor]


def _by_row(scales: Tensor) -> Tensor:
    """Return the scales of blocks [blocks of outputs, groups] for each output; the last block may have fewer."""
    return scales.repeat_interleave(BLOCK, 0)


# By layout and by the last part of a tensor's name in the files: the last part here, and what makes the tensor.
_TENSORS: dict[str, dict[str, tuple[str, _Change]]] = {
    # DeepSeek's name for scales that weights are multiplied by, and compressed-tensors' name
    "blocks": {"weight_scale_inv": ("weight_scale", _by_row), "weight_scale": ("weight_scale", _by_row)}
}


class PackedCheckpoint(Checkpoint):
    """The tensors of safetensors files whose linear layers are laid out as `layout` says (engine.model.quantization).

    A tensor that is changed is read whole, and its part is taken then.
    """

    def __init__(self, files: list[str], device: str, layout: str) -> None:
        super().__init__(files, device)
        self._made: dict[str, tuple[Any, str, _Change]] = {}
        """By name here: the file, the name in it, and what makes the tensor."""
        for stored in list(self._files):
            layer, _, kind = stored.rpartition(".")
            if kind in _TENSORS[layout]:
                here, change = _TENSORS[layout][kind]
                self._made[f"{layer}.{here}"] = self._files.pop(stored), stored, change

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            return super().__getitem__(name)
        file, stored, change = self._made[name]
        return change(file.get_tensor(stored))

    def part(self, name: str, index: tuple[slice, ...]) -> Tensor:
        return self[name][index] if name in self._made else super().part(name, index)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._files, *self._made])

    def __len__(self) -> int:
        return len(self._files) + len(self._made)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return super().shapes | {name: self._shape(*made) for name, made in self._made.items()}

    def _shape(self, file: Any, stored: str, change: _Change) -> tuple[int, ...]:
        header = file.get_slice(stored)
        dtype = torch.int32 if header.get_dtype() == "I32" else torch.int8
        return tuple(change(torch.empty(header.get_shape(), dtype=dtype, device="meta")).shape)
