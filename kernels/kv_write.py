"""Writing new keys and values into KV pages, in torch; on a GPU `kernels.rotary` writes them as it rotates."""

import torch
from torch import Tensor


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
