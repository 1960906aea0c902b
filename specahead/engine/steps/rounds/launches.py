"""The launches of a draft's round, the same for all rounds of a shape."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.layer_attention import Evidence, Heads, LayerAttention, ListedReads, Rows, plan_reads
from specahead.engine.model.modules import ModulesDecoder
from specahead.engine.sampling.next_tokens import draw_tokens
from specahead.engine.steps.announcing import choose_blocks, predict_weights
from specahead.engine.steps.passes.reads import heads_of
from specahead.engine.steps.rounds.behind_steps import take_left_verdicts
from specahead.engine.steps.rounds.buffers import RoundShape
from specahead.engine.steps.rounds.requests import RoundSettings
from specahead.engine.steps.rounds.rules import ChangedLogits
from specahead.engine.steps.staging import Buffers
from specahead.kernels.backends import Backend, default_backend
from specahead.kernels.draft_reads import count_reads, keep_unread, score_own_blocks
from specahead.kernels.kv_write import move_kv
from specahead.kernels.paged_attention import BlockLists
from specahead.kernels.pass_positions import Branches, place_passes
from specahead.kernels.selection import select_top_k, top_few
from specahead.kernels.selection_difference import CodedDifferences, code_difference


@dataclass(frozen=True)
class _Round:
    """What all passes of a round share.

    given: the tensors of make_round_buffers. evidence: [sequences, layers, heads, blocks] float32, if any pass needs
    it.
    """

    decoder: Decoder | ModulesDecoder
    kv: KVCache
    settings: RoundSettings
    shape: RoundShape
    given: dict[str, Tensor]
    attention: Backend
    evidence: Tensor | None

    @property
    def heads(self) -> Heads:
        return heads_of(self.decoder, self.kv)

    def evidence_of_pass(self, first: bool = False) -> Evidence | None:
        """Return where a pass adds the weights of its last queries; the first one, if it is dense, sets them."""
        if self.evidence is None:
            return None
        share, fresh = 1 / self.shape.passes(self.settings), first and self.shape.refreshes
        return Evidence(self.evidence, share, self.settings.block_size, self.shape.branches, fresh)

    @property
    def ends(self) -> Tensor:
        """The tokens of each sequence once the round has run, int32 [sequences]."""
        given = self.given
        return given["totals"] if self.shape.branches > 1 else given["lengths"] + (self.shape.passes(self.settings) - 1)


@dataclass(frozen=True)
class _Tokens:
    """Where the tokens of a pass stand that runs one of each branch. positions, slots: [rows] int64."""

    rows: Rows
    positions: Tensor
    slots: Tensor


def run_round(
    decoder: Decoder | ModulesDecoder,
    kv: KVCache,
    settings: RoundSettings,
    shape: RoundShape,
    buffers: Buffers,
    attention: Backend,
    forbid: Callable[[Tensor, list[Tensor]], None] | None = None,
) -> None:
    """Draft the round that the buffers hold. It launches only; results are left in the buffers.

    forbid: called before each token is drawn, outside of graphs, with the logits [rows, vocab] in which it sets to -inf
    what must not be, and the tokens [rows] drafted so far.
    """
    given, results = buffers.tensors, buffers.results.device
    if shape.behind:
        given = take_left_verdicts(given)
        results["began_behind"].copy_(given["began"])
    round_ = _Round(decoder, kv, settings, shape, given, attention, None)
    if shape.branches > 1:
        moves = given["source"], given["target"], default_backend(kv.device)
        move_kv(kv.k_pages, kv.v_pages, kv.addresses, *moves)
    if shape.refreshes:
        first, evidence = None, _make_evidence(decoder, kv, settings, shape)
    else:
        first, evidence = _lists_of_first_pass(round_)
    round_ = replace(round_, evidence=evidence)
    tokens, branched = _plan_passes(round_), shape.branches > 1
    if branched:
        logits = _run_tokens(round_, given["token_ids"], tokens[0], first, round_.evidence_of_pass(first=True))
    else:
        logits = _run_first_pass(round_, first)
    if "memory" in given and round_.evidence is not None and shape.refreshes:
        weights = round_.evidence.flatten(1, 2)
        given["memory"][..., : weights.shape[2]].index_copy_(0, given["places"], weights)
    later = None
    if settings.read_share < 1:
        assert round_.evidence is not None
        later = _own_lists(round_, round_.evidence.flatten(1, 2), None, None, shape.branches)
        results["blocks_read"].copy_(_count_blocks(round_, first, later))
    for name, drawn in _draw_tokens(round_, logits, tokens[branched:], later, forbid).items():
        results[name].copy_(torch.stack(drawn))
    if shape.method:
        bitmaps = _announce(round_)
        coded = CodedDifferences(*(results[name] for name in ("flags", "values", "value_counts", "checksums")))
        code_difference(bitmaps, given["announced"], given["words"], coded, default_backend(bitmaps.device))
        results["bitmaps"].copy_(bitmaps)


def _make_evidence(
    decoder: Decoder | ModulesDecoder, kv: KVCache, settings: RoundSettings, shape: RoundShape
) -> Tensor | None:
    """Return room for evidence, which the first pass sets, if any pass needs it."""
    if not shape.method and settings.read_share == 1:
        return None
    sizes = shape.sequences, decoder.num_layers, decoder.heads, shape.blocks(settings)
    return torch.empty(sizes, device=kv.device)


def _draw_tokens(
    round_: _Round,
    logits: Tensor,
    tokens: list[_Tokens],
    later: ListedReads | None,
    forbid: Callable[[Tensor, list[Tensor]], None] | None,
) -> dict[str, list[Tensor]]:
    """Draw a token from the logits of the first pass, and run it and draw the next in each of the others, `tokens`.

    Returns for each result what each of the draws gives it, one a pass.
    """
    evidence = round_.evidence_of_pass() if round_.shape.method else None
    drawn: dict[str, list[Tensor]] = defaultdict(list)
    settings, passes = round_.settings, round_.shape.passes(round_.settings)
    rules = ChangedLogits(round_.given, round_.shape.branches) if round_.shape.ruled else None
    for index in range(passes):
        logits = logits if rules is None else rules.change(logits)
        if forbid is not None:
            forbid(logits, drawn["tokens"])
        likeliest = top_few(logits, max(1, settings.alternatives), default_backend(round_.kv.device))
        token, support = _sample(logits, likeliest[:, 0].contiguous(), round_, index)
        if rules is not None:
            rules.count(token)
        drawn["tokens"].append(token)
        if settings.alternatives:
            drawn["alternatives"].append(likeliest)
        if support is not None:
            drawn["ids"].append(support[0])
            drawn["probs"].append(support[1])
        if index < passes - 1:
            logits = _run_tokens(round_, token, tokens[index], later, evidence)
    return drawn


def _announce(round_: _Round) -> Tensor:
    """Choose the blocks to announce: [sequences, rows, words] int64."""
    assert round_.evidence is not None
    announcer, limits = round_.settings.announcers[round_.shape.method], round_.given["limits"]
    scores = predict_weights(announcer, round_.evidence, round_.given["announced"], limits)
    return choose_blocks(announcer, scores, limits, default_backend(scores.device))


# The passes.


def _plan_passes(round_: _Round) -> list[_Tokens]:
    """Return where each of the passes stands that run one token of each branch: made at once, by one launch."""
    given, shape, tables = round_.given, round_.shape, round_.given["block_tables"]
    branched, passes = shape.branches > 1, shape.passes(round_.settings)
    lengths, backend = given["lengths"], default_backend(tables.device)
    if not branched:  # KV is written wherever there are tokens
        places = place_passes(Branches(lengths, lengths, lengths, tables, 1), passes - 1, PAGE_SIZE, backend)
        each = zip(places.ends, places.positions, places.slots, strict=True)
        return [_Tokens(Rows(places.starts, ends, tables, 1), *at) for ends, *at in each]
    branches = Branches(given["before"], given["own"], given["kept_own"], tables, shape.branches)
    places = place_passes(branches, passes, PAGE_SIZE, backend)
    assert places.visible is not None
    each = zip(places.visible, places.positions, places.slots, strict=True)
    return [_Tokens(Rows(places.starts, given["totals"], tables, shape.branches, sees), *at) for sees, *at in each]


def _run_first_pass(round_: _Round, lists: ListedReads | None) -> Tensor:
    """Run what is pending of each session; return the logits [rows, vocab] of what is drafted next."""
    given = round_.given
    rows = Rows(given["query_starts"], given["lengths"], given["block_tables"], round_.shape.queries)
    ends = given["query_starts"][1:] - 1  # of an empty place the row before it, or the last one: any will do
    tokens = given["token_ids"], given["positions"], given["slots"]
    return _run_pass(round_, rows, tokens, lists, round_.evidence_of_pass(first=True), ends)


def _run_tokens(
    round_: _Round, token: Tensor, at: _Tokens, lists: ListedReads | None, evidence: Evidence | None
) -> Tensor:
    """Run a token of each branch; return logits [rows, vocab]. token: [rows] int64"""
    return _run_pass(round_, at.rows, (token, at.positions, at.slots), lists, evidence, None)


def _run_pass(
    round_: _Round,
    rows: Rows,
    tokens: tuple[Tensor, Tensor, Tensor],
    lists: ListedReads | None,
    evidence: Evidence | None,
    logits_rows: Tensor | None,
) -> Tensor:
    """tokens: ids, positions and slots, [rows] int64 each"""
    heads, kv = round_.heads, round_.kv
    work = plan_reads(heads, rows, round_.attention) if lists is None else None
    pages = kv.layer_pages
    attend = LayerAttention(heads, rows, pages, round_.attention, lists, evidence, dense_work=work)
    return round_.decoder.run(*tokens, kv.k_pages, kv.v_pages, attend, logits_rows)


# What passes read that are not dense.


def _lists_of_first_pass(round_: _Round) -> tuple[ListedReads, Tensor]:
    """Return what the first pass reads, and evidence of the remembered weights of what it does not read."""
    given, settings = round_.given, round_.settings
    remembered = given["memory"], given["places"], given["known"]
    lists = _own_lists(round_, *remembered, max(round_.shape.queries, round_.shape.branches))
    listed, size = (lists.blocks.lists, lists.blocks.counts), (round_.shape.blocks(settings), settings.block_size)
    return lists, keep_unread(*remembered, *listed, *size, default_backend(round_.kv.device))


def _count_blocks(round_: _Round, first: ListedReads | None, later: ListedReads) -> Tensor:
    """Count the blocks read over a round's passes, layers and KV heads: [sequences] int64."""
    counts = None if first is None else first.blocks.counts
    sizes = round_.shape.passes(round_.settings) - 1, round_.settings.block_size
    backend = default_backend(round_.kv.device)
    return count_reads(counts, round_.given["lengths"], later.blocks.counts, *sizes, backend)


