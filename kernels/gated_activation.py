"""silu(gate) * up, the activation of gated MLPs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specahead.kernels.backends import Backend, follow, jit, overlapping_launch, tl


def silu_and_multiply(gate_up: Tensor, backend: Backend = "torch") -> Tensor:
    """Return silu(gate) * up, [rows, size]. gate_up: [rows, 2 * size], the gates first in each row."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if backend == "torch":
        return F.silu(gate_up[:, :size]) * gate_up[:, size:]
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    chunk = 1024
    flags = overlapping_launch(gate_up.device)
    _silu_and_multiply_kernel[(rows, -(-size // chunk))](gate_up, out, size, CHUNK=chunk, **flags)
    return out


@jit
def _silu_and_multiply_kernel(gate_up_ptr, out_ptr, size: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    gate = tl.load(gate_up_ptr + row * 2 * size + at, mask=at < size, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * size + size + at, mask=at < size, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded before the product, as torch does it.
    tl.store(out_ptr + row * size + at, (wide * tl.sigmoid(wide)).to(gate.dtype) * up, mask=at < size)
