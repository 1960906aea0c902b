"""Draws that two models share: tokens race, and of two similar distributions mostly the same one wins.

Token i of a position arrives at E_i / p_i; the first is drawn, which has the distribution p where the E_i are
independent and exponential (the Gumbel-max trick in other words). They are made of the position's uniform number and of
i alone. So whoever knows that number draws by the same E: two distributions p and q then agree at least as often as
Σ min(p, q) / Σ max(p, q) (Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative
Decoding", arXiv 2408.07978), where draws by the inverse of the cumulative distribution agree as the tokens' order
has it.
"""

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, follow, jit, overlapping_launch, power_of_two, tl

_TINY = 2.0**-10  # below it the series of -log(1 - v) is exact in float32
_LAST = 1 - 2.0**-24  # so that every token arrives


def arrivals(uniforms: Tensor, ids: Tensor) -> Tensor:
    """Return E of each token, exponential with mean 1: [rows, n] float32.

    uniforms: [rows] float64 in [0, 1), multiples of 2^-53; ids: [rows or 1, n] int64
    """
    bits = (uniforms.double() * 2.0**53).long()[:, None]
    hashed = _mix(_mix((ids + bits) & 0xFFFFFFFF) ^ (bits >> 32))
    # Small ones decide, and are exact to their last bit: hence not the logarithm of the number itself.
    v = ((hashed.float() + 0.5) * 2.0**-32).clamp(max=_LAST)
    return torch.where(v < _TINY, v + v * v * (0.5 + v / 3), -torch.log(1 - v))


def race(probs: Tensor, ids: Tensor, uniforms: Tensor, backend: Backend = "torch") -> Tensor:
    """Return the column of the first token to arrive, int64 [rows]; never one of probability 0 if another has more.

    probs: [rows, n] float32, not negative, of any sum; ids: [rows, n] int64, the tokens, for torch also [1, n]; both
    contiguous, for Triton. uniforms: as for `arrivals`.
    """
    if backend == "torch":
        return (probs / arrivals(uniforms, ids)).argmax(-1)
    rows, count = probs.shape
    first = torch.empty(rows, dtype=torch.int64, device=probs.device)
    if rows:
        _race_listed_kernel[(rows,)](
            probs, ids, uniforms.contiguous(), first, count, N=power_of_two(count), **overlapping_launch(probs.device)
        )
    return first


def _mix(x: Tensor) -> Tensor:
    """Permute 32 bits in int64 (lowbias32 of Ellis, "Prospecting for Hash Functions")."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


@jit
def _mix_bits(x):
    """Do `_mix` in uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit
def arrivals_of_row(uniform, index):
    """Return `arrivals` of one row. uniform: float64; index: int32."""
    bits = (uniform * 9007199254740992.0).to(tl.int64)
    low, high = bits.to(tl.uint32), (bits >> 32).to(tl.uint32)
    hashed = _mix_bits(_mix_bits(index.to(tl.uint32) + low) ^ high)
    v = tl.minimum((hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355)
    return tl.where(v < 0.0009765625, v + v * v * (0.5 + v / 3), -tl.log(1 - v))


@jit
def _race_listed_kernel(probs_ptr, ids_ptr, uniforms_ptr, first_ptr, count, N: tl.constexpr, PDL: tl.constexpr):
    """Find the column of the first to arrive of a row."""
    follow(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, N)
    there = column < count
    at = row.to(tl.int64) * count + column
    ids = tl.load(ids_ptr + at, mask=there, other=0).to(tl.int32)
    sooner = tl.load(probs_ptr + at, mask=there, other=-1.0) / arrivals_of_row(tl.load(uniforms_ptr + row), ids)
    tl.store(first_ptr + row, tl.min(tl.where(sooner == tl.max(sooner, 0), column, count - 1), 0).to(tl.int64))
