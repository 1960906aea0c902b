"""Mixtures of experts: a router gives each token to a few of many gated MLPs (Switch, arXiv 2101.03961; Qwen3-MoE).

The router's choice stays on the device. Pairs of a token and an expert are sorted by expert and cut into tiles of one
expert each (routing.py), so that two launches multiply all of them, in passes of any number of tokens (products.py). A
pass of few tokens reads only the experts that it chose. Weights are held as those of linear layers are: in 16 bits, 8
or 4, and multiplied as 16-bit floats.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.backends import Backend
from specahead.kernels.linear import LinearWeight, linear
from specahead.kernels.mixture.products import ExpertWeight, multiply_down, multiply_gated
from specahead.kernels.mixture.routing import choose_experts, plan_tiles, tile_rows

__all__ = ["ExpertWeight", "Experts", "mix_experts"]


@dataclass(frozen=True)
class Experts:
    """The weights of a layer's experts."""

    router: Tensor
    """[experts, hidden]. Its dtype is that of the rows that are mixed: float16 beside weights of fewer than 16 bits."""
    gate_up: ExpertWeight
    """[experts * 2 * inner, hidden]: the gates of an expert above its ups."""
    down: ExpertWeight
    """[experts * hidden, inner]."""
    chosen: int
    """Experts of a token."""
    renormed: bool
    """Whether the weights of a token's experts are scaled to a sum of 1."""

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return self.router.nbytes + self.gate_up.nbytes + self.down.nbytes


def mix_experts(x: Tensor, experts: Experts, backend: Backend = "torch", in_parts: bool = False) -> Tensor:
    """Return the weighted sum of what its experts give for each row, [rows, hidden], in the dtype of `experts.down`.

    x: [rows, hidden], contiguous, in the dtype of the router. in_parts: whether the result may be what each of a row's
    experts gives, [chosen, rows, hidden], which the caller sums. Triton sums in float32 and rounds what each expert
    gives once, after weighing it.
    """
    count = len(experts.router)
    logits = linear(x, LinearWeight(experts.router), backend, in_parts=True)
    choice = choose_experts(logits, experts.chosen, experts.renormed, backend)
    if backend == "torch":
        return _one_by_one(x, experts, choice.weights, choice.ids)
    tiles = plan_tiles(choice, count, tile_rows(choice.ids.numel(), count), backend)
    inner = multiply_gated(x, experts.gate_up, count, tiles, experts.chosen)
    given = multiply_down(inner, experts.down, count, tiles, choice.weights)
    return given if in_parts else given.sum(0)


def _one_by_one(x: Tensor, experts: Experts, weights: Tensor, ids: Tensor) -> Tensor:
    hidden = x.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        row, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = _linear(x[row], experts.gate_up, expert, len(experts.gate_up) // len(experts.router)).chunk(2, 1)
        given = _linear(F.silu(gate) * up, experts.down, expert, hidden)
        out.index_add_(0, row, given.float() * weights[row, place, None])
    return out.to(experts.down.dtype)


def _linear(x: Tensor, weight: ExpertWeight, expert: int, outputs: int) -> Tensor:
    """Return the rows of x times the weight of one expert, [rows, outputs], in the dtype of x."""
    own = weight[expert * outputs : (expert + 1) * outputs]
    values = own if isinstance(own, Tensor) else own.in_order()
    return F.linear(x.to(values.dtype), values).to(x.dtype)
