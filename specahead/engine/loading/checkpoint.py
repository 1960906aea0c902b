"""The weights of a model by name, from its safetensors files or at random. Each is read when it is asked for."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from specahead.engine.model.families import HEAD, weight_shapes
from specahead.engine.model.quantization import Storage


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of safetensors files, read to `device`."""

    def __init__(self, files: list[str], device: str) -> None:
        opened = [_open(file, device) for file in files]
        self._files: dict[str, Any] = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def part(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return some rows and columns of a tensor; the others are not read."""
        part: Tensor = self._files[name].get_slice(name)[index]
        return part

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, as the headers of the files say."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}


def _open(file: str, device: str) -> Any:
    """Return a safetensors file, opened. Raises OSError that names it if it cannot be read."""
    try:
        return safe_open(file, framework="pt", device=device)
    except SafetensorError as error:
        raise OSError(f"{file} cannot be read: {error}; copy or download it again") from None


class RandomWeights(Mapping[str, Tensor]):
    """Random weights in the shapes of a config, as transformers initialises them: norms are ones, biases zeros.

    held: how linear layers are; in groups they are as engine.loading.packed gives them.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: str, held: Storage) -> None:
        self._how: dict[str, Any] = {"dtype": dtype, "device": device}
        self._generator = torch.Generator(device).manual_seed(0)  # of its own, so that all ranks have one model
        self._deviation = getattr(config, "initializer_range", 0.02)
        self._shapes = weight_shapes(config)
        if config.tie_word_embeddings:
            del self._shapes[HEAD]
        self._of_groups = {each for each in self._shapes if held.in_groups and each.endswith("proj.weight")}
        self._bits = held.bits
        for name in self._of_groups:
            outputs, inputs = self._shapes[name]
            for kind in ("_scale", "_zero_point"):
                self._shapes[f"{name}{kind}"] = outputs, inputs // (held.group or inputs)

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.removesuffix("_scale").removesuffix("_zero_point") in self._of_groups:
            return self._in_groups(name, shape)
        if len(shape) > 1:
            return torch.empty(shape, **self._how).normal_(0, self._deviation, generator=self._generator)
        return torch.zeros(shape, **self._how) if name.endswith(".bias") else torch.ones(shape, **self._how)

    def _in_groups(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return numbers of a deviation of about four, their zeros, or scales that undo it."""
        device = self._how["device"]
        if name.endswith("_zero_point"):
            return torch.full(shape, 8, dtype=torch.uint8, device=device)
        if name.endswith("_scale"):
            dtype = torch.float16 if self._bits == 4 else torch.float32
            return torch.full(shape, self._deviation / 4, dtype=dtype, device=device)
        if self._bits == 4:
            return torch.randint(16, shape, dtype=torch.uint8, device=device, generator=self._generator)
        return (4 * torch.randn(shape, device=device, generator=self._generator)).to(torch.float8_e4m3fn)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def find_files(model: str) -> list[str]:
    """Return the safetensors files of a model in a folder or of a Hugging Face id, downloaded if need be.

    Raises OSError if there are none.
    """
    try:
        return [cached_file(model, SAFE_WEIGHTS_NAME)]
    except OSError:
        index = cached_file(model, SAFE_WEIGHTS_INDEX_NAME)
    files, _ = get_checkpoint_shard_files(model, index)
    return list(files)
