"""The verdict on each position in Triton: its threshold, found among candidates, and the test of its drafted token."""

from typing import Any, NamedTuple

from torch import Tensor

from specahead.kernels.backends import constant, follow, jit, tl
from specahead.kernels.rejection.nucleus import find_candidates
from specahead.kernels.rejection.positions import (
    Logits,
    Positions,
    bits_of,
    depth_of,
    is_kept,
    likeliest_of,
    scale_of,
    weight_of,
)
from specahead.kernels.rejection.reference import DraftedRows
from specahead.kernels.threshold import Bounds, count_at_or_above, search

CANDIDATES = 64  # of each chunk that a program holds in registers; others are read again in every pass of its search
SUPPORT = constant(128)  # entries of a draft's distribution that are taken at once


class Candidates(NamedTuple):
    """What the search for one position's threshold reads.

    logits, entries: pointers to the position's logits and lists; begins: [SPLITS_2, 1], where each chunk begins
    held, most: how many entries each list has, [SPLITS_2], and the longest one
    peak, scale: for depths. tied: the bits of a depth, whose entries are searched by index
    vocab: the size of the vocabulary
    index, bits: [SPLITS_2, CANDIDATES], the first entries of each list; bits are -1 after a list's end
    """

    logits: Any
    entries: Any
    begins: Any
    held: Any
    most: Any
    peak: Any
    scale: Any
    tied: Any
    vocab: Any
    index: Any
    bits: Any


class Drafted(NamedTuple):
    """Tokens [rows, γ], and the distributions that they were drawn from: ids and probabilities [rows, γ, support]."""

    tokens: Any
    ids: Any
    probs: Any


def judge_positions(logits: Tensor, rows: DraftedRows, split: dict[str, Any]) -> Positions:
    """Return all that `Positions` holds, for every position of rows of logits [rows, γ + 1, vocab]."""
    gamma = rows.draft_tokens.shape[1]
    given = Logits(logits, rows.temperature, rows.top_p)
    drafted = Drafted(rows.draft_tokens, rows.support_ids, rows.support_probs)
    found, largest, listed = find_candidates(given, rows.draft_counts, gamma, split)
    how = {"CANDIDATES": min(CANDIDATES, split["SPLIT"].CHUNK), "num_warps": 8} | split
    counts, uniforms, support = rows.draft_counts, rows.accept_uniforms, rows.support_ids.shape[2]
    _verdict_kernel[(len(found.peak),)](given, counts, found, largest, listed, drafted, uniforms, gamma, support, **how)
    return found


@jit
def _tile(candidates, column, CANDIDATES: tl.constexpr):
    """Return the indices and the depths' bits of each list's entries from `column` on, [SPLITS_2, CANDIDATES]."""
    columns = column + tl.arange(0, CANDIDATES)[None, :]
    there = columns < candidates.held[:, None]
    listed = tl.load(candidates.entries + candidates.begins + columns, mask=there, other=0)
    index = candidates.begins + listed.to(tl.int32)
    logits = tl.load(candidates.logits + index, mask=there, other=0.0).to(tl.float32)
    return index, tl.where(there, bits_of(depth_of(logits, candidates.peak, candidates.scale)), -1)


@jit
def _key_of(bits):
    """Return a key that orders entries by weight from the bits of a depth, or these bits from the key."""
    return 0x7F800000 - bits


@jit
def _weigh_tile(bits, probes):
    """Return the weights, summed, and the numbers of the entries of a tile whose keys are at or above four probes."""
    keys = tl.where(bits >= 0, _key_of(bits), -1)
    weights = tl.where(bits >= 0, weight_of(bits), 0.0)
    reached = (
        tl.sum(tl.where(keys >= probes[0], weights, 0.0)),
        tl.sum(tl.where(keys >= probes[1], weights, 0.0)),
        tl.sum(tl.where(keys >= probes[2], weights, 0.0)),
        tl.sum(tl.where(keys >= probes[3], weights, 0.0)),
    )
    return reached, count_at_or_above(keys, probes)


@jit
def _count_tied(candidates, index, bits, probes):
    """Return the numbers of the tied entries of a tile whose keys are at or above four probes."""
    keys = tl.where(bits == candidates.tied, candidates.vocab - index, 0)
    return count_at_or_above(keys, probes)


@jit
def _add(ours, theirs):
    return ours[0] + theirs[0], ours[1] + theirs[1], ours[2] + theirs[2], ours[3] + theirs[3]


@jit
def _weigh(candidates, probes):
    """Measure for `search` the candidates by weight."""
    CANDIDATES: tl.constexpr = candidates.bits.shape[1]
    reached, counts = _weigh_tile(candidates.bits, probes)
    for column in tl.range(CANDIDATES, candidates.most, CANDIDATES):
        _, bits = _tile(candidates, column, CANDIDATES)
        more, others = _weigh_tile(bits, probes)
        reached, counts = _add(reached, more), _add(counts, others)
    return reached, counts


