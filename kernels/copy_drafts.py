"""Drafted tokens copied from the rows in which a draft's rounds leave them to the step that judges them."""

from typing import NamedTuple

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, jit, power_of_two, tl

_CHUNK = 1024  # numbers that one program copies


class Drafts(NamedTuple):
    """What the last rounds have drafted, a row a sequence; contiguous."""

    tokens: Tensor
    """[rows, γ] int32."""
    ids: Tensor
    """[rows, γ, support] int32, the tokens that each was drawn from."""
    probs: Tensor
    """[rows, γ, support] float32, their probabilities."""
    likeliest: Tensor
    """[rows, γ, 2] int32, the two likeliest tokens at each position."""
    bitmaps: Tensor
    """[rows, bitmap rows, words] int64, a bit for each block that was announced."""


class JudgedRows(NamedTuple):
    """Which rows of a pass are of which sequence, and which sequences judge drafts."""

    drafts: Tensor
    """[sequences] int32, the row of each one's drafts; negative: it judges what the host gave."""
    held: Tensor
    """[sequences] int32, tokens that each judges before those of the rounds."""
    counts: Tensor
    """[sequences] int32, tokens that each judges in all."""
    starts: Tensor
    """[sequences + 1] int32, the first row of each; it runs the token before the judged ones, the others run these."""


class Judged(NamedTuple):
    """What a pass judges; contiguous. Tensors that a pass does not have are None."""

    token_ids: Tensor
    """[pass rows] int64, what the pass runs."""
    tokens: Tensor
    """[sequences, γ] int32."""
    ids: Tensor | None = None
    """[sequences, γ, support] int32."""
    probs: Tensor | None = None
    """[sequences, γ, support] float32."""
    bitmaps: Tensor | None = None
    """[sequences, bitmap rows, words] int64."""
    alternatives: Tensor | None = None
    """[sequences, most] int32, tokens that run after the judged ones: the likeliest that was not drafted there."""
    alternative_counts: Tensor | None = None
    """[sequences] int32. Sequences that have some hold no tokens."""


