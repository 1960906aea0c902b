"""The launches of a pass, the same for all passes of a shape."""

from dataclasses import replace

import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.fetch import ChosenFetcher, FetchPlan, LastChoices
from specahead.engine.model.decoder import PassTokens
from specahead.engine.model.head import DraftHead
from specahead.engine.model.layer_attention import BlockMemory, LayerAttention, LayerPages, Rows
from specahead.engine.parallel.ranks import Ranks
from specahead.engine.sampling.judging import judge
from specahead.engine.staging import Buffers
from specahead.engine.steps.alternatives import PassVerdicts, accept_alternatives, drafted_logits
from specahead.engine.steps.device_chain import DeviceChain
from specahead.engine.steps.drafting import draft_for_itself
from specahead.engine.steps.prompt_graphs import PromptGraphs
from specahead.engine.steps.reads import PagedModel, chosen_reads, listed_layers, listed_reads
from specahead.engine.steps.shapes import PassShape
from specahead.kernels.backends import default_backend
from specahead.kernels.paged_attention import pinned_tuning
from specahead.kernels.prompt_reads import PromptReads
from specahead.kernels.selection import Remembered, remember_weights, score_blocks, select_over_rows


def run_pass(
    model: PagedModel,
    shape: PassShape,
    buffers: Buffers,
    layer_pages: LayerPages | None = None,
    prompts: PromptReads | None = None,
    chain: DeviceChain | None = None,
    graphs: PromptGraphs | None = None,
) -> None:
    """Launch a pass on its buffers. The launches are the same for all passes of a shape.

    layer_pages: the keys and values of a layer; None: the KV's own pages. prompts: the parts that the sequences of a
    dense pass read one by one, if they do. chain: the device chain, for a step; None: a pass of its exact size.
    graphs: run the layers in place of the decoder.
    """
    given, kv, drafting = buffers.tensors, model.kv, model.drafting or model.decoder
    if chain is not None:
        _take_up(shape, buffers, kv.ranks, chain)
    if shape.shares_out:
        _share_out(given, shape, kv)
    fetched = None
    if shape.read.fetches and shape.read.is_sparse:
        fetched = kv.fetch_plan(
            given["lists"], given["counts"], shape.read.block_size, given["block_tables"], given["round"]
        )
    if shape.drafts:
        drafted = draft_for_itself(replace(model, decoder=drafting), shape, given, fetched)
        buffers.results.device["drafted"].copy_(drafted)
    if fetched is not None:
        _write_fetch_counts(buffers, fetched.page_counts)
    if shape.drafts_alone:
        return
    chosen, rule = None, model.decoder.block_rule
    if shape.fetches_chosen and rule is not None:
        last = LastChoices(given["last_choices"], given["indices"], rule.block_size)
        chosen = kv.chosen_fetcher(given["block_tables"], given["round"], last)
    attend = _attention_of(model, shape, given, fetched, chosen, prompts)
    if layer_pages is not None:
        attend.pages = layer_pages
    logits_rows = given.get("logits_rows")
    if logits_rows is not None and not len(logits_rows) and attend.weights is None:
        attend.unread = kv.num_layers - 1
    running = graphs or (drafting if shape.light else model.decoder)
    if isinstance(running, DraftHead):
        running = running.reading(given["state_slots"])
    tokens = PassTokens(given["token_ids"], given["positions"], given["slots"])
    observe = None if model.tap is None else model.tap.observer(tokens.slots)
    given["logits"] = running.run(tokens, kv, attend, logits_rows, observe)
    if chosen is not None:
        _write_fetch_counts(buffers, kv.ranks.sum(chosen.end()))
    read_weights = attend.weights if isinstance(attend.weights, Tensor) else None
    _leave_results(model, shape, buffers, read_weights, fetched, chain)


def _take_up(shape: PassShape, buffers: Buffers, ranks: Ranks, chain: DeviceChain) -> None:
    """Complete the inputs of a step on every rank: by the device chain, and by what rank 0 has from its host.

    Rank 0 alone has a draft in its process, and gives what that has drafted to the others with all inputs.
    """
    given = buffers.tensors
    if shape.judges_drafts and ranks.rank == 0:
        chain.take_drafts(given)
    ranks.share(buffers.inputs.flat_on_device)
    if shape.turn:
        chain.follow_step(given, shape)


