"""Methods that choose while the target runs: each layer's choice is made from that layer's own queries.

Each is one scoring function; `JustInTime` asks it layer by layer and keeps what one sequence remembers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.kernels.paged_attention import gather_pages, pack_heads, pool_blocks
from specahead.lab.evaluation.sharing import share
from specahead.sparsity.choice import mandatory, shares_of
from specahead.sparsity.plan import Plan, Rule
from specahead.sparsity.selection import BlockSelection


@dataclass(frozen=True)
class SequenceKeys:
    """The keys of one sequence in one layer.

    k_pages: [pages, kv_heads, PAGE_SIZE, dim], of all sequences. table: [pages] int64, the sequence's own.
    """

    k_pages: Tensor
    table: Tensor
    length: int

    def read(self, first: int, last: int) -> Tensor:
        """Return the keys of tokens first … last - 1, `first` at a page's start: [kv_heads, last - first, dim]."""
        pages = self.table[None, first // PAGE_SIZE : -(-last // PAGE_SIZE)]
        return gather_pages(self.k_pages, pages)[:, : last - first]


@dataclass
class LayerView:
    """One layer at the moment of its choice. queries: [rows, heads, dim]."""

    layer: int
    queries: Tensor
    keys: SequenceKeys
    scale: float
    plan: Plan
    rule: Rule
    base: int
    bounds: "KeyBounds"
    anchors: dict[int, Tensor]  # what anchor layers of this pass chose for the layers after them

    @property
    def shares(self) -> Tensor | None:
        """Of the layer's KV heads in the budget."""
        shares = shares_of(self.plan, [self.layer])
        return None if shares is None else shares[0]


Choose = Callable[[LayerView], Tensor | None]


@dataclass
class JustInTime:
    """The selector (specahead.lab.evaluation.readers) of one sequence that reads by a method of this file."""

    plan: Plan
    rule: Rule
    method: Choose
    base: int = 0
    bounds: "KeyBounds" = field(default_factory=lambda: KeyBounds())
    anchors: dict[int, Tensor] = field(default_factory=dict)

    def begin(self, announced: list[BlockSelection], base: int, length: int) -> None:
        """Prepare a pass that builds on `base` committed tokens; it takes no announcement."""
        self.base, self.anchors = base, {}

    def choose(self, layer: int, queries: Tensor, keys: SequenceKeys, scale: float) -> Tensor | None:
        """Return what the layer reads, mandatory blocks included; None: everything."""
        if layer in self.plan.dense_layers:
            return None
        how = self.plan, self.rule, self.base, self.bounds, self.anchors
        chosen = self.method(LayerView(layer, queries, keys, scale, *how))
        if chosen is None:
            return None
        return chosen | mandatory(self.plan, self.base, chosen.shape[-1]).to(chosen.device)


def oracle(view: LayerView) -> Tensor:
    """The target's own weights of this very round: no method can know them without reading everything."""
    return share(target_weights(view), view.plan, view.rule, view.base, shares=view.shares)


def quest(view: LayerView) -> Tensor:
    """Quest (Tang et al. 2024), Algorithm 1: an upper bound of q·k over a block from its keys' minima and maxima."""
    bound = upper_bounds(view)
    if view.rule != "top_k":
        raise NotImplementedError("'quest' has bounds, not a distribution: it takes a top_k budget")
    return share(bound - bound.amin((0, 2), keepdim=True), view.plan, view.rule, view.base, "max", view.shares)


CANDIDATES = 4  # twilight estimates the weights of every fourth block, Quest's best


def twilight(view: LayerView) -> Tensor:
    """Twilight (Lin et al. 2025), section 4: of Quest's best quarter, the nucleus of weights estimated from
    4-bit keys."""
    bound = upper_bounds(view).amax(0)
    blocks = bound.shape[-1]
    count = torch.full((len(bound),), max(1, blocks // CANDIDATES), device=bound.device)
    best = bound.topk(int(count[0]), -1).indices
    candidates = torch.zeros_like(bound, dtype=torch.bool).scatter_(1, best, True)
    candidates |= mandatory(view.plan, view.base, blocks).to(bound.device)
    keys = view.keys.read(0, view.keys.length)
    estimated = _weights(view, _four_bits(keys), candidates)
    return share(estimated, view.plan, view.rule, view.base, shares=view.shares)


def tidal(view: LayerView) -> Tensor | None:
    """TidalDecode (Yang et al. 2024): anchor layers read everything, later layers what the last anchor weighed most.

    Layers before the first anchor are dense. The choice is one for all heads of a layer.
    """
    if not view.plan.anchor_layers:
        raise ValueError("'tidal' needs anchor_layers in the plan; calibrate chooses them")
    if view.layer in view.plan.anchor_layers:
        weights = target_weights(view).mean(1, keepdim=True)
        view.anchors[view.layer] = share(weights, view.plan, view.rule, view.base)
        return None
    before = [anchor for anchor in view.anchors if anchor < view.layer]
    if not before:
        return None
    chosen = view.anchors[max(before)]
    return chosen.expand(*chosen.shape[:-2], view.keys.k_pages.shape[1], -1)


def target_weights(view: LayerView) -> Tensor:
    """What each KV head's query heads give each block together: [rows, kv_heads, blocks] float32"""
    return _weights(view, view.keys.read(0, view.keys.length), None)


def _weights(view: LayerView, keys: Tensor, among: Tensor | None) -> Tensor:
    """Block weights under keys [kv_heads, length, dim], of the blocks `among` [kv_heads, blocks] alone if given."""
    rows = len(view.queries)
    kv_heads, length, _ = keys.shape
    scores = (pack_heads(view.queries, kv_heads) @ keys.mT).float().mul_(view.scale)
    scores = scores.unflatten(1, (-1, rows))  # [kv_heads, group, rows, length]
    later = torch.ones(rows, rows, dtype=torch.bool, device=keys.device).triu(1)
    scores[..., length - rows :].masked_fill_(later, -torch.inf)
    if among is not None:
        tokens = among.repeat_interleave(view.plan.block_size, -1)[:, None, None, :length]
        scores.masked_fill_(~tokens, -torch.inf)
    return pool_blocks(scores.softmax(-1).sum(1), view.plan.block_size).transpose(0, 1)


def _four_bits(keys: Tensor) -> Tensor:
    """Keys as they are after rounding to 4 bits with a scale and zero for each token."""
    low, high = keys.aminmax(dim=-1, keepdim=True)
    step = ((high - low) / 15).clamp(min=1e-8)
    return keys.sub(low).div_(step).round_().mul_(step).add_(low)


def upper_bounds(view: LayerView) -> Tensor:
    """Σ_d max(q_d · min_d, q_d · max_d), the highest of a KV head's query heads: [rows, kv_heads, blocks]"""
    low, high = view.bounds.up_to(view.layer, view.keys, view.plan.block_size, view.base)
    rows = view.queries.shape[0]
    grouped = view.queries.unflatten(1, (len(low), -1)).permute(1, 2, 0, 3).flatten(1, 2).float()
    bound = grouped.clamp(min=0) @ high.mT + grouped.clamp(max=0) @ low.mT  # [kv_heads, group * rows, blocks]
    return bound.unflatten(1, (-1, rows)).amax(1).transpose(0, 1)


class KeyBounds:
    """Minima and maxima of the keys of each block, a layer each: [kv_heads, blocks, dim]; kept between rounds."""

    def __init__(self) -> None:
        self._settled: dict[int, tuple[Tensor, Tensor]] = {}  # of blocks whose tokens are all committed

    def up_to(self, layer: int, keys: SequenceKeys, block_size: int, base: int) -> tuple[Tensor, Tensor]:
        """Bounds of all blocks; `base` tokens are committed."""
        step = max(1, PAGE_SIZE // block_size)  # reading starts at a page
        known = self._settled[layer][0].shape[1] if layer in self._settled else 0
        fresh = keys.read(known * block_size, keys.length).float()
        missing = -fresh.shape[1] % block_size
        low, high = (
            reduce(pad(fresh, (0, 0, 0, missing), value=fill).unflatten(1, (-1, block_size)), 2)
            for fill, reduce in ((torch.inf, torch.amin), (-torch.inf, torch.amax))
        )
        if known:
            low, high = (torch.cat(pair, 1) for pair in zip(self._settled[layer], (low, high), strict=True))
        settled = (base - 1) // block_size // step * step
        self._settled[layer] = low[:, :settled], high[:, :settled]
        return low, high
