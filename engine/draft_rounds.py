"""A draft's whole round in one CUDA graph: γ + 1 passes, sampling, the evidence, and what to announce of it.

The first pass runs the tokens that are pending and attends densely; later passes run one token each, and may read
only what the first one weighed most. The evidence is the mean over the passes of each head's weights on each block.

With `refresh_every` k > 1 only every kth round of a session is refreshed by a dense first pass. In the others the first
pass too reads lists, those that the weights of the last dense one give. What it does not read keeps these weights, by
which later passes may still list it. One graph serves both: a session that refreshes has lists of everything.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.decoder import Decoder, run_decoder
from engine.kv.cache import KVCache
from engine.kv.pages import PAGE_SIZE, SequenceKV
from engine.staging import Staging
from engine.steps import lay_out_rows, rows_layout
from kernels.backends import Backend, default_backend
from kernels.block_weights import add_listed_weights, paged_attention_with_block_weights
from kernels.paged_attention import BlockLists, Work, paged_attention, plan_work
from kernels.selection import select_top_k
from kernels.shared_budget import WORD
from kernels.shared_top_k import mark_top_k_over_all


@dataclass(frozen=True)
class RoundSettings:
    """gamma: tokens a round. support: entries of a sampled token's distribution that are kept. block_size: tokens.

    read_share: share of the blocks that later passes read; 1: they are dense. sink_blocks, window_blocks: they
    always read. projection: [rows, layers * heads] float32, from the draft's heads to an announcement's rows, in
    whose order it chooses; None: rounds announce nothing. stickiness: factor for what was announced last.
    refresh_every: rounds from one dense first pass of a session to its next; 1: every round has one.
    """

    gamma: int
    support: int
    block_size: int
    read_share: float = 1.0
    sink_blocks: int = 1
    window_blocks: int = 4
    projection: Tensor | None = None
    stickiness: float = 1.0
    refresh_every: int = 1

    def __post_init__(self) -> None:
        every, share = self.refresh_every, self.read_share
        if every < 1:
            raise ValueError(f"refresh_every is {every}, expected at least 1 (1: every round is refreshed)")
        if every > 1 and share >= 1:
            raise ValueError(
                f"refresh_every is {every} and read_share {share}: rounds without a dense first pass read lists; give "
                "a read_share below 1, or refresh_every 1"
            )


@dataclass
class RoundMemory:
    """Of one session, where not every round refreshes: what its last dense first pass weighed. Filled by the runner.

    weights: [layers, heads, blocks] float32 where the model lives, over γ + 1 as they count in evidence. length:
    tokens that they are of and that still stand. rounds: drafted since that one.
    """

    weights: Tensor | None = None
    length: int = 0
    rounds: int = 0

    def refresh_due(self, every: int) -> bool:
        """Whether the next round is one of those, `every` rounds apart, that refresh."""
        return self.weights is None or self.rounds + 1 >= every

    def cut(self, length: int) -> None:
        """The tokens from `length` on were taken back: what comes in their place was never weighed."""
        self.length = min(self.length, length)


@dataclass(frozen=True)
class AnnouncementRequest:
    """Choose `count` blocks over all rows among first … last - 1. before: uint64 [rows, words], chosen last time."""

    first: int
    last: int
    count: int
    before: np.ndarray | None


@dataclass(frozen=True)
class RoundRequest:
    """tokens: pending ones, the last of them committed or guessed. uniforms: [γ + 1]. temperature 0: greedy.

    refresh: let the first pass be dense, and `memory` hold what it weighed; otherwise the pass reads by what `memory`
    holds. Both only count where settings.refresh_every > 1; no memory: nothing is held.
    """

    kv: SequenceKV
    tokens: list[int]
    temperature: float
    top_p: float
    uniforms: np.ndarray
    announce: AnnouncementRequest | None
    memory: RoundMemory | None = None
    refresh: bool = True

    def __post_init__(self) -> None:
        if not self.refresh and (self.memory is None or self.memory.weights is None):
            raise ValueError(
                "a round without refresh needs a memory with weights: refresh the session's first round"
            )


@dataclass(frozen=True)
class RoundOutput:
    """tokens: γ + 1, the last not run. ids, probs: [γ + 1, support] of each token's distribution, None if greedy.

    words: uint64 [rows, words] of the blocks to announce, if asked for. blocks_read: over passes, layers and KV heads;
    None where all passes are dense. The KV holds all pending tokens and γ more; kv.length is left to the caller.
    """

    tokens: list[int]
    ids: np.ndarray | None
    probs: np.ndarray | None
    words: np.ndarray | None
    blocks_read: int | None = None


@dataclass(frozen=True)
class RoundShape:
    """All that a round's graph is specialised for; queries: pending tokens of a sequence, at most."""

    sequences: int
    queries: int
    pages: int
    sampled: bool
    announces: bool


