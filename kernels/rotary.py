"""Rotary position embedding (Su et al. 2021) of new queries and keys, and the write of new KV into its pages."""

import torch
from torch import Tensor

from kernels.backends import check_backend, follow, jit, overlapping_launch, tl
from kernels.kv_write import write_kv


def rotate_and_write_kv(
    qkv: Tensor,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    heads: int,
    backend: str = "torch",
) -> Tensor:
    """Rotate queries and keys, write keys and values to their slots in place, and return the queries.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], queries, keys, values
    cosines, sines: [positions, head_dim / 2] float32; dimension i turns with i + head_dim / 2
    positions: [tokens] int32 or int64; slots: [tokens] int64, page * page_size + offset, negative: not written
    k_pages, v_pages: [pages, kv_heads, page_size, head_dim]
    Returns [tokens, heads, head_dim].
    """
    check_backend("rotate_and_write_kv", backend, ("torch", "triton"))
    kv_heads, page_size, dim = k_pages.shape[1:]
    tokens = len(qkv)
    if backend == "torch":
        split = qkv.view(tokens, -1, dim)
        # The table is rounded to the dtype first, as transformers does it.
        cos, sin = (table[positions.long()][:, None].to(qkv.dtype) for table in (cosines, sines))
        rotated = _rotate(split[:, : heads + kv_heads], cos, sin)
        kept = slots >= 0
        keys, values = rotated[kept, heads:], split[kept, heads + kv_heads :]
        write_kv(k_pages, v_pages, slots[kept], keys, values)
        return rotated[:, :heads].contiguous()
    queries = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    _rotate_and_write_kv_kernel[(tokens, heads + 2 * kv_heads)](
        *(qkv, cosines, sines, positions, slots, k_pages, v_pages, queries),
        HEADS=heads,
        KV_HEADS=kv_heads,
        PAGE=page_size,
        HALF=dim // 2,
        num_warps=1,
        **overlapping_launch(qkv.device),
    )
    return queries


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos + -second * sin, second * cos + first * sin], -1)


@jit
def _rotate_and_write_kv_kernel(
    qkv_ptr,
    cosines_ptr,
    sines_ptr,
    positions_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    queries_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, HALF)
    source = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head).to(tl.int64) * (2 * HALF)
    follow(PDL)
    first, second = tl.load(source + at), tl.load(source + HALF + at)
    slot = tl.load(slots_ptr + token)
    if head < HEADS + KV_HEADS:
        position = tl.load(positions_ptr + token)
        cos = tl.load(cosines_ptr + position * HALF + at).to(first.dtype)
        sin = tl.load(sines_ptr + position * HALF + at).to(first.dtype)
        # Each product is rounded, as in torch.
        turned = (first * cos).to(first.dtype) - (second * sin).to(first.dtype)
        second = (second * cos).to(first.dtype) + (first * sin).to(first.dtype)
        first = turned
    if head < HEADS:
        target = queries_ptr + (token * HEADS + head).to(tl.int64) * (2 * HALF)
        tl.store(target + at, first)
        tl.store(target + HALF + at, second)
    elif slot >= 0:
        kv_head = (head - HEADS) % KV_HEADS
        offset = ((slot // PAGE * KV_HEADS + kv_head) * PAGE + slot % PAGE) * (2 * HALF)
        if head < HEADS + KV_HEADS:
            tl.store(k_ptr + offset + at, first)
            tl.store(k_ptr + offset + HALF + at, second)
        else:
            tl.store(v_ptr + offset + at, first)
            tl.store(v_ptr + offset + HALF + at, second)
