"""KV whose pages all lie on the model's device, each at the index of its number."""

import torch

from engine.kv.cache import KVCache
from engine.kv.pages import PAGE_SIZE
from engine.kv.pool import PagePool
from engine.kv.tensors import kv_zeros


class PagedKV(KVCache):
    """The KV of one model in `num_pages` pages of one device. Every sequence is resident, and nothing is fetched."""

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        num_pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_pages, kv_heads, PAGE_SIZE, head_dim)
        keys, values = ([kv_zeros(shape, dtype, device) for _ in range(num_layers)] for _ in range(2))
        super().__init__(keys, values, kv_heads, PagePool(num_pages), torch.device(device))
