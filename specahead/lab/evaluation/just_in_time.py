"""Methods that choose while the target runs, most of them from the queries of the layer that is about to attend.

Each is one function from a `LayerView` to blocks; `JustInTime` asks it layer by layer and keeps what one sequence
remembers. Methods that follow the draft lie in `draft_guided`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.kernels.kv_scales import KVScales, keys_of_pages
from specahead.kernels.paged_attention import gather_pages, pack_heads, pool_blocks
from specahead.lab.evaluation.choice import Rounds, budget_blocks, choose, choose_nucleus, mandatory_of
from specahead.sparsity.plan import Plan


@dataclass(frozen=True)
class SequenceKeys:
    """The keys of one sequence in one layer.

    k_pages: [pages, kv_heads, PAGE_SIZE, dim], of all sequences. table: [pages] int64, the sequence's own.
    """

    k_pages: Tensor
    table: Tensor
    length: int
    scales: KVScales | None = None
    """The layer's, for pages in 8 bits."""

    def read(self, first: int, last: int) -> Tensor:
        """Return the keys of tokens first … last - 1, `first` at a page's start: [kv_heads, last - first, dim].

        Of pages in 8 bits they are less their centers, which makes no difference to what attention chooses.
        """
        pages = self.table[None, first // PAGE_SIZE : -(-last // PAGE_SIZE)]
        keys = gather_pages(self.k_pages, pages)[:, : last - first]
        return keys if self.scales is None else keys_of_pages(keys, self.scales, torch.float32)


@dataclass
class LayerView:
    """One layer at the moment of its choice."""

    layer: int
    queries: Tensor
    """[rounds * rows, heads, dim]."""
    keys: SequenceKeys
    scale: float
    plan: Plan
    rounds: Rounds
    """Each chooses by its own queries and by what there is at its end."""
    evidence: Tensor
    """The draft's mean weights in each round, float32 [rounds, draft_layers, draft_heads, blocks or more]."""
    bounds: "KeyBounds"
    selections: list[Tensor]
    """What earlier layers of this pass chose for later ones, bool [rounds, kv_heads, blocks] each."""

    @property
    def blocks(self) -> int:
        """Blocks of all tokens with KV, those of the last round included."""
        return self.plan.num_blocks(self.keys.length)


Choose = Callable[[LayerView], Tensor | None]


class JustInTime:
    """What one sequence reads by a rival: each layer chooses once its queries are known."""

    def __init__(self, plan: Plan, method: Choose) -> None:
        self._plan, self._method, self._bounds = plan, method, KeyBounds()

    def begin(self, rounds: Rounds, evidence: Tensor) -> None:
        """Prepare the pass of some rounds. evidence: as in LayerView."""
        self._rounds, self._evidence = rounds, evidence
        self._selections: list[Tensor] = []

    def choose(self, layer: int, queries: Tensor, keys: SequenceKeys, scale: float) -> Tensor | None:
        """Return what the layer reads, bool [rounds, kv_heads, blocks] with mandatory blocks; None: everything.

        queries: [rounds * rows, heads, dim].
        """
        given = self._plan, self._rounds, self._evidence, self._bounds, self._selections
        chosen = self._method(LayerView(layer, queries, keys, scale, *given))
        if chosen is None or layer in self._plan.dense_layers:
            return None
        return chosen | mandatory_of(self._plan, self._rounds, chosen.device)


def streaming(view: LayerView) -> Tensor:
    """Choose as StreamingLLM (Xiao et al. 2023): the sinks, and a window that fills the budget."""
    plan, windows = view.plan, []
    for base, length in zip(view.rounds.bases, view.rounds.lengths, strict=True):
        blocks = plan.num_blocks(length)
        window = budget_blocks(plan, blocks) - plan.sink_blocks - (blocks - plan.num_blocks(base))
        windows.append(max(1, window))
    chosen = mandatory_of(plan, view.rounds, view.queries.device, windows)
    return chosen.expand(-1, view.keys.k_pages.shape[1], -1)


def oracle(view: LayerView) -> Tensor:
    """Choose by the target's own weights of these very rounds: no method can know them without reading everything."""
    return choose(target_weights(view).mean(1), view.plan, view.rounds)


def quest(view: LayerView) -> Tensor:
    """Choose as Quest (Tang et al. 2024), Algorithm 1: by an upper bound of q·k over a block from its keys' minima and
    maxima."""
    bound = upper_bounds(view)
    return choose((bound - bound.amin((1, 3), keepdim=True)).amax(1), view.plan, view.rounds)


CANDIDATES = 4  # twilight estimates the weights of one block in four


def twilight(view: LayerView) -> Tensor:
    """Choose as Twilight (Lin et al. 2025, arXiv 2502.02770), section 4: Quest selects a quarter of the blocks, keys
    rounded to 4 bits estimate the weights of these, and the nucleus of the estimates is read.

    The budget caps the nucleus alone. Bounds of all blocks and 4-bit keys of the quarter are charged beside it: 9.4 %
    of the KV (`methods`).
    """
    bound = upper_bounds(view).amax(1)
    present = [view.plan.num_blocks(length) for length in view.rounds.lengths]
    sizes = torch.tensor(present, device=bound.device)[:, None, None]
    bound = bound.masked_fill(torch.arange(view.blocks, device=bound.device) >= sizes, -torch.inf)
    best = bound.topk(max(1, view.blocks // CANDIDATES), -1).indices
    counted = torch.arange(best.shape[-1], device=bound.device) < (sizes // CANDIDATES).clamp(min=1)
    candidates = torch.zeros_like(bound, dtype=torch.bool).scatter_(-1, best, counted.expand_as(best))
    candidates |= mandatory_of(view.plan, view.rounds, bound.device)
    estimated = _weights(view, _four_bits(view.keys.read(0, view.keys.length)), candidates).mean(1)
    return choose(estimated, view.plan, view.rounds) & choose_nucleus(estimated)


def tidal(view: LayerView) -> Tensor | None:
    """Choose as TidalDecode (Yang et al. 2024, arXiv 2410.05076), section 3: a selection layer reads everything, and
    the layers behind it read what it weighed most.

    Selection layers are the third one (an earlier one of fewer than ten layers) and the middle one. The layers before
    the first read everything, too. The budget is that of the other layers; all that is read is charged. All heads read
    the same: with a choice for each head, as in the authors' program, perplexity rises more (docs/tried.md).
    """
    layers = view.plan.target_layers
    if view.layer in (min(2, layers // 5), layers // 2):
        weights = target_weights(view).mean((1, 2)).unsqueeze(1)
        view.selections.append(choose(weights, view.plan, view.rounds).expand(-1, view.plan.target_kv_heads, -1))
        return None
    return view.selections[-1] if view.selections else None


def target_weights(view: LayerView) -> Tensor:
    """Return what each KV head's query heads give each block together: [rounds, rows, kv_heads, blocks] float32."""
    return _weights(view, view.keys.read(0, view.keys.length))


def _weights(view: LayerView, keys: Tensor, among: Tensor | None = None) -> Tensor:
    """Return the weights on blocks by keys [kv_heads, length, dim].

    among: bool [rounds, kv_heads, blocks], the blocks that have any weight; None: all.
    """
    rows = len(view.queries)
    kv_heads, length, _ = keys.shape
    scores = (pack_heads(view.queries, kv_heads).to(keys.dtype) @ keys.mT).float().mul_(view.scale)
    scores = scores.unflatten(1, (-1, rows))  # [kv_heads, group, rows of all rounds, length]
    later = torch.ones(rows, rows, dtype=torch.bool, device=keys.device).triu(1)
    scores[..., length - rows :].masked_fill_(later, -torch.inf)
    if among is not None:
        tokens = among.repeat_interleave(view.plan.block_size, -1)[..., :length].transpose(0, 1)
        scores.masked_fill_(~tokens.repeat_interleave(view.rounds.rows, 1)[:, None], -torch.inf)
    weights = pool_blocks(scores.softmax(-1).sum(1), view.plan.block_size)
    return weights.transpose(0, 1).unflatten(0, (view.rounds.count, -1))


def _four_bits(keys: Tensor) -> Tensor:
    """Return keys rounded to 4 bits, with a scale and a zero for each token."""
    low, high = keys.aminmax(dim=-1, keepdim=True)
    step = ((high - low) / 15).clamp(min=1e-8)
    return keys.sub(low).div_(step).round_().mul_(step).add_(low)


def upper_bounds(view: LayerView) -> Tensor:
    """Σ_d max(q_d · min_d, q_d · max_d), the highest of a KV head's query heads: [rounds, rows, kv_heads, blocks]"""
    low, high = view.bounds.up_to(view.layer, view.keys, view.plan.block_size, view.rounds)
    of_rounds = view.queries.unflatten(0, (view.rounds.count, -1)).unflatten(2, (len(low), -1))
    grouped = of_rounds.permute(2, 0, 3, 1, 4).flatten(2, 3).float()
    bound = grouped.clamp(min=0) @ high.mT + grouped.clamp(max=0) @ low.mT  # [kv_heads, rounds, group * rows, blocks]
    return bound.unflatten(2, (-1, view.rounds.rows)).amax(2).permute(1, 2, 0, 3)


class KeyBounds:
    """Minima and maxima of the keys of each block, a layer each, kept between passes."""

    def __init__(self) -> None:
        self._settled: dict[int, tuple[Tensor, Tensor]] = {}
        """[kv_heads, blocks, dim] each, of blocks whose tokens were all committed before the last pass."""

    def up_to(self, layer: int, keys: SequenceKeys, block_size: int, rounds: Rounds) -> tuple[Tensor, Tensor]:
        """Return the bounds that each round has of its blocks: [kv_heads, rounds, blocks, dim], 0 where it has none."""
        step = max(1, PAGE_SIZE // block_size)  # reading starts at a page
        settled = (rounds.bases[0] - 1) // block_size // step * step
        known = self._settled[layer][0].shape[1] if layer in self._settled else 0
        if known < settled:
            fresh = keys.read(known * block_size, settled * block_size).float()
            both = _extremes(fresh, block_size, torch.zeros((), dtype=torch.bool, device=fresh.device))
            if known:
                both = _join(self._settled[layer], both)
            self._settled[layer] = both
        first, device = settled * block_size, keys.k_pages.device
        ends = torch.tensor(rounds.lengths, device=device)[:, None, None]
        later = torch.arange(first, keys.length, device=device)[:, None] >= ends
        low, high = _extremes(keys.read(first, keys.length).float()[:, None], block_size, later)
        low, high = (each.where(each.isfinite(), 0) for each in (low, high))
        if not settled:
            return low, high
        of_rounds = [each[:, None].expand(-1, rounds.count, -1, -1) for each in self._settled[layer]]
        return _join((of_rounds[0], of_rounds[1]), (low, high))


def _extremes(keys: Tensor, block_size: int, left_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return minima and maxima of the blocks of keys [..., tokens, dim]: [..., blocks, dim] each.

    left_out: bool, broadcast with the keys: which do not count. Of a block without keys they are inf and -inf.
    """
    missing = -keys.shape[-2] % block_size
    low, high = (
        reduce(
            pad(keys.masked_fill(left_out, fill), (0, 0, 0, missing), value=fill).unflatten(-2, (-1, block_size)), -2
        )
        for fill, reduce in ((torch.inf, torch.amin), (-torch.inf, torch.amax))
    )
    return low, high


def _join(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return minima and maxima of the blocks of both, [..., blocks, dim]."""
    low, high = (torch.cat(pair, -2) for pair in zip(first, second, strict=True))
    return low, high
