"""The part of a model's weights that one rank holds: its own heads and columns.

Queries, keys, values, gates and ups are cut by rows, and what reads their results (the outputs of attention and of the
MLP) by columns: each rank's outputs are then summands of the whole ones (Megatron-LM, Shoeybi et al. 2019, section 3).
Every expert of a mixture is cut so: whichever experts few rows choose, all ranks read as much.
All other weights are whole on every rank.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from specahead.engine.loading.checkpoint import Checkpoint
from specahead.engine.model.families import FAMILIES, Shapes, head_dim, inner_size, weight_shapes
from specahead.engine.parallel.ranks import Ranks

_EXPERTS = "experts"
_BY_COLUMNS = "self_attn.o_proj", "mlp.down_proj", f"{_EXPERTS}.down_proj"


def unbuilt_in_ranks(config: Any, count: int) -> str | None:
    """Return why a model, one of FAMILIES, cannot be split over `count` ranks; None if it can."""
    family = FAMILIES[config.model_type]
    if family.normed == "all heads":
        return "norms over all heads together"
    sizes = {
        "KV heads": config.num_key_value_heads,
        "heads": config.num_attention_heads,
        f"columns of {'each expert' if family.mixed else 'the MLP'}": inner_size(config),
    }
    return next((f"{size} {name}" for name, size in sizes.items() if size % count), None)


class OwnPart(Mapping[str, Tensor]):
    """This rank's part of the weights of a model, by name. Of a checkpoint only this part is read; of packed ones all.

    shapes: of the parts, as the config says.
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: Any, ranks: Ranks) -> None:
        self._tensors, self._ranks = tensors, ranks
        self._whole = weight_shapes(config)
        self._rows = _rows_of(config)
        self.shapes: Shapes = {name: self._own_shape(name) for name in self._whole}

    def __getitem__(self, name: str) -> Tensor:
        weight = name.removesuffix("_scale").removesuffix("_zero_point")  # one for each row, for its groups, or for all
        layer = _layer_of(weight)
        if layer in self._rows and (weight == name or self._tensors[name].numel() > 1):
            return self._own_rows(name, self._rows[layer])
        if layer in _BY_COLUMNS and weight.endswith(".weight"):
            columns = self._whole[name][1] if weight == name else self._columns_of(name)
            if columns > 1:
                return self._part(name, (slice(None), self._ranks.own(columns)))
        tensor = self._tensors[name]
        # Every rank adds its bias to the sum.
        return torch.zeros_like(tensor) if self._ranks.rank and layer in _BY_COLUMNS and weight == name else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _own_rows(self, name: str, parts: tuple[int, ...]) -> Tensor:
        """Return the own rows of each part of a tensor, below one another. parts: the rows of each."""
        owned, start = [], 0
        for rows in parts:
            own = self._ranks.own(rows)
            owned.append(self._part(name, (slice(start + own.start, start + own.stop),)))
            start += rows
        return torch.cat(owned) if len(owned) > 1 else owned[0]

    def _columns_of(self, scales: str) -> int:
        """Return into how many groups the inputs of a layer go, each with scales; 1 if a scale is for all inputs."""
        shape = self._tensors[scales].shape
        return shape[1] if len(shape) == 2 else 1

    def _part(self, name: str, index: tuple[slice, ...]) -> Tensor:
        if isinstance(self._tensors, Checkpoint):
            return self._tensors.part(name, index)
        return self._tensors[name][index]

    def _own_shape(self, name: str) -> tuple[int, ...]:
        whole, layer, count = self._whole[name], _layer_of(name), self._ranks.count
        if layer in self._rows:
            return (whole[0] // count, *whole[1:])
        if layer in _BY_COLUMNS and len(whole) == 2:
            return whole[0], whole[1] // count
        return whole


def _layer_of(weight: str) -> str:
    """Return the name of a linear layer without that of its decoder layer, and without the number of its expert.

    Of other weights anything else.
    """
    *_, before, block, layer, _ = ["", "", *weight.split(".")]
    return f"{before if before == _EXPERTS else block}.{layer}"


def _rows_of(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the rows of each layer that is cut by rows: those of parts that are cut one by one."""
    family, dim = FAMILIES[config.model_type], head_dim(config)
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    inner = inner_size(config)
    rows: dict[str, tuple[int, ...]] = {}
    gate_up = (f"{_EXPERTS}.gate_proj", f"{_EXPERTS}.up_proj") if family.mixed else family.gate_up
    for names, parts in ((family.qkv, (queries, keys, keys)), (gate_up, (inner, inner))):
        rows |= {names[0]: parts} if len(names) == 1 else dict(zip(names, ((part,) for part in parts), strict=True))
    return rows
