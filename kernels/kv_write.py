"""Writing new keys and values into KV pages."""

import torch
from torch import Tensor

from kernels.backends import check_backend


def write_kv(
    k_pages: Tensor, v_pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor, backend: str = "torch"
) -> None:
    """Store `keys` and `values` at `slots`, in place.

    k_pages, v_pages: [pages, kv_heads, page_size, head_dim]
    slots: [tokens] int64, page * page_size + offset, no two alike
    keys, values: [tokens, kv_heads, head_dim], the pages' dtype
    """
    check_backend("write_kv", backend)
    _torch_write_kv(k_pages, v_pages, slots, keys, values)


def _torch_write_kv(k_pages: Tensor, v_pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    page_size = k_pages.shape[2]
    page = torch.div(slots, page_size, rounding_mode="floor")
    offset = slots - page * page_size
    k_pages[page, :, offset] = keys
    v_pages[page, :, offset] = values
