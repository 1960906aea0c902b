"""Passes that draft: each runs one token of every row and draws the next, by a model itself or by a draft's rounds.

A model that drafts for itself (PillarAttn of SparseSpec) reads lists, which stay the same for all of these passes: what
earlier passes over everything have weighed most. The KV that they write is written again by the pass that judges.
Listed pages that have left the GPU are fetched once for all of these passes, before the layers of the first.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specahead.engine.kv.fetch import FetchPlan
from specahead.engine.model.decoder import PassTokens
from specahead.engine.model.layer_attention import ListedReads, Rows
from specahead.engine.sampling.judging import WIDE_SUPPORT
from specahead.engine.steps.reads import PagedModel, listed_reads
from specahead.engine.steps.shapes import PassShape
from specahead.kernels.backends import default_backend
from specahead.kernels.paged_attention import LayersEvidence
from specahead.kernels.rejection import race
from specahead.kernels.selection import top_few


@dataclass(frozen=True)
class OneToken:
    """Where the tokens of a pass stand that runs one token of each row."""

    rows: Rows
    positions: Tensor
    """[rows] int64."""
    slots: Tensor
    """[rows] int64, for all layers or for each."""


@dataclass(frozen=True)
class DraftPasses:
    """The passes that run one token of each row, one after another."""

    model: PagedModel
    at: list[OneToken]
    """Where the tokens of each pass stand."""
    reads: ListedReads | None = None
    """What layers with lists read; None: no layer has any."""
    evidence: LayersEvidence | None = None
    """Where passes add the weights of their queries."""
    dense_layers: bool = True
    """Whether there are layers without lists."""

    def run(self, index: int, tokens: Tensor) -> Tensor:
        """Run a token of each row in the pass of this index. tokens: [rows] int64. Returns logits [rows, vocab]."""
        at, reads = self.at[index], self.reads
        if reads is not None and reads.wait is not None and index > 0:
            reads = replace(reads, wait=None)  # the first pass has waited
        attend = self.model.attends(at.rows)
        attend.listed, attend.weights = reads, self.evidence
        if self.dense_layers:
            attend.dense_work = self.model.plan(at.rows)
        return self.model.run(PassTokens(tokens, at.positions, at.slots), attend)


@dataclass(frozen=True)
class Draws:
    """The parameters and random numbers that drafted tokens are drawn with, by a race (kernels.rejection.race).

    A target that draws by the same uniforms mostly draws the same token.
    """

    temperature: Tensor
    """[rows] float32; 0: the likeliest token is taken."""
    top_p: Tensor
    """[rows] float32."""
    least: Tensor
    """[rows or 1, n or 1] float32, the share of the likeliest token's probability that each of the n tokens, in falling
    order, must have to be drawn. n is `support`, or the vocabulary if that is smaller."""
    uniforms: Tensor
    """[passes, rows] float64."""
    support: int
    """Of how many tokens one is drawn."""

    def draw(self, logits: Tensor, best: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a token for each row from its `support` likeliest ones. Launches only.

        logits: [rows, vocab]. best: [rows] int64, the likeliest token, which is taken where the temperature is 0.
        Returns tokens [rows] int64, and the distributions: ids int64 and probabilities float32, [rows, n] each.
        """
        greedy = self.temperature == 0
        heat = self.temperature.where(~greedy, 1.0)[:, None]
        # A nucleus is a prefix of the sorted distribution, as is what `support` keeps: the shorter of the two is both.
        top, ids = (logits.float() / heat).softmax(-1).topk(min(self.support, logits.shape[-1]))
        before = top.double().cumsum(-1) - top
        kept = (before < self.top_p[:, None]) & (top >= self.least * top[:, :1])
        top = top.where(kept, 0.0)
        top = top / top.sum(-1, keepdim=True)
        column = race(top, ids, self.uniforms[index], default_backend(logits.device))
        return best.where(greedy, ids.gather(1, column[:, None])[:, 0]), ids, top


