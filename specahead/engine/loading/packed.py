"""Checkpoints of weights in 8 or 4 bits, seen in one layout whatever wrote them.

A linear layer has `weight` [outputs, inputs] and `weight_scale`; in groups of inputs that is [outputs, groups], and
4-bit integers have `weight_zero_point` [outputs, groups] uint8. All other tensors are as they are.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from specahead.engine.loading.checkpoint import Checkpoint
from specahead.kernels.linear import BLOCK, split_words

_Change = Callable[[Tensor], Tensor]


def _by_row(scales: Tensor) -> Tensor:
    """Return the scales of blocks [blocks of outputs, groups] for each output; the last block may have fewer."""
    return scales.repeat_interleave(BLOCK, 0)


def _awq(words: Tensor) -> Tensor:
    """Return the 4-bit integers of words [n, outputs / 8] as [outputs, n].

    AutoAWQ's "gemm" layout: from the lowest bits on a word has the outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
    """
    eights = split_words(words).unflatten(1, (-1, 8))
    return eights[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1).t()


def _columns(words: Tensor) -> Tensor:
    """Return the 4-bit integers of words [n, outputs / 8], in their order, as [outputs, n]."""
    return split_words(words).t()


def _zero_points(zeros: Tensor) -> Tensor:
    """Return compressed-tensors' zeros, of integers from -8 to 7, for integers from 0 to 15: [outputs, groups].

    They are words [outputs / 8, groups], and one by one in older releases.
    """
    return split_words(zeros.t()).t() if zeros.dtype == torch.int32 else (zeros + 8).to(torch.uint8)


_GPTQ: dict[str, tuple[str, _Change]] = {
    "qweight": ("weight", lambda words: split_words(words.t())),
    "scales": ("weight_scale", Tensor.t),
}
# By layout and by the last part of a tensor's name in the files: the last part here, and what makes the tensor.
_TENSORS: dict[str, dict[str, tuple[str, _Change]]] = {
    # DeepSeek's and transformers' name for scales that weights are multiplied by, and compressed-tensors' name
    "plain": {"weight_scale_inv": ("weight_scale", lambda scales: scales)},
    "blocks": {"weight_scale_inv": ("weight_scale", _by_row), "weight_scale": ("weight_scale", _by_row)},
    "awq": {"qweight": ("weight", _awq), "scales": ("weight_scale", Tensor.t), "qzeros": ("weight_zero_point", _awq)},
    # AutoGPTQ's first layout has zeros less one.
    "gptq": _GPTQ | {"qzeros": ("weight_zero_point", lambda words: _columns(words) + 1)},
    "gptq_v2": _GPTQ | {"qzeros": ("weight_zero_point", _columns)},
    "packed": {"weight_packed": ("weight", split_words), "weight_zero_point": ("weight_zero_point", _zero_points)},
}


class PackedCheckpoint(Checkpoint):
    """The tensors of safetensors files whose linear layers are laid out as `layout` says (engine.model.quantization).

    A tensor that is changed is read whole, and its part is taken then. expected: the names of the model's weights;
    biases beside them that are zeros, which AutoGPTQ saves, are left out.
    """

    def __init__(self, files: list[str], device: str, layout: str, expected: Collection[str]) -> None:
        super().__init__(files, device)
        self._made: dict[str, tuple[Any, str, _Change]] = {}
        """By name here: the file, the name in it, and what makes the tensor."""
        for stored in list(self._files):
            layer, _, kind = stored.rpartition(".")
            idle = kind == "bias" and stored not in expected and not super().__getitem__(stored).any()
            if idle or kind == "weight_shape":
                del self._files[stored]
            elif kind == "g_idx":
                self._check_order(stored, self._files.pop(stored))
            elif kind in _TENSORS[layout]:
                here, change = _TENSORS[layout][kind]
                self._made[f"{layer}.{here}"] = self._files.pop(stored), stored, change

    def _check_order(self, name: str, file: Any) -> None:
        """Raise NotImplementedError for inputs that are not in the order of their groups."""
        if (file.get_tensor(name).diff() < 0).any():
            raise NotImplementedError(f"{name}: groups of inputs out of order (desc_act) are not built")

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
