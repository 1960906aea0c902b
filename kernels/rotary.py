"""What happens to new queries, keys and values before attention: norms, rotary position embedding, the write to pages.

The rotary embedding is that of Su et al. 2021. Some models norm each head's query and key before it (Qwen3), or turn
only the first dimensions of a head (Phi-4-mini).
"""

import torch
from torch import Tensor

from specahead.kernels.backends import check_backend, jit, overlapping_launch, power_of_two, tl
from specahead.kernels.kv_write import write_kv
from specahead.kernels.residual_linear import Unscaled
from specahead.kernels.rms_norm import add_rms_norm

MANY_TOKENS = 256  # from here on a program takes several heads: what a token's heads share is loaded once
HEADS_OF_PROGRAM = 8


def rotate_and_write_kv(
    qkv: Tensor | Unscaled,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    heads: int,
    backend: str = "torch",
    head_norms: Tensor | None = None,
    epsilon: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the rotated queries; write the rotated keys, and the values, to their slots in place.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], contiguous: queries, keys, values. They may come in parts, [parts,
    tokens, …] float32: they are the sum, rounded to the dtype of the pages. Of what is not scaled yet they are what it
    is once it is scaled and `bias` is added.
    cosines, sines: [positions, turned / 2] float32, contiguous; of the first `turned` dimensions of a head, dimension i
    turns with i + turned / 2. The others stay as they are; tables of width 0 turn none.
    positions: [tokens] int32 or int64; slots: [tokens] int64, page * page_size + offset, negative: not written
    k_pages, v_pages: [pages, kv_heads, page_size, head_dim]
    head_norms: [2, head_dim], the weights of an RMSNorm with `epsilon` of each head's query and of each head's key,
    before they are rotated; None: no norm
    Returns [tokens, heads, head_dim]. Triton takes head_dim that is a power of two.
    """
    check_backend("rotate_and_write_kv", backend)
    kv_heads, page_size, dim = k_pages.shape[1:]
    if backend == "torch":
        total, where = _add_up(qkv, bias, k_pages.dtype), (positions, slots, k_pages, v_pages)
        return _rotate_by_torch(total, cosines, sines, *where, heads, head_norms, epsilon)
    squares, size, norm_epsilon, numbers = None, 1, 0.0, qkv
    if isinstance(qkv, Unscaled):
        squares, size, norm_epsilon, numbers = qkv.squares, qkv.size, qkv.epsilon, qkv.parts
    assert isinstance(numbers, Tensor)
    tokens = numbers.shape[-2]
    queries = torch.empty(tokens, heads, dim, dtype=k_pages.dtype, device=numbers.device)
    of_program = 1 if tokens < MANY_TOKENS else HEADS_OF_PROGRAM
    _rotate_and_write_kv_kernel[(tokens, -(-(heads + 2 * kv_heads) // of_program))](
        *(numbers, squares, bias, cosines, sines, positions, slots, head_norms),
        *(k_pages, v_pages, queries, epsilon, size, norm_epsilon, tokens),
        PARTS=1 if numbers.dim() == 2 else len(numbers),
        SQUARES=1 if numbers.dim() == 2 else power_of_two(len(numbers)),
        HEADS=heads,
        KV_HEADS=kv_heads,
        PAGE=page_size,
        DIM=dim,
        HALF=cosines.shape[1],
        OF_PROGRAM=of_program,
        num_warps=1,
        **overlapping_launch(numbers.device),
    )
    return queries


def _add_up(qkv: Tensor | Unscaled, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what comes in parts, or is not scaled yet, as [tokens, …]."""
    if isinstance(qkv, Unscaled):
        return (qkv.scaled() if bias is None else qkv.scaled() + bias).to(dtype)
    return qkv.sum(0).to(dtype) if qkv.dim() == 3 else qkv


def _rotate_by_torch(
    qkv: Tensor,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    heads: int,
    head_norms: Tensor | None,
    epsilon: float,
) -> Tensor:
    kv_heads, _, dim = k_pages.shape[1:]
    queries, keys, values = qkv.view(len(qkv), -1, dim).split([heads, kv_heads, kv_heads], 1)
    if head_norms is not None:
        queries, keys = (
            add_rms_norm(x.reshape(-1, dim), None, weight, epsilon)[0].view(x.shape)
            for x, weight in zip((queries, keys), head_norms, strict=True)
        )
    # The table is rounded to the dtype first, as transformers does it.
    cos, sin = (table[positions.long()][:, None].to(qkv.dtype) for table in (cosines, sines))
    kept = slots >= 0
    write_kv(k_pages, v_pages, slots[kept], _rotate(keys, cos, sin)[kept], values[kept])
    return _rotate(queries, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos + -second * sin, second * cos + first * sin, rest], -1)


@jit
def _multiply(x, y):
    """x * y, rounded as torch rounds it, whatever is added to it next."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype)


@jit
def _load_head(qkv_ptr, bias_ptr, by, token, tokens, at, WIDTH: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr):
    """The numbers `at` of a token, from the parts that they come in, times `by`."""
    total = tl.load(qkv_ptr + token.to(tl.int64) * WIDTH + at)
    for part in tl.static_range(1, PARTS):
        total += tl.load(qkv_ptr + (part * tokens + token).to(tl.int64) * WIDTH + at)
    if by is not None:
        total = total * by
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at).to(tl.float32)
    return total.to(dtype)


@jit
def _rotate_and_write_kv_kernel(
    qkv_ptr,
    squares_ptr,
    bias_ptr,
    cosines_ptr,
    sines_ptr,
    positions_ptr,
    slots_ptr,
    norms_ptr,
    k_ptr,
    v_ptr,
    queries_ptr,
    epsilon: tl.constexpr,
    size: tl.constexpr,
    norm_epsilon: tl.constexpr,
    tokens,
    PARTS: tl.constexpr,
    SQUARES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
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
        cos = tl.load(cosines_ptr + row, mask=turned, other=1.0).to(k_ptr.dtype.element_ty)
        sin = tl.load(sines_ptr + row, mask=turned, other=0.0).to(k_ptr.dtype.element_ty)
    if PDL:
        tl.extra.cuda.gdc_wait()
    by = None
    if squares_ptr is not None:
        part = tl.arange(0, SQUARES)
        squares = tl.load(squares_ptr + part * tokens + token, mask=part < PARTS, other=0.0)
        by = tl.rsqrt(tl.sum(squares, 0) / size + norm_epsilon)
    for index in tl.static_range(OF_PROGRAM):
        head = tl.program_id(1) * OF_PROGRAM + index
        if head < HEADS + 2 * KV_HEADS:
            dtype: tl.constexpr = k_ptr.dtype.element_ty
            own = _load_head(qkv_ptr, bias_ptr, by, token, tokens, head * DIM + at, WIDTH, PARTS, dtype)
            if head < HEADS + KV_HEADS:
                other = _load_head(qkv_ptr, bias_ptr, by, token, tokens, head * DIM + partner, WIDTH, PARTS, dtype)
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
                offset = ((slot // PAGE * KV_HEADS + kv_head) * PAGE + slot % PAGE) * DIM
                if head < HEADS + KV_HEADS:
                    tl.store(k_ptr + offset + at, own)
                else:
                    tl.store(v_ptr + offset + at, own)