def copy_drafts(rows: JudgedRows, judged: Judged, drafts: Drafts, backend: Backend = "torch") -> None:
    """Copy drafts to where a pass takes the tokens that it judges from, in place, for the sequences that judge some.

    The two may differ in γ, support and words: what the pass has no room for is left out. Launches only.
    """
    if backend == "torch":
        _copy_by_torch(rows, judged, drafts)
        if judged.alternatives is not None:
            _copy_alternatives_by_torch(rows, judged, drafts)
        return
    sequences, gamma = judged.tokens.shape
    support, entries = _widths(judged.ids, drafts.ids)
    words, both = _widths(judged.bitmaps, drafts.bitmaps)
    ids, probs = (judged.ids, judged.probs) if entries else (None, None)
    judged = judged._replace(ids=ids, probs=probs, bitmaps=judged.bitmaps if both else None)
    bitmap_rows = drafts.bitmaps.shape[1]
    most = max(bitmap_rows * both, gamma * entries)
    _copy_drafts_kernel[(sequences, max(1, -(-most // _CHUNK)))](
        rows=rows,
        judged=judged,
        drafts=drafts,
        gamma=gamma,
        draft_gamma=drafts.tokens.shape[1],
        support=support,
        draft_support=drafts.ids.shape[2],
        entries=entries,
        bitmap_rows=bitmap_rows,
        words=words,
        draft_words=drafts.bitmaps.shape[2],
        both=both,
        most_beside=0 if judged.alternatives is None else judged.alternatives.shape[1],
        TOKENS=power_of_two(gamma),
        CHUNK=_CHUNK,
    )


def _widths(of_pass: Tensor | None, of_drafts: Tensor) -> tuple[int, int]:
    """Return the last dimension in the pass, 0 if it has none, and how much of it is copied."""
    width = 0 if of_pass is None else of_pass.shape[2]
    return width, min(width, of_drafts.shape[2])


def _copy_by_torch(rows: JudgedRows, judged: Judged, drafts: Drafts) -> None:
    row, taken = rows.drafts.long().clamp(min=0), rows.drafts >= 0
    if judged.bitmaps is not None:
        words = min(judged.bitmaps.shape[2], drafts.bitmaps.shape[2])
        here = judged.bitmaps[..., :words]
        here.copy_(drafts.bitmaps[row, :, :words].where(taken[:, None, None], here))
    known, gamma = judged.tokens, drafts.tokens.shape[1]
    of_round = torch.arange(known.shape[1], device=known.device) - rows.held[:, None]  # of each judged token
    drawn = taken[:, None] & (of_round >= 0) & (of_round < gamma)
    of_round = of_round.clamp(0, gamma - 1)
    known.copy_(drafts.tokens[row[:, None], of_round].where(drawn, known))
    for of_pass, of_drafts in ((judged.ids, drafts.ids), (judged.probs, drafts.probs)):
        if of_pass is not None:
            here = of_pass[..., : min(of_pass.shape[2], of_drafts.shape[2])]
            here.copy_(of_drafts[row[:, None], of_round, : here.shape[2]].where(drawn[..., None], here))
    starts, at = rows.starts.long(), torch.arange(len(judged.token_ids), device=known.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), at, right=True).clamp(max=len(taken) - 1)
    number = at - starts[sequence] - 1  # the index of this row's token among the judged ones
    runs = taken[sequence] & (number >= 0) & (number < rows.counts[sequence]) & (at < starts[-1])
    of_row = known[sequence, number.clamp(0, known.shape[1] - 1)].to(torch.int64)
    judged.token_ids.copy_(of_row.where(runs, judged.token_ids))


def _copy_alternatives_by_torch(rows: JudgedRows, judged: Judged, drafts: Drafts) -> None:
    alternatives, counts = judged.alternatives, judged.alternative_counts
    assert alternatives is not None and counts is not None
    row, most = rows.drafts.long().clamp(min=0), min(alternatives.shape[1], drafts.tokens.shape[1])
    drawn, (first, second) = drafts.tokens[row, :most], drafts.likeliest[row, :most].unbind(2)
    column = torch.arange(most, device=drawn.device)
    there = (rows.drafts >= 0)[:, None] & (column < counts[:, None])
    alternatives[:, :most] = first.where(first != drawn, second).where(there, alternatives[:, :most])
    at = (rows.starts[:-1] + 1 + rows.counts).long()[:, None] + column
    judged.token_ids[at[there]] = alternatives[:, :most][there].to(torch.int64)


@jit
def _copy_drafts_kernel(
    rows,
    judged,
    drafts,
    gamma,
    draft_gamma,
    support,
    draft_support,
    entries,
    bitmap_rows,
    words,
    draft_words,
    both,
    most_beside,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A chunk of one sequence's bitmaps and supports; the first one copies the tokens, too."""
    sequence, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(rows.drafts + sequence).to(tl.int64)
    if place >= 0:
        held = tl.load(rows.held + sequence)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        if chunk == 0:
            count, first = tl.load(rows.counts + sequence), tl.load(rows.starts + sequence)
            after = tl.load(rows.starts + sequence + 1)
            token = tl.arange(0, TOKENS)
            inside, of_round = token < gamma, token - held
            drawn = inside & (of_round >= 0) & (of_round < draft_gamma)
            known = tl.load(judged.tokens + sequence * gamma + token, mask=inside, other=0)
            given = tl.load(drafts.tokens + place * draft_gamma + of_round, mask=drawn, other=0)
            known = tl.where(drawn, given, known)
            tl.store(judged.tokens + sequence * gamma + token, known, mask=drawn)
            row = first + 1 + token
            tl.store(judged.token_ids + row, known.to(tl.int64), mask=inside & (token < count) & (row < after))
            if judged.alternatives is not None:
                there = drawn & (token < most_beside) & (token < tl.load(judged.alternative_counts + sequence))
                likeliest = drafts.likeliest + (place * draft_gamma + token) * 2
                other = tl.load(likeliest, mask=there, other=0)
                other = tl.where(other != known, other, tl.load(likeliest + 1, mask=there, other=0))
                tl.store(judged.alternatives + sequence * most_beside + token, other, mask=there)
                tl.store(judged.token_ids + row + count, other.to(tl.int64), mask=there)
        if judged.ids is not None:
            of_pass, entry = at // entries, at % entries
            from_ = of_pass - held
            copied = (of_pass < gamma) & (from_ >= 0) & (from_ < draft_gamma)
            source = (place * draft_gamma + from_) * draft_support + entry
            target = (sequence * gamma + of_pass) * support + entry
            tl.store(judged.ids + target, tl.load(drafts.ids + source, mask=copied, other=0), mask=copied)
            tl.store(judged.probs + target, tl.load(drafts.probs + source, mask=copied, other=0.0), mask=copied)
        if judged.bitmaps is not None:
            line, word = at // both, at % both
            source = (place * bitmap_rows + line) * draft_words + word
            target = (sequence * bitmap_rows + line) * words + word
            bits = tl.load(drafts.bitmaps + source, mask=line < bitmap_rows, other=0)
            tl.store(judged.bitmaps + target, bits, mask=line < bitmap_rows)
