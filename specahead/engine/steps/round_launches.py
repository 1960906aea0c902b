"""A draft's whole round, the same launches for all rounds of a shape: γ + 1 passes, the evidence, the announcement.

The first pass runs the tokens that are pending and attends densely; later passes run one token each, and may read only
what the first one weighed most. The evidence is the mean over the passes of each head's weights on each block.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.model.decoder import PassTokens
from specahead.engine.model.head import DraftHead
from specahead.engine.model.layer_attention import ListedReads, Rows
from specahead.engine.staging import Buffers
from specahead.engine.steps.announcing import announce_blocks
from specahead.engine.steps.device_chain import DeviceChain
from specahead.engine.steps.drafting import DraftPasses, Draws, OneToken, draft_tokens
from specahead.engine.steps.reads import PagedModel
from specahead.engine.steps.requests import RoundSettings
from specahead.engine.steps.rules import ChangedLogits
from specahead.engine.steps.shapes import RoundShape
from specahead.engine.steps.states import take_states
from specahead.kernels.backends import default_backend
from specahead.kernels.draft_reads import score_own_blocks
from specahead.kernels.kv_write import move_kv
from specahead.kernels.paged_attention import BlockLists, LayersEvidence
from specahead.kernels.pass_positions import Branches, pass_positions
from specahead.kernels.selection import select_top_k
from specahead.kernels.selection_difference import CodedDifferences, code_difference

# Called before each token is drawn, outside of graphs, with the logits [rows, vocab] in which it sets to -inf what must
# not be, and the tokens [rows] drafted so far.
Forbid = Callable[[Tensor, list[Tensor]], None]


@dataclass(frozen=True)
class _Round:
    """What all passes of a round share."""

    model: PagedModel
    settings: RoundSettings
    shape: RoundShape
    given: dict[str, Tensor]
    """The tensors of make_round_buffers."""
    evidence: Tensor | None
    """[sequences, layers, heads, blocks] float32, if any pass needs it."""

    @property
    def passes(self) -> int:
        return self.settings.passes(self.shape.gamma)

    def evidence_of_passes(self, listed: BlockLists | None = None, first: bool = False) -> LayersEvidence | None:
        """Return where passes add the weights of their last queries; the first one sets them. listed: what they read,
        if they read by lists.
        """
        if self.evidence is None:
            return None
        share, size = 1 / self.passes, self.settings.block_size
        return LayersEvidence(self.evidence, share, size, self.shape.branches, listed, first, self.model.attention)

    @property
    def ends(self) -> Tensor:
        """The tokens of each sequence once the round has run, int32 [sequences]."""
        return self.given["totals"] if self.shape.branches > 1 else self.given["lengths"] + (self.passes - 1)


def run_round(
    model: PagedModel,
    settings: RoundSettings,
    shape: RoundShape,
    buffers: Buffers,
    forbid: Forbid | None = None,
    chain: DeviceChain | None = None,
) -> None:
    """Draft the round that the buffers hold. It launches only; results are left in the buffers.

    chain: the device chain, for a shape that is chained.
    """
    given, results, kv = buffers.tensors, buffers.results.device, model.kv
    if shape.chained:
        assert chain is not None
        chain.follow_step_in_round(given, settings.passes(shape.gamma))
        results["began"].copy_(given["began"])
    if isinstance(model.decoder, DraftHead):
        model = replace(model, decoder=model.decoder.reading(take_states(given)))
    if shape.branches > 1:
        move_kv(kv.k_pages, kv.v_pages, kv.addresses, given["source"], given["target"], default_backend(kv.device))
    evidence = _make_evidence(model, settings, shape)
    round_ = _Round(model, settings, shape, given, evidence)
    at, branched = _positions_of_passes(round_), shape.branches > 1
    logits = _run_first_pass(round_, at[0] if branched else None)
    later = None
    if settings.read_share < 1:
        later = _own_lists(round_)
    weighed = round_.evidence_of_passes(None if later is None else later.blocks) if shape.announces else None
    passes = DraftPasses(model, at, later, weighed, dense_layers=later is None)
    for name, drawn in _draft(round_, passes, logits, forbid).items():
        if name in results:
            results[name].copy_(torch.stack(drawn))
    if shape.announces:
        assert evidence is not None and settings.announcer is not None
        bitmaps = announce_blocks(settings.announcer, evidence, given["announced"], given["limits"])
        coded = CodedDifferences(*(results[name] for name in ("flags", "values", "value_counts", "checksums")))
        code_difference(bitmaps, given["announced"], given["words"], coded, default_backend(bitmaps.device))
        results["bitmaps"].copy_(bitmaps)
    if shape.chained and chain is not None and chain.drafts is not None:
        chain.leave_drafts(results, shape.gamma)


def _make_evidence(model: PagedModel, settings: RoundSettings, shape: RoundShape) -> Tensor | None:
    """Return room for evidence, which the first pass sets, if any pass needs it."""
    if not shape.announces and settings.read_share == 1:
        return None
    sizes = shape.sequences, model.decoder.num_layers, model.decoder.heads, shape.blocks(settings.block_size)
    return torch.empty(sizes, device=model.kv.device)


def _draft(round_: _Round, passes: DraftPasses, logits: Tensor, forbid: Forbid | None) -> dict[str, list[Tensor]]:
    """Draw a token from the logits of the first pass, and run it and draw the next in each of the others."""
    given, shape, settings = round_.given, round_.shape, round_.settings
    rules = ChangedLogits(given, shape.branches) if shape.ruled else None

    def change(logits: Tensor, tokens: list[Tensor]) -> Tensor:
        logits = logits if rules is None else rules.change(logits)
        if forbid is not None:
            forbid(logits, tokens)
        return logits

    draws = None
    if shape.sampled:
        draws = Draws(given["temperature"], given["top_p"], given["least"], given["uniforms"], settings.support)
    drawn = draft_tokens(
        passes,
        logits,
        round_.passes,
        draws,
        first=int(shape.branches > 1),  # the first pass of branches stands among the others
        likeliest=max(1, settings.alternatives),
        change=None if rules is None and forbid is None else change,
        note=None if rules is None else rules.count,
    )
    drawn["alternatives"] = drawn.pop("likeliest")
    return drawn


def _positions_of_passes(round_: _Round) -> list[OneToken]:
    """Return where each of the passes stands that run one token of each branch: made at once, by one launch."""
    given, shape, tables = round_.given, round_.shape, round_.given["block_tables"]
    lengths, backend = given["lengths"], default_backend(tables.device)
    if shape.branches == 1:  # KV is written wherever there are tokens
        places = pass_positions(Branches(lengths, lengths, lengths, tables, 1), round_.passes - 1, PAGE_SIZE, backend)
        each = zip(places.ends, places.positions, places.slots, strict=True)
        return [OneToken(Rows(places.starts, ends, tables, 1), at, slots) for ends, at, slots in each]
    branches = Branches(given["before"], given["own"], given["kept_own"], tables, shape.branches)
    places = pass_positions(branches, round_.passes, PAGE_SIZE, backend)
    assert places.visible is not None
    each = zip(places.visible, places.positions, places.slots, strict=True)
    return [
        OneToken(Rows(places.starts, given["totals"], tables, shape.branches, sees), at, slots)
        for sees, at, slots in each
    ]


def _run_first_pass(round_: _Round, branches: OneToken | None) -> Tensor:
    """Run the pending tokens of each session or, where `branches` stand, the first token of each branch.

    Returns the logits [rows, vocab] of the first drafted token.
    """
    given, model = round_.given, round_.model
    if branches is None:
        rows = Rows(given["query_starts"], given["lengths"], given["block_tables"], round_.shape.queries)
        ends: Tensor | None = given["query_starts"][1:] - 1  # of an empty place any row will do
        at = OneToken(rows, given["positions"], given["slots"])
    else:
        at, ends = branches, None
    attend = model.attends(at.rows)
    attend.dense_work, attend.weights = model.plan(at.rows), round_.evidence_of_passes(first=True)
    return model.run(PassTokens(given["token_ids"], at.positions, at.slots), attend, ends)


def _own_lists(round_: _Round) -> ListedReads:
    """Return what later passes read: of each KV head the blocks that the first one weighed most, sinks, window, new
    ones.
    """
    assert round_.evidence is not None
    settings, given, lengths = round_.settings, round_.given, round_.given["lengths"]
    layers, kv_heads = round_.model.decoder.num_layers, round_.model.kv.kv_heads
    n, backend = round_.shape.blocks(settings.block_size), default_backend(lengths.device)
    sizes, kept = (layers, kv_heads, n, settings.block_size), (settings.sink_blocks, settings.window_blocks)
    weights = round_.evidence.flatten(1, 2)
    scores, valid, count = score_own_blocks(weights, lengths, round_.ends, sizes, kept, settings.read_share, backend)
    lists, counts = select_top_k(scores, valid, count, backend, n)
    shape = layers, len(lengths), kv_heads
    blocks = BlockLists(lists.view(*shape, n), counts.view(shape), settings.block_size)
    rows = Rows(given["query_starts"], lengths, given["block_tables"], round_.shape.branches)
    return ListedReads(blocks, {layer: layer for layer in range(layers)}, round_.model.plan(rows, blocks=blocks))
