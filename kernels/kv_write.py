"""Writing keys and values into KV pages: new ones, and such that lie elsewhere in the pages.

New ones are written by torch here; on a GPU `kernels.rotary` writes them as it rotates.
"""

import torch
from torch import Tensor

from kernels.backends import check_backend, jit, tl


def write_kv(k_pages: Tensor, v_pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store `keys` and `values` at `slots`, in place.

    k_pages, v_pages: [pages, kv_heads, page_size, head_dim]
    slots: [tokens] int64, page * page_size + offset, no two alike
    keys, values: [tokens, kv_heads, head_dim], the pages' dtype
    """
    page_size = k_pages.shape[2]
    page = torch.div(slots, page_size, rounding_mode="floor")
    offset = slots - page * page_size
    k_pages[page, :, offset] = keys
    v_pages[page, :, offset] = values


def move_kv(k_pages: Tensor, v_pages: Tensor, source: Tensor, target: Tensor, backend: str = "torch") -> None:
    """Copy the keys and values of single tokens to other places of the same pages.

    k_pages, v_pages: [pages, kv_heads, page_size, head_dim], contiguous; Triton takes a head_dim that is a power of two
    source, target: [tokens] int64, page * page_size + offset. A token is left where its source and target are equal or
    its target is negative; no target is the source of another token.
    """
    check_backend("move_kv", backend)
    if backend == "torch":
        moved = (target >= 0) & (target != source)
        page, offset = source[moved] // k_pages.shape[2], source[moved] % k_pages.shape[2]
        write_kv(k_pages, v_pages, target[moved], k_pages[page, :, offset], v_pages[page, :, offset])
        return
    heads, page_size, dim = k_pages.shape[1:]
    _move_kv_kernel[(len(source), heads)](k_pages, v_pages, source, target, HEADS=heads, PAGE=page_size, DIM=dim)


@jit
def _move_kv_kernel(k_ptr, v_ptr, source_ptr, target_ptr, HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr):
    """One token's key and value of one head."""
    token, head = tl.program_id(0), tl.program_id(1)
    source, target = tl.load(source_ptr + token), tl.load(target_ptr + token)
    if (target >= 0) & (target != source):
        dims = tl.arange(0, DIM)
        from_ = ((source // PAGE * HEADS + head) * PAGE + source % PAGE) * DIM + dims
        to = ((target // PAGE * HEADS + head) * PAGE + target % PAGE) * DIM + dims
        tl.store(k_ptr + to, tl.load(k_ptr + from_))
        tl.store(v_ptr + to, tl.load(v_ptr + from_))