@dataclass
class RoundBuffers:
    """Inputs of a shape on the device, all parts of `inputs`, and what its graph leaves in `results`.

    results: tokens [γ + 1, sequences] int32; ids, probs [γ + 1, sequences, support] int32 and float32 where some are
    sampled; words [sequences, rows, words] int64 where rounds announce; blocks_read [sequences] int64 where passes read
    lists. γ and settings are those of the runner.
    """

    inputs: Staging
    results: Staging
    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64
    query_starts: Tensor  # [sequences + 1] int32
    lengths: Tensor  # [sequences] int32, pending tokens included
    block_tables: Tensor  # [sequences, pages] int32
    temperature: Tensor  # [sequences] float32
    top_p: Tensor  # [sequences] float32
    uniforms: Tensor  # [gamma + 1, sequences] float64
    limits: Tensor  # [3, sequences] int32: first, last, count of an announcement
    before: Tensor | None = None  # [sequences, rows, words] int64
    known: Tensor | None = None  # [sequences] int32, tokens that `kept` is of; 0: this round refreshes
    kept: Tensor | None = None  # [sequences, layers, heads, blocks] float32: RoundMemory's, then this round's


def make_round_buffers(
    shape: RoundShape, settings: RoundSettings, vocab: int, device: torch.device
) -> RoundBuffers:
    count, passes = shape.sequences, settings.gamma + 1
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        **rows_layout(count, shape.queries, shape.pages),
        "temperature": ((count,), torch.float32),
        "top_p": ((count,), torch.float32),
        "uniforms": ((passes, count), torch.float64),
        "limits": ((3, count), torch.int32),
    }
    results: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"tokens": ((passes, count), torch.int32)}
    if shape.sampled:
        support = min(settings.support, vocab)
        results["ids"] = (passes, count, support), torch.int32
        results["probs"] = (passes, count, support), torch.float32
    if shape.announces:
        assert settings.projection is not None
        sizes = count, len(settings.projection), -(-blocks_of(shape, settings) // WORD)
        layout["before"] = results["words"] = sizes, torch.int64
    if settings.read_share < 1:
        results["blocks_read"] = (count,), torch.int64
    if settings.refresh_every > 1:
        layout["known"] = (count,), torch.int32
    inputs = Staging(layout, device)
    buffers = RoundBuffers(inputs, Staging(results, device), **inputs.device)
    lay_out_rows(inputs.host, [])
    inputs.send()
    return buffers


def lay_out_round(buffers: RoundBuffers, requests: list[RoundRequest]) -> None:
    """Bring the inputs of a round to the device."""
    buffers.inputs.begin()
    host = buffers.inputs.host
    lay_out_rows(host, [(item.kv, item.tokens) for item in requests])
    host["temperature"][:], host["top_p"][:], host["uniforms"][:], host["limits"][:] = 0, 1, 0, 0
    if buffers.known is not None:
        host["known"][:] = 0
    for i, item in enumerate(requests):
        host["temperature"][i], host["top_p"][i] = item.temperature, item.top_p
        host["uniforms"][:, i] = item.uniforms
        if buffers.known is not None and not item.refresh:
            assert item.memory is not None
            host["known"][i] = item.memory.length
        if item.announce is None:
            continue
        host["limits"][:, i] = item.announce.first, item.announce.last, max(0, item.announce.count)
        _lay_out_words(host["before"][i], item.announce.before)
    buffers.inputs.send()


def _lay_out_words(place: np.ndarray, words: np.ndarray | None) -> None:
    """place: int64 [rows, words or more]"""
    used = 0 if words is None else words.shape[1]
    place[:, used:] = 0
    if words is not None:
        place[:, :used] = words.view(np.int64)


def read_round(buffers: RoundBuffers, requests: list[RoundRequest]) -> list[RoundOutput]:
    """Wait for a round and take its results."""
    results = buffers.results.fetch()
    tokens = results["tokens"].T.tolist()
    outputs = []
    for i, item in enumerate(requests):
        drawn = item.temperature > 0
        outputs.append(
            RoundOutput(
                tokens[i],
                results["ids"][:, i].copy() if drawn else None,
                results["probs"][:, i].copy() if drawn else None,
                None if item.announce is None else results["words"][i].view(np.uint64).copy(),
                int(results["blocks_read"][i]) if "blocks_read" in results else None,
            )
        )
    return outputs


def bring_kept(buffers: RoundBuffers, requests: list[RoundRequest]) -> None:
    """Before a round: what sessions that do not refresh remember."""
    if buffers.kept is None:
        return
    for i, item in enumerate(requests):
        if not item.refresh:
            assert item.memory is not None and item.memory.weights is not None
            weights = item.memory.weights
            buffers.kept[i, :, :, : weights.shape[2]].copy_(weights)


def take_kept(buffers: RoundBuffers, settings: RoundSettings, requests: list[RoundRequest]) -> None:
    """After it, before their KV's lengths move: what sessions that refreshed remember from now on."""
    if buffers.kept is None:
        return
    for i, item in enumerate(requests):
        memory = item.memory
        if memory is not None and item.refresh:
            memory.length, memory.rounds = item.kv.length + len(item.tokens), 0
            blocks = -(-memory.length // settings.block_size)
            memory.weights = buffers.kept[i, :, :, :blocks].clone()
        elif memory is not None:
            memory.rounds += 1


def blocks_of(shape: RoundShape, settings: RoundSettings) -> int:
    return shape.pages * PAGE_SIZE // settings.block_size


def run_round(
    decoder: Decoder,
    kv: KVCache,
    settings: RoundSettings,
    shape: RoundShape,
    buffers: RoundBuffers,
    attention: Backend | None = None,
) -> None:
    """Launches only, the same for all rounds of a shape. buffers.kept is given where settings.refresh_every > 1.

    attention: what attends; the device's default if None.
    """
    device = buffers.lengths.device
    attention = attention or default_backend(device)
    sequences = shape.sequences
    present = buffers.lengths > 0
    evidence: Tensor | None = None
    if shape.announces or settings.read_share < 1:
        heads = len(decoder.layers), decoder.heads, blocks_of(shape, settings)
        evidence = torch.zeros(sequences, *heads, device=device)
    ends = buffers.query_starts[1:].long() - 1
    first_lists = None
    if settings.refresh_every > 1:
        assert evidence is not None
        first_lists = _first_lists(decoder, settings, shape, buffers, evidence, attention)
    logits = _run_pass(
        decoder,
        kv,
        settings,
        shape,
        buffers,
        buffers.token_ids,
        buffers.positions,
        buffers.slots,
        buffers.query_starts,
        buffers.lengths,
        shape.queries,
        evidence,
        first_lists,
        ends.clamp(min=0),
        attention,
    )
    if buffers.kept is not None:
        assert evidence is not None
        buffers.kept.copy_(evidence)
    lists = None
    if settings.read_share < 1:
        assert evidence is not None
        lists = _own_lists(decoder, settings, shape, buffers, evidence, attention)
        read = _count_blocks(decoder, settings, buffers, first_lists, lists)
        buffers.results.device["blocks_read"].copy_(read)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    tokens, ids, probs = [], [], []
    for index in range(settings.gamma + 1):
        token, support = _sample(logits, settings, shape, buffers, index)
        tokens.append(token)
        if support is not None:
            ids.append(support[0])
            probs.append(support[1])
        if index == settings.gamma:
            break
        position = buffers.lengths.long() + index
        page = buffers.block_tables.gather(1, (position // PAGE_SIZE)[:, None]).long()[:, 0]
        slot = (page * PAGE_SIZE + position % PAGE_SIZE).where(present, -1)
        lengths = (buffers.lengths + index + 1).where(present, 0)
        logits = _run_pass(
            decoder,
            kv,
            settings,
            shape,
            buffers,
            token,
            position.where(present, 0),
            slot,
            starts,
            lengths,
            1,
            evidence if shape.announces else None,
            lists,
            None,
            attention,
        )
    results = buffers.results.device
    results["tokens"].copy_(torch.stack(tokens))
    if ids:
        results["ids"].copy_(torch.stack(ids))
        results["probs"].copy_(torch.stack(probs))
    if shape.announces:
        assert evidence is not None
        scores = _predict(settings, buffers, evidence)
        words = mark_top_k_over_all(scores, buffers.limits[2], default_backend(device))
        results["words"].copy_(words)


def _run_pass(
    decoder: Decoder,
    kv: KVCache,
    settings: RoundSettings,
    shape: RoundShape,
    buffers: RoundBuffers,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    max_queries: int,
    evidence: Tensor | None,
    lists: tuple[BlockLists, Work | None] | None,
    logits_rows: Tensor | None,
    attention: Backend,
) -> Tensor:
    """One pass; adds the weights of each sequence's last query to `evidence` [sequences, layers, heads, blocks]."""
    backend = default_backend(lengths.device)
    group, dim = decoder.heads // decoder.kv_heads, kv.k_pages[0].shape[3]
    scale, share = decoder.attention_scale, 1 / (settings.gamma + 1)
    tables = buffers.block_tables
    work: Work | None = None
    if attention == "triton" and lists is None:
        work = plan_work(decoder.kv_heads, group, dim, max_queries, tables, lengths, PAGE_SIZE)

    def attend(layer: int, queries: Tensor) -> Tensor:
        pages = kv.k_pages[layer], kv.v_pages[layer]
        arguments = (queries, *pages, tables, lengths, starts, scale)
        if lists is not None:
            every, planned = lists
            blocks = BlockLists(every.lists[layer], every.counts[layer], every.block_size)
            of_layer = None if planned is None else planned.layer(layer)
            if evidence is None:
                return paged_attention(*arguments, blocks, None, attention, max_queries, of_layer)
            return add_listed_weights(
                *arguments, blocks, evidence[:, layer], share, attention, max_queries, of_layer
            )
        if evidence is None:
            return paged_attention(*arguments, backend=attention, max_queries=max_queries, work=work)
        out, weights = paged_attention_with_block_weights(
            *arguments,
            settings.block_size,
            1,
            backend=attention,
            max_queries=max_queries,
            width=evidence.shape[3],
            work=work,
        )
        evidence[:, layer].add_(weights[:, 0], alpha=share)
        return out

    return run_decoder(
        decoder,
        token_ids,
        positions,
        slots,
        kv.k_pages,
        kv.v_pages,
        attend,
        backend,
        logits_rows,
    )


Lists = tuple[BlockLists, Work | None]  # of all layers: [layers, sequences, kv_heads, …]


def _first_lists(
    decoder: Decoder,
    settings: RoundSettings,
    shape: RoundShape,
    buffers: RoundBuffers,
    evidence: Tensor,
    attention: Backend,
) -> Lists:
    """What the first pass reads; `evidence` takes the kept weights of the blocks that it does not read."""
    assert buffers.kept is not None and buffers.known is not None
    known = buffers.known // settings.block_size
    column = torch.arange(evidence.shape[3], device=evidence.device)
    # What lies beyond may be of tokens that were taken back, or of another session.
    kept = buffers.kept.masked_fill((column >= known[:, None])[:, None, None], 0)
    lists, work = _own_lists(decoder, settings, shape, buffers, kept, attention, known, shape.queries)
    unread = ~_listed(lists).transpose(0, 1)[:, :, :, None]  # [sequences, layers, kv_heads, 1, blocks]
    by_kv_head = kept.unflatten(2, (decoder.kv_heads, -1))
    evidence.unflatten(2, (decoder.kv_heads, -1)).copy_(by_kv_head * unread)
    return lists, work


def _listed(blocks: BlockLists) -> Tensor:
    """Lists as bools [layers, sequences, kv_heads, blocks]; entries beyond a list's count may be anything."""
    valid = torch.arange(blocks.lists.shape[-1], device=blocks.lists.device) < blocks.counts[..., None]
    times = torch.zeros_like(blocks.lists)
    times.scatter_add_(-1, blocks.lists.where(valid, 0).long(), valid.to(times.dtype))
    return times > 0


def _count_blocks(
    decoder: Decoder, settings: RoundSettings, buffers: RoundBuffers, first: Lists | None, later: Lists
) -> Tensor:
    """Over a round's passes, layers and KV heads: [sequences] int64."""
    if first is None:
        present = -(-buffers.lengths.long() // settings.block_size)
        dense = present * len(decoder.layers) * decoder.kv_heads
    else:
        dense = first[0].counts.sum((0, 2))
    return dense + settings.gamma * later[0].counts.sum((0, 2))


def _own_lists(
    decoder: Decoder,
    settings: RoundSettings,
    shape: RoundShape,
    buffers: RoundBuffers,
    evidence: Tensor,
    attention: Backend,
    known: Tensor | None = None,
    max_queries: int = 1,
) -> Lists:
    """What passes read: of each KV head the blocks that were weighed most, sinks, window, new ones.

    known: [sequences] int32, the blocks from there on were not weighed and are all read; None: all were weighed.
    max_queries: of a sequence in such a pass.
    """
    backend = default_backend(evidence.device)
    sequences, layers, _, n = evidence.shape
    kv_heads, group = decoder.kv_heads, decoder.heads // decoder.kv_heads
    scores = (
        evidence.unflatten(2, (kv_heads, group)).sum(3).transpose(0, 1)
    )  # [layers, sequences, kv_heads, n]
    block, lengths = settings.block_size, buffers.lengths
    ends = -((-lengths - settings.gamma) // block)  # blocks once the round has run
    recent = -(-lengths // block) - settings.window_blocks
    column = torch.arange(n, device=evidence.device)
    if known is not None:
        recent = torch.minimum(recent, known)
    always = (column < settings.sink_blocks) | (column >= recent[:, None])
    valid = ends.where(lengths > 0, 0)
    forced = (always & (column < valid[:, None])).sum(1)
    weights = scores.masked_fill(always[:, None], torch.inf).reshape(-1, n)

    def of_heads(values: Tensor) -> Tensor:
        return values.int()[None, :, None].expand(layers, -1, kv_heads).flatten()

    count = torch.maximum((valid * settings.read_share).int(), forced)
    lists, counts = select_top_k(weights, of_heads(valid), of_heads(count), backend, n)
    blocks = BlockLists(
        lists.view(layers, sequences, kv_heads, n), counts.view(layers, sequences, kv_heads), block
    )
    work = None
    if attention == "triton":
        dim = decoder.head_dim
        work = plan_work(kv_heads, group, dim, max_queries, buffers.block_tables, lengths, PAGE_SIZE, blocks)
    return blocks, work


def _sample(
    logits: Tensor, settings: RoundSettings, shape: RoundShape, buffers: RoundBuffers, index: int
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Tokens [sequences], and ids and probabilities [sequences, support] of what they were drawn from."""
    best = logits.argmax(-1)
    if not shape.sampled:
        return best, None
    greedy = buffers.temperature == 0
    heat = buffers.temperature.where(~greedy, 1.0)[:, None]
    # A nucleus is a prefix of the sorted distribution, as is what `support` keeps: the shorter of the two is both.
    top, ids = (logits.float() / heat).softmax(-1).topk(min(settings.support, logits.shape[-1]))
    before = top.double().cumsum(-1) - top
    kept = (before < buffers.top_p[:, None]) | (torch.arange(top.shape[1], device=top.device) == 0)
    top = top.where(kept, 0.0)
    top = top / top.sum(-1, keepdim=True)
    cumulative = top.double().cumsum(-1)
    reached = cumulative <= buffers.uniforms[index][:, None] * cumulative[:, -1:]
    last = ((top > 0).sum(-1) - 1).clamp(min=0)  # the logits of an empty place may be anything
    place = torch.minimum(reached.sum(-1), last)
    drawn = ids.gather(1, place[:, None])[:, 0]
    return best.where(greedy, drawn), (ids, top)


def _predict(settings: RoundSettings, buffers: RoundBuffers, evidence: Tensor) -> Tensor:
    """What each row of an announcement would get of each block, by which it chooses: [sequences, rows, n] float32."""
    assert settings.projection is not None and buffers.before is not None
    n = evidence.shape[3]
    scores = torch.matmul(settings.projection, evidence.flatten(1, 2))  # [sequences, rows, n]
    column = torch.arange(n, device=evidence.device)
    scores = scores * (1 + (settings.stickiness - 1) * _bits(buffers.before, n))
    first, last, _ = buffers.limits
    outside = (column < first[:, None]) | (column >= last[:, None])
    return scores.masked_fill(outside[:, None], 0)


def _bits(words: Tensor, n: int) -> Tensor:
    """int64 [..., words] -> int64 [..., n], 0 or 1."""
    column = torch.arange(n, device=words.device)
    return (words[..., column // WORD] >> (column % WORD)) & 1