def draft_tokens(
    passes: DraftPasses,
    logits: Tensor,
    count: int,
    draws: Draws | None,
    first: int = 0,
    likeliest: int = 1,
    change: Callable[[Tensor, list[Tensor]], Tensor] | None = None,
    note: Callable[[Tensor], None] | None = None,
) -> dict[str, list[Tensor]]:
    """Draw `count` tokens one after another, and run each but the last. It launches only.

    logits: [rows, vocab], of what the first token is drawn from. draws: None: all rows are greedy. first: the index of
    the pass that runs the first token. likeliest: how many of the likeliest tokens are given at each position. change:
    returns the logits to draw from, given these and the tokens drawn so far. note: called with each token drawn.
    Returns, a tensor for each position: tokens [rows] int64, likeliest [rows, likeliest] int64 and, with draws, ids
    int64 and probs float32 [rows, support].
    """
    drawn: dict[str, list[Tensor]] = defaultdict(list)
    for index in range(count):
        if change is not None:
            logits = change(logits, drawn["tokens"])
        best = top_few(logits, likeliest, default_backend(logits.device))
        token = best[:, 0].contiguous()
        if draws is not None:
            token, ids, probs = draws.draw(logits, token, index)
            drawn["ids"].append(ids)
            drawn["probs"].append(probs)
        if note is not None:
            note(token)
        drawn["tokens"].append(token)
        drawn["likeliest"].append(best)
        if index < count - 1:
            logits = passes.run(first + index, token)
    return drawn


def draft_for_itself(
    model: PagedModel, shape: PassShape, given: dict[str, Tensor], fetched: FetchPlan | None = None
) -> Tensor:
    """Draft all tokens of a pass but the first of each sequence, and put them where the pass takes them from.

    given: the buffers of the pass, lists among them; tokens go to token_ids and draft_tokens, their distributions to
    support_ids and support_probs. fetched: what brings the listed pages, if some are not on the GPU. It launches only.
    Returns the tokens, int64 [sequences, drafts].
    """
    count = shape.drafts
    passes = _own_passes(model, shape, given, fetched)
    tokens = given["token_ids"][: shape.sequences * (count + 1)].view(shape.sequences, count + 1)
    logits = passes.run(0, tokens[:, 0].contiguous())
    drawn = draft_tokens(passes, logits, count, _own_draws(given, logits.shape[1]), first=1)
    drafted = torch.stack(drawn["tokens"], 1)
    tokens[:, 1:] = drafted
    given["draft_tokens"][:, :count] = drafted
    for name, result in (("support_ids", "ids"), ("support_probs", "probs")):
        for index, values in enumerate(drawn[result]):
            given[name][:, index, : values.shape[1]] = values
    return drafted


def _own_passes(
    model: PagedModel, shape: PassShape, given: dict[str, Tensor], fetched: FetchPlan | None
) -> DraftPasses:
    """Return the passes in which a model drafts for itself, over lists."""
    tables, lengths = given["block_tables"], given["lengths"]
    sequences, count = shape.sequences, shape.drafts
    starts, index = (torch.arange(n, dtype=torch.int32, device=lengths.device) for n in (sequences + 1, count))
    ends = (lengths - count + index[:, None]).where(lengths > 0, 0)
    rows = sequences * (count + 1)  # a pinned shape has room for more
    positions, slots = (given[name][:rows].view(sequences, count + 1).T.contiguous() for name in ("positions", "slots"))
    at = [OneToken(Rows(starts, ends[i], tables, 1), positions[i], slots[i]) for i in range(count)]
    listed = listed_reads(model, Rows(starts, lengths, tables, 1), shape, given, fetched)
    return DraftPasses(model, at, listed, None, dense_layers=bool(shape.read.dense_layers))


def _own_draws(given: dict[str, Tensor], vocab: int) -> Draws | None:
    """Return what the tokens of a pass are drawn with, before it judges them."""
    if "draft_uniforms" not in given:
        return None
    least = given["temperature"].new_zeros(1, 1)
    if "top_k" in given:
        beyond = torch.arange(min(WIDE_SUPPORT, vocab), device=least.device) >= given["top_k"][:, None]
        least = given["min_p"][:, None].where(~beyond | (given["top_k"] == 0)[:, None], 2.0)  # which no token has
    return Draws(given["temperature"], given["top_p"], least, given["draft_uniforms"].T, WIDE_SUPPORT)