def _share_out(given: dict[str, Tensor], shape: PassShape, kv: KVCache) -> None:
    """Make the lists: blocks that are read in any case, and as many others of the highest remembered weights as the
    budget has room for.

    The budget is one over the heads of all ranks. Each rank remembers the weights of its own heads and 0 of others, so
    the scores of all are the sum over the ranks, to the bit.
    """
    memory = given["memory"][:, :, : shape.blocks]  # a view: its rows keep the stride of the longest context
    backend = default_backend(memory.device)
    limits = given["first"], given["last"], given["blocks"]
    remembered, importance = Remembered(memory, given["indices"]), given["importance"]
    forced, scores, left = score_blocks(remembered, importance, given["bitmaps"], limits, given["room"], backend)
    scores, own = kv.ranks.sum(scores), kv.ranks.own(kv.all_kv_heads)
    all_lists, all_counts = select_over_rows(scores, left, forced, backend, kv.all_kv_heads)
    given["all_lists"], given["all_counts"] = all_lists, all_counts
    given["lists"], given["counts"] = all_lists[:, :, own].contiguous(), all_counts[:, :, own].contiguous()


def _attention_of(
    model: PagedModel,
    shape: PassShape,
    given: dict[str, Tensor],
    fetched: FetchPlan | None,
    chosen: ChosenFetcher | None,
    prompts: PromptReads | None,
) -> LayerAttention:
    """Return how the layers of a pass attend."""
    heads, kv, rule = model.heads, model.kv, model.decoder.block_rule
    rows = Rows(given["query_starts"], given["lengths"], given["block_tables"], shape.most_rows, given.get("visible"))
    eight_bit = heads.kv_scales is not None
    tuning = pinned_tuning(heads.dim, heads.group, shape.most_rows, eight_bit) if shape.pinned else None
    attend = model.attends(rows)
    attend.prompts = prompts
    if rule is not None:
        attend.chosen = chosen_reads(rule, kv, shape, given, chosen, tuning)
        if attend.chosen.parts:
            return attend
    if shape.read.weighs or (prompts is None and (not shape.read.is_sparse or shape.read.dense_layers)):
        attend.dense_work = model.plan(rows, tuning)
    if shape.read.weighs:
        memory, index = given["memory"][:, :, : shape.blocks], listed_layers(shape, kv)
        attend.weights = BlockMemory(
            memory, given["indices"], index, shape.read.decay, shape.read.block_size, shape.pinned, kv.ranks
        )
    elif shape.read.is_sparse:
        attend.listed = listed_reads(model, rows, shape, given, fetched, tuning)
        # Not among the buffers, so that later captures take its memory: as large as all lists of the pass.
        attend.weights = torch.empty(given["lists"].shape, dtype=torch.float32, device=rows.starts.device)
    return attend


def _write_fetch_counts(buffers: Buffers, page_counts: Tensor) -> None:
    """Write how many pages were listed, were fetched, and found no room on the GPU to the results.

    page_counts: summed over ranks, [3 + sequences] int32 (specahead.engine.kv.fetch.count_fetches).
    """
    results = buffers.results.device
    for index, name in enumerate(("listed", "fetched", "overflow")):
        results[name].copy_(page_counts[index : index + 1])
    results["missed"].copy_(page_counts[3:])


def _leave_results(
    model: PagedModel,
    shape: PassShape,
    buffers: Buffers,
    read_weights: Tensor | None,
    fetched: FetchPlan | None,
    chain: DeviceChain | None,
) -> None:
    """Write verdicts and counts to the results, and remember the weights of the blocks that were read.

    read_weights: those of all lists, float32 as they; None: attention has remembered them already, or reads no lists.
    """
    given, results = buffers.tensors, buffers.results.device
    backend = default_backend(given["logits"].device)
    if shape.judge is not None:
        by_sequence = drafted_logits(given["logits"], shape)
        accepted, following = judge(by_sequence, given, backend, shape.judge.draws_own, shape.judge.cuts)
        judged = PassVerdicts(accepted, following, by_sequence.amax(2))
        alternative = None
        if shape.alternatives:
            judged, alternative = accept_alternatives(judged, given, shape, model.kv, model.tap)
            results["alternative"].copy_(alternative)
        for name, tensor in vars(judged).items():
            results[name].copy_(tensor)
        if shape.chained and chain is not None:
            chain.leave_verdicts(given, judged.accepted, judged.following, alternative)
    if not shape.shares_out:
        return
    all_lists, all_counts = given["all_lists"], given["all_counts"]
    results["blocks_read"].copy_(all_counts.sum((0, 2)))
    if read_weights is None:
        return
    indices = given["indices"]
    if fetched is not None:  # a void pass will run again
        indices = indices.masked_fill(fetched.overflow > 0, -1)
    remembered, read = Remembered(given["memory"], indices), model.kv.ranks.widened(read_weights)
    remember_weights(remembered, all_lists, all_counts, read, given["blocks"], shape.read.decay, backend)
