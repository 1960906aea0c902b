"""What a draft's rounds have left on the device, put where a pass that judges it takes its drafted tokens from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.kernels.backends import check_backend, jit, power_of_two, tl

_CHUNK = 1024  # numbers that one program copies


@dataclass(frozen=True)
class PassRows:
    """Which rows of a pass are of which sequence, and who goes on behind rounds.

    behind: [sequences] int32, the place of each among the rounds; negative: it is behind none. held: [sequences] int32,
    drafted tokens that come before those of the rounds. counts: the same, drafted tokens in all. starts: [sequences +
    1] int32, the first row of each, which runs the token before the drafted ones; the others run these.
    """

    behind: Tensor
    held: Tensor
    counts: Tensor
    starts: Tensor


@dataclass(frozen=True)
class Drafted:
    """Drafted tokens of sequences, or what rounds have left of each place; contiguous.

    tokens: [sequences, γ] int32. ids, probs: [sequences, γ, support] int32 and float32, what each was drawn from;
    bitmaps: [sequences, rows, words] int64, blocks that were announced. Of a pass these may be None.
    """

    tokens: Tensor
    ids: Tensor | None
    probs: Tensor | None
    bitmaps: Tensor | None


@dataclass(frozen=True)
class Beside:
    """Alternatives, which run behind all drafted tokens of their sequence; contiguous.

    tokens: [sequences, alternatives] int32, of the pass. counts: [sequences] int32, how many there are. likeliest:
    [places, γ, 2] int32, of the rounds: the likeliest tokens, of which the first that was not drafted is taken.
    """

    tokens: Tensor
    counts: Tensor
    likeliest: Tensor


def take_drafted(
    rows: PassRows,
    token_ids: Tensor,
    drafted: Drafted,
    left: Drafted,
    beside: Beside | None = None,
    backend: str = "torch",
) -> None:
    """Put what rounds have left in the place of what the host gave, in place, of sequences that go on behind them.

    token_ids: [rows] int64, what the pass runs. drafted: of the pass. left: of the rounds, which may have another γ,
    support or number of words: what there is no room for is left out. beside: None: no alternatives run. Sequences that
    have some hold no tokens.
    """
    check_backend("take_drafted", backend)
    if backend == "torch":
        _take_by_torch(rows, token_ids, drafted, left)
        if beside is not None:
            _take_beside_by_torch(rows, token_ids, left, beside)
        return
    sequences, gamma = drafted.tokens.shape
    support, left_support, entries = _widths(drafted.ids, left.ids)
    words, left_words, both = _widths(drafted.bitmaps, left.bitmaps)
    bitmap_rows = 0 if left.bitmaps is None else left.bitmaps.shape[1]
    most = max(bitmap_rows * both, gamma * entries)
    _take_drafted_kernel[(sequences, max(1, -(-most // _CHUNK)))](
        *(rows.behind, rows.held, rows.counts, rows.starts, token_ids),
        *(drafted.tokens, left.tokens, gamma, left.tokens.shape[1]),
        *((drafted.ids, left.ids, drafted.probs, left.probs) if entries else [None] * 4),
        *(support, left_support, entries),
        *((drafted.bitmaps, left.bitmaps) if both else [None] * 2),
        *(bitmap_rows, words, left_words, both),
        *((None, None, None, 0) if beside is None else (*vars(beside).values(), beside.tokens.shape[1])),
        TOKENS=power_of_two(gamma),
        CHUNK=_CHUNK,
    )


def _widths(of_pass: Tensor | None, left: Tensor | None) -> tuple[int, int, int]:
    """Return the last dimension of each, and how much of it is copied; 0 of what is not there."""
    widths = [0 if each is None else each.shape[2] for each in (of_pass, left)]
    return widths[0], widths[1], min(widths)


def _take_by_torch(rows: PassRows, token_ids: Tensor, drafted: Drafted, left: Drafted) -> None:
    place, taken = rows.behind.long().clamp(min=0), rows.behind >= 0
    if drafted.bitmaps is not None and left.bitmaps is not None:
        words = min(drafted.bitmaps.shape[2], left.bitmaps.shape[2])
        here = drafted.bitmaps[..., :words]
        here.copy_(left.bitmaps[place, :, :words].where(taken[:, None, None], here))
    known, gamma = drafted.tokens, left.tokens.shape[1]
    of_round = torch.arange(known.shape[1], device=known.device) - rows.held[:, None]  # of each token of the pass
    drawn = taken[:, None] & (of_round >= 0) & (of_round < gamma)
    of_round = of_round.clamp(0, gamma - 1)
    known.copy_(left.tokens[place[:, None], of_round].where(drawn, known))
    for of_pass, of_left in ((drafted.ids, left.ids), (drafted.probs, left.probs)):
        if of_pass is not None and of_left is not None:
            here = of_pass[..., : min(of_pass.shape[2], of_left.shape[2])]
            here.copy_(of_left[place[:, None], of_round, : here.shape[2]].where(drawn[..., None], here))
    starts, row = rows.starts.long(), torch.arange(len(token_ids), device=token_ids.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True).clamp(max=len(taken) - 1)
    number = row - starts[sequence] - 1  # of the row's token among the drafted ones
    runs = taken[sequence] & (number >= 0) & (number < rows.counts[sequence]) & (row < starts[-1])
    of_row = known[sequence, number.clamp(0, known.shape[1] - 1)].to(token_ids.dtype)
    token_ids.copy_(of_row.where(runs, token_ids))


def _take_beside_by_torch(rows: PassRows, token_ids: Tensor, left: Drafted, beside: Beside) -> None:
    place, most = rows.behind.long().clamp(min=0), min(beside.tokens.shape[1], left.tokens.shape[1])
    drawn, (first, second) = left.tokens[place, :most], beside.likeliest[place, :most].unbind(2)
    column = torch.arange(most, device=drawn.device)
    there = (rows.behind >= 0)[:, None] & (column < beside.counts[:, None])
    beside.tokens[:, :most] = first.where(first != drawn, second).where(there, beside.tokens[:, :most])
    row = (rows.starts[:-1] + 1 + rows.counts).long()[:, None] + column
    token_ids[row[there]] = beside.tokens[:, :most][there].to(token_ids.dtype)


@jit
def _take_drafted_kernel(
    behind_ptr,
    held_ptr,
    counts_ptr,
    starts_ptr,
    token_ids_ptr,
    tokens_ptr,
    left_tokens_ptr,
    gamma,
    left_gamma,
    ids_ptr,
    left_ids_ptr,
    probs_ptr,
    left_probs_ptr,
    support,
    left_support,
    entries,
    bitmaps_ptr,
    left_bitmaps_ptr,
    bitmap_rows,
    words,
    left_words,
    both,
    beside_ptr,
    beside_counts_ptr,
    likeliest_ptr,
    most_beside,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A chunk of one sequence's bitmaps and of its supports; the first one takes the tokens, too."""
    sequence, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(behind_ptr + sequence).to(tl.int64)
    if place >= 0:
        held = tl.load(held_ptr + sequence)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        if chunk == 0:
            count, first = tl.load(counts_ptr + sequence), tl.load(starts_ptr + sequence)
            after = tl.load(starts_ptr + sequence + 1)
            token = tl.arange(0, TOKENS)
            inside, of_round = token < gamma, token - held
            drawn = inside & (of_round >= 0) & (of_round < left_gamma)
            known = tl.load(tokens_ptr + sequence * gamma + token, mask=inside, other=0)
            given = tl.load(left_tokens_ptr + place * left_gamma + of_round, mask=drawn, other=0)
            known = tl.where(drawn, given, known)
            tl.store(tokens_ptr + sequence * gamma + token, known, mask=drawn)
            row = first + 1 + token
            tl.store(token_ids_ptr + row, known.to(tl.int64), mask=inside & (token < count) & (row < after))
            if beside_ptr is not None:
                there = drawn & (token < most_beside) & (token < tl.load(beside_counts_ptr + sequence))
                likeliest = likeliest_ptr + (place * left_gamma + token) * 2
                other = tl.load(likeliest, mask=there, other=0)
                other = tl.where(other != known, other, tl.load(likeliest + 1, mask=there, other=0))
                tl.store(beside_ptr + sequence * most_beside + token, other, mask=there)
                tl.store(token_ids_ptr + row + count, other.to(tl.int64), mask=there)
        if ids_ptr is not None:
            of_pass, entry = at // entries, at % entries
            from_ = of_pass - held
            copied = (of_pass < gamma) & (from_ >= 0) & (from_ < left_gamma)
            source = (place * left_gamma + from_) * left_support + entry
            target = (sequence * gamma + of_pass) * support + entry
            tl.store(ids_ptr + target, tl.load(left_ids_ptr + source, mask=copied, other=0), mask=copied)
            tl.store(probs_ptr + target, tl.load(left_probs_ptr + source, mask=copied, other=0.0), mask=copied)
        if bitmaps_ptr is not None:
            line, word = at // both, at % both
            source = (place * bitmap_rows + line) * left_words + word
            target = (sequence * bitmap_rows + line) * words + word
            bits = tl.load(left_bitmaps_ptr + source, mask=line < bitmap_rows, other=0)
            tl.store(bitmaps_ptr + target, bits, mask=line < bitmap_rows)