@jit
def _count(candidates, probes):
    """Measure for `search` the tied candidates by their number, the lower indices first."""
    CANDIDATES: tl.constexpr = candidates.bits.shape[1]
    counts = _count_tied(candidates, candidates.index, candidates.bits, probes)
    for column in tl.range(CANDIDATES, candidates.most, CANDIDATES):
        index, bits = _tile(candidates, column, CANDIDATES)
        counts = _add(counts, _count_tied(candidates, index, bits, probes))
    return counts, counts


@jit
def _threshold(found, listed, logits_ptr, at, scale, SPLIT: tl.constexpr, CANDIDATES: tl.constexpr):
    """Return `cut`, `last` and `kept` of a position."""
    splits = tl.arange(0, SPLIT.SPLITS_2)
    held = tl.load(listed.counts + at * SPLIT.SPLITS + splits, mask=splits < SPLIT.SPLITS, other=0)
    before, begins, zero = tl.load(found.before + at), splits[:, None] * SPLIT.CHUNK, at * 0
    vocab = zero + SPLIT.VOCAB
    logits_ptr += at.to(tl.int64) * SPLIT.VOCAB
    entries_ptr = listed.entries + at.to(tl.int64) * SPLIT.SPLITS * SPLIT.CHUNK
    lists = (logits_ptr, entries_ptr, begins, held, tl.max(held, 0), tl.load(found.peak + at), scale)
    index, bits = _tile(Candidates(*lists, zero, vocab, begins, begins), 0, CANDIDATES)
    candidates = Candidates(*lists, zero, vocab, index, bits)
    # All candidates lie at or above `low`, none at or above `high`.
    low = _key_of(bits_of(tl.load(found.stop + at))) + 1
    high = _key_of(bits_of(tl.load(found.start + at))) + 1
    wanted = tl.load(found.wanted + at) - before
    reached, counts = _weigh(candidates, (low, low, low, low))
    bounds = Bounds(lo=low, hi=high, at_lo=reached[0], at_hi=reached[0] * 0, many_lo=counts[0], many_hi=zero)
    bounds = search(_weigh, candidates, None, wanted, bounds, True, True)
    # Of the entries that tie at the threshold the first ones are kept: as many as it takes, and one at least.
    cut, ties = _key_of(bounds.lo), bounds.many_lo - bounds.many_hi
    weight = weight_of(cut)
    lacking = tl.ceil((wanted - bounds.at_hi) / tl.maximum(weight, 1e-37))
    needed = tl.minimum(tl.minimum(tl.maximum(lacking, 1.0), 2.0**30).to(tl.int32), ties)
    places = Bounds(lo=zero + 1, hi=vocab + 1, at_lo=ties, at_hi=zero, many_lo=ties, many_hi=zero)
    places = search(_count, Candidates(*lists, cut, vocab, index, bits), None, needed, places, False)
    partly = needed < ties
    last = tl.where(partly, vocab - places.lo, SPLIT.VOCAB)
    return cut, last, before + tl.where(partly, bounds.at_hi + needed * weight, bounds.at_lo)


@jit
def _verdict_kernel(
    given,
    counts_ptr,
    found,
    largest,
    listed,
    drafted,
    uniforms_ptr,
    gamma,
    support,
    CANDIDATES: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find a position's threshold, and whether its drafted token passes."""
    follow(PDL)
    at = tl.program_id(0)
    row = at // (gamma + 1)
    place = at % (gamma + 1)
    count = tl.load(counts_ptr + row).to(tl.int32)
    if place > count:
        return
    token = tl.load(drafted.tokens + row * gamma + place, mask=place < count, other=-1).to(tl.int32)
    scale = scale_of(given.temperature, row)
    if scale == 0:
        only = at + tl.arange(0, 1)
        likeliest = tl.sum(likeliest_of(largest, only, only >= 0, SPLIT), 0)
        tl.store(found.likeliest + at, likeliest)
        tl.store(found.passed + at, (likeliest == token).to(tl.int32))
    else:
        if tl.load(given.top_p + row).to(tl.float32) < 1:
            cut, last, kept = _threshold(found, listed, given.logits, at, scale, SPLIT, CANDIDATES)
        else:
            cut, last = at * 0 + 0x7F800000, at * 0 - 1  # all of finite depth
            kept = tl.load(found.mass + at)
        tl.store(found.cut + at, cut)
        tl.store(found.last + at, last)
        tl.store(found.kept + at, kept)
        if place < count:
            draft = row * gamma + place
            q = tl.zeros([SUPPORT], tl.float32)
            for s in tl.range(0, support, SUPPORT):
                entry = s + tl.arange(0, SUPPORT)
                ids = tl.load(drafted.ids + draft * support + entry, mask=entry < support, other=-1)
                probs = tl.load(drafted.probs + draft * support + entry, mask=entry < support, other=0.0)
                q += tl.where(ids == token, probs, 0.0)
            logit = tl.load(given.logits + at.to(tl.int64) * SPLIT.VOCAB + token).to(tl.float32)
            bits = bits_of(depth_of(logit, tl.load(found.peak + at), scale))
            p = tl.where(is_kept(bits, token, cut, last), weight_of(bits) / kept, 0.0)
            u = tl.load(uniforms_ptr + draft).to(tl.float64)
            passed = u * tl.sum(q, 0).to(tl.float64) < p.to(tl.float64)
            tl.store(found.passed + at, passed.to(tl.int32))