def _own_lists(
    round_: _Round, weights: Tensor, places: Tensor | None, known: Tensor | None, max_queries: int
) -> ListedReads:
    """Return what passes read: of each KV head the blocks that were weighed most, sinks, window, new ones.

    weights, places, known: as of `score_own_blocks`. max_queries: of a sequence in such a pass.
    """
    settings, lengths = round_.settings, round_.given["lengths"]
    layers, kv_heads = round_.decoder.num_layers, round_.kv.kv_heads
    n, backend = round_.shape.blocks(settings), default_backend(lengths.device)
    sizes, kept = (layers, kv_heads, n, settings.block_size), (settings.sink_blocks, settings.window_blocks)
    of_rows = score_own_blocks(weights, places, known, lengths, round_.ends, sizes, kept, settings.read_share, backend)
    lists, counts = select_top_k(*of_rows, backend, n)
    shape = layers, len(lengths), kv_heads
    blocks = BlockLists(lists.view(*shape, n), counts.view(shape), settings.block_size)
    rows = Rows(round_.given["query_starts"], lengths, round_.given["block_tables"], max_queries)
    work = plan_reads(round_.heads, rows, round_.attention, blocks=blocks)
    return ListedReads(blocks, {layer: layer for layer in range(layers)}, work)


# Sampling.


def _sample(logits: Tensor, best: Tensor, round_: _Round, index: int) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Draw tokens [rows], and return ids and probabilities [rows, support] of what they were drawn from.

    best: [rows] int64, the likeliest token of each.
    """
    if not round_.shape.sampled:
        return best, None
    given, support = round_.given, round_.settings.support
    chosen_by = given["temperature"], given["top_p"], given["least"], given["uniforms"][index]
    token, ids, probs = draw_tokens(logits, best, *chosen_by, support)
    return token, (ids, probs)
