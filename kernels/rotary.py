"""Norms and rotary embedding of new queries and keys, and the write of new keys and values to their pages.

The rotary embedding is that of Su et al. 2021. Some models norm each head's query and key before it (Qwen3), or rotate
only the first dimensions of a head (Phi-4-mini).
"""

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, jit, overlapping_launch, tl
from specahead.kernels.kv_scales import KVScales, in_pages, values_by_token
from specahead.kernels.kv_write import write_kv
from specahead.kernels.rms_norm import add_rms_norm

MANY_TOKENS = 256  # from here on a program takes several heads: what a token's heads share is loaded once
HEADS_OF_PROGRAM = 8


def rotate_and_write_kv(
    qkv: Tensor,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    heads: int,
    backend: Backend = "torch",
    head_norms: Tensor | None = None,
    epsilon: float = 0.0,
    scales: KVScales | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Write the rotated keys, and the values, to their slots in place; return the rotated queries.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], contiguous: queries, keys, values; or [parts, tokens, …] float32,
        whose sum is rounded to `dtype`.
    cosines, sines: [positions, rotated / 2] float32, contiguous; dimension i of a head turns with i + rotated / 2.
    positions: [tokens] int32 or int64.
    slots: [tokens] int64, page * page_size + offset; a token with a negative slot is not written.
    k_pages, v_pages: as for `write_kv`; Triton takes powers of two as head_dim.
    head_norms: [2, head_dim], RMSNorm weights of each head's query and key before rotation; None: no norm.
    scales: the layer's, for pages in 8 bits.
    dtype: of the queries, and of keys and values before they are written; None: that of the pages.
    Returns [tokens, heads, head_dim].
    """
    kv_heads, page_size, dim = k_pages.shape[1:]
    dtype = dtype or k_pages.dtype
    if backend == "torch":
        qkv = qkv.sum(0).to(dtype) if qkv.dim() == 3 else qkv
        parts = qkv.view(len(qkv), -1, dim).split([heads, kv_heads, kv_heads], 1)
        norms, kept, values = (None, None) if head_norms is None else head_norms, slots >= 0, parts[2]
        queries, keys = (_norm_heads(each, norm, epsilon) for each, norm in zip(parts, norms, strict=False))
        queries, keys = (_rotate(each, cosines, sines, positions) for each in (queries, keys))
        write_kv(k_pages, v_pages, slots[kept], keys[kept], values[kept], scales)
        return queries
    tokens = qkv.shape[-2]
    queries = torch.empty(tokens, heads, dim, dtype=dtype, device=qkv.device)
    of_program = 1 if tokens < MANY_TOKENS else HEADS_OF_PROGRAM
    _rotate_and_write_kv_kernel[(tokens, -(-(heads + 2 * kv_heads) // of_program))](
        *(qkv, cosines, sines, positions, slots, head_norms),
        *((None, None) if scales is None else (scales.scales, scales.centers)),
        *(k_pages, v_pages, queries, epsilon, tokens),
        PARTS=1 if qkv.dim() == 2 else len(qkv),
        HEADS=heads,
        KV_HEADS=kv_heads,
        PAGE=page_size,
        DIM=dim,
        V_STRIDES=values_by_token(v_pages).stride()[2:],
        HALF=cosines.shape[1],
        OF_PROGRAM=of_program,
        num_warps=1,
        **overlapping_launch(qkv.device),
    )
    return queries


def _norm_heads(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return x if weight is None else add_rms_norm(x.reshape(-1, x.shape[-1]), None, weight, epsilon)[0].view(x.shape)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor) -> Tensor:
    # The table is rounded to the dtype first, as transformers does it.
    cos, sin = (table[positions.long()][:, None].to(x.dtype) for table in (cosines, sines))
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos + -second * sin, second * cos + first * sin, rest], -1)


@jit
def _multiply(x, y):
    """Return x * y rounded to their dtype, as torch does; a multiply-add would not round between."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype)


@jit
def _load_head(qkv_ptr, token, tokens, at, WIDTH: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Load the numbers `at` of a token and add their parts up."""
    total = tl.load(qkv_ptr + token.to(tl.int64) * WIDTH + at)
    for part in tl.static_range(1, PARTS):
        total += tl.load(qkv_ptr + (part * tokens + token).to(tl.int64) * WIDTH + at)
    return total.to(dtype)


@jit
def _rotate_and_write_kv_kernel(
    qkv_ptr,
    cosines_ptr,
    sines_ptr,
    positions_ptr,
    slots_ptr,
    norms_ptr,
    kv_scales_ptr,
    centers_ptr,
    k_ptr,
    v_ptr,
    queries_ptr,
    epsilon: tl.constexpr,
    tokens,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    V_STRIDES: tl.constexpr,
    HALF: tl.constexpr,
    OF_PROGRAM: tl.constexpr,
    PDL: tl.constexpr,
):
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    token = tl.program_id(0)
    at = tl.arange(0, DIM)
    partner = tl.where(at < HALF, at + HALF, tl.where(at < 2 * HALF, at - HALF, at))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # attention asks for its first keys and values
    # Positions and slots were written before the first layer: they are read before the wait.
    slot = tl.load(slots_ptr + token)
    if HALF > 0:
        row, turned = tl.load(positions_ptr + token) * HALF + at % HALF, at < 2 * HALF
        cos = tl.load(cosines_ptr + row, mask=turned, other=1.0).to(queries_ptr.dtype.element_ty)
        sin = tl.load(sines_ptr + row, mask=turned, other=0.0).to(queries_ptr.dtype.element_ty)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for index in tl.static_range(OF_PROGRAM):
        head = tl.program_id(1) * OF_PROGRAM + index
        if head < HEADS + 2 * KV_HEADS:
            dtype: tl.constexpr = queries_ptr.dtype.element_ty
            own = _load_head(qkv_ptr, token, tokens, head * DIM + at, WIDTH, PARTS, dtype)
            if head < HEADS + KV_HEADS:
                other = _load_head(qkv_ptr, token, tokens, head * DIM + partner, WIDTH, PARTS, dtype)
                if norms_ptr is not None:
                    wide = own.to(tl.float32)
                    scale = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + epsilon)
                    norm_ptr = norms_ptr + (head >= HEADS).to(tl.int32) * DIM
                    own = _multiply((wide * scale).to(own.dtype), tl.load(norm_ptr + at))
                    other = _multiply((other.to(tl.float32) * scale).to(own.dtype), tl.load(norm_ptr + partner))
                if HALF > 0:
                    across = _multiply(other, sin).to(tl.float32)
                    own = (_multiply(own, cos).to(tl.float32) + tl.where(at < HALF, -across, across)).to(own.dtype)
            if head < HEADS:
                tl.store(queries_ptr + (token * HEADS + head).to(tl.int64) * DIM + at, own)
            elif slot >= 0:
                kv_head = (head - HEADS) % KV_HEADS
                page_at = (slot // PAGE * KV_HEADS + kv_head) * (PAGE * DIM)
                if kv_scales_ptr is None:
                    written = own
                else:  # those of keys and, after them, of values
                    of_kv = head - HEADS
                    scale, center = tl.load(kv_scales_ptr + of_kv), tl.load(centers_ptr + of_kv * DIM + at)
                    written = in_pages(own, scale, center, k_ptr.dtype.element_ty)
                if head < HEADS + KV_HEADS:
                    tl.store(k_ptr + page_at + slot % PAGE * DIM + at, written)
                else:
                    tl.store(v_ptr + page_at + slot % PAGE * V_STRIDES[0] + at * V_STRIDES[1], written)
