"""Mixtures of experts: a router gives each token to a few of many gated MLPs (Switch, arXiv 2101.03961; Qwen3-MoE).

The router's choice stays on the device. Pairs of a token and an expert are sorted by expert and cut into tiles of one
expert each (routing.py), so that two launches multiply all of them, in passes of any number of tokens, and a third
one adds up what a token's experts gave (products.py). A pass of few tokens reads only the experts that it chose.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.backends import Backend
from specahead.kernels.mixture.products import add_up_pairs, multiply_down, multiply_gated
from specahead.kernels.mixture.routing import plan_tiles, tile_rows

__all__ = ["Experts", "mix_experts"]


@dataclass(frozen=True)
class Experts:
    """The weights of a layer's experts."""

    router: Tensor
    """[experts, hidden]."""
    gate_up: Tensor
    """[experts, 2 * inner, hidden]: the gates above the ups."""
    down: Tensor
    """[experts, hidden, inner]."""
    chosen: int
    """Experts of a token."""
    renormed: bool
    """Whether the weights of a token's experts are scaled to a sum of 1."""

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return self.router.nbytes + self.gate_up.nbytes + self.down.nbytes


def mix_experts(x: Tensor, experts: Experts, backend: Backend = "torch") -> Tensor:
    """Return the weighted sum of what its experts give for each row, [rows, hidden], in the dtype of x.

    x: [rows, hidden], contiguous, in the dtype of the weights. Triton sums in float32 and rounds what each expert
    gives once, after weighing it.
    """
    weights, ids = _choose(x, experts)
    if backend == "torch":
        return _one_by_one(x, experts, weights, ids)
    size = tile_rows(ids.numel(), len(experts.router))
    tiles = plan_tiles(ids, len(experts.router), size)
    inner = multiply_gated(x, experts.gate_up, tiles, experts.chosen)
    return add_up_pairs(multiply_down(inner, experts.down, tiles, weights.flatten()), tiles, experts.chosen)


def _choose(x: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Return the weights float32 and the numbers int64 of each row's experts, [rows, chosen] each."""
    probabilities = F.linear(x, experts.router).softmax(-1, dtype=torch.float32)
    weights, ids = probabilities.topk(experts.chosen)
    return weights / weights.sum(-1, keepdim=True) if experts.renormed else weights, ids


def _one_by_one(x: Tensor, experts: Experts, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        row, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[row], experts.gate_up[expert]).chunk(2, 1)
        given = F.linear(F.silu(gate) * up, experts.down[expert])
        out.index_add_(0, row, given.float() * weights[row, place, None])
    return out.to(x.dtype)
