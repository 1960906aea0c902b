"""Which rows of logits can be judged: a model that overflows leaves infinities or NaN."""

import torch
from torch import Tensor

from specahead.kernels.backends import check_backend, follow, jit, overlapping_launch, power_of_two, tl

_CHUNK = 4096  # entries of the vocabulary that a program takes


def are_finite(logits: Tensor, counts: Tensor, backend: str = "torch") -> Tensor:
    """Return which rows have a finite largest logit at every position up to their drafted tokens, int32 [rows].

    A row with a NaN or +inf, or with nothing but -inf, at one of these positions is not finite.
    logits: [rows, γ + 1, vocab], for Triton contiguous. counts: [rows], the drafted tokens
    """
    check_backend("are_finite", backend)
    rows, places, vocab = logits.shape
    if backend == "torch":
        beyond = torch.arange(places, device=logits.device) > counts[:, None]
        return (logits.amax(2).isfinite() | beyond).all(1).int()
    finite = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return finite
    splits = -(-vocab // _CHUNK)
    largest = torch.empty(rows * places, splits, dtype=torch.float32, device=logits.device)
    after = overlapping_launch(logits.device)
    _largest_kernel[(splits, rows * places)](logits, counts, largest, vocab, places, CHUNK=_CHUNK, **after)
    sizes = {"PLACES": power_of_two(places), "SPLITS": power_of_two(splits)}
    _are_finite_kernel[(rows,)](largest, counts, finite, splits, places, **sizes, **after)
    return finite


@jit
def _largest_kernel(logits_ptr, counts_ptr, largest_ptr, vocab, places, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Store the largest logit of one chunk of one position, infinity if one is NaN."""
    follow(PDL)
    split, at = tl.program_id(0), tl.program_id(1)
    if at % places > tl.load(counts_ptr + at // places):
        return
    index = split * CHUNK + tl.arange(0, CHUNK)
    here = logits_ptr + at.to(tl.int64) * vocab + index
    logits = tl.load(here, mask=index < vocab, other=-float("inf")).to(tl.float32)
    # A NaN is not equal to itself, and a maximum would pass over it.
    largest = tl.max(tl.where(logits == logits, logits, float("inf")), 0)
    tl.store(largest_ptr + at * tl.num_programs(0) + split, largest)


@jit
def _are_finite_kernel(
    largest_ptr, counts_ptr, finite_ptr, splits, places, PLACES: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr
):
    """Store whether one row's largest logits are finite."""
    follow(PDL)
    row = tl.program_id(0)
    place, split = tl.arange(0, PLACES), tl.arange(0, SPLITS)
    counts = (place < places) & (place <= tl.load(counts_ptr + row))
    here = largest_ptr + (row * places + place[:, None]) * splits + split[None, :]
    inside = counts[:, None] & (split < splits)[None, :]
    largest = tl.max(tl.load(here, mask=inside, other=-float("inf")), 1)
    finite = (largest > -float("inf")) & (largest < float("inf"))
    tl.store(finite_ptr + row, tl.min((finite | ~counts).to(tl.int32), 0))
