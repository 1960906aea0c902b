"""Writing keys and values into KV pages: new ones, by torch, and ones that lie elsewhere in the pages.

On a GPU `specahead.kernels.rotary` writes new keys and values as it rotates.
"""

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, jit, tl
from specahead.kernels.kv_scales import KVScales, keys_to_pages, values_by_token, values_to_pages


def write_kv(
    k_pages: Tensor, v_pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor, scales: KVScales | None = None
) -> None:
    """Store `keys` and `values` at `slots`, in place.

    k_pages, v_pages: [pages, kv_heads, page_size, head_dim]; values in 8 bits as `kv_scales.values_by_token` has them
    slots: [tokens] int64, page * page_size + offset, no two alike
    keys, values: [tokens, kv_heads, head_dim], of the pages' dtype unless there are scales
    scales: the layer's, for pages in 8 bits; None: numbers are written as they are
    """
    if scales is not None:
        keys, values = keys_to_pages(keys, scales), values_to_pages(values, scales)
    page_size = k_pages.shape[2]
    page = torch.div(slots, page_size, rounding_mode="floor")
    offset = slots - page * page_size
    k_pages[page, :, offset] = keys
    values_by_token(v_pages)[page, :, offset] = values


def page_addresses(k_pages: list[Tensor], v_pages: list[Tensor]) -> Tensor:
    """Return the addresses of each layer's pages of keys and of values, [2, layers] int64 on the CPU.

    Sent to the device, they let one launch serve all layers.
    """
    return torch.tensor([[pages.data_ptr() for pages in part] for part in (k_pages, v_pages)], dtype=torch.int64)


def move_kv(
    k_pages: list[Tensor],
    v_pages: list[Tensor],
    addresses: Tensor,
    source: Tensor,
    target: Tensor,
    backend: Backend = "torch",
) -> None:
    """Copy the keys and values of single tokens to other places of the same pages, in all layers.

    k_pages, v_pages: a layer each, as for `write_kv`, contiguous; Triton takes a head_dim that is a power of two
    addresses: the result of `page_addresses`, on the pages' device
    source, target: [tokens] int64, page * page_size + offset. A token is left where its source and target are equal or
    its target is negative; no target is the source of another token.
    """
    heads, page_size, dim = k_pages[0].shape[1:]
    if backend == "torch":
        moved = (target >= 0) & (target != source)
        page, offset = source[moved] // page_size, source[moved] % page_size
        for keys, values in zip(k_pages, v_pages, strict=True):
            write_kv(keys, values, target[moved], keys[page, :, offset], values_by_token(values)[page, :, offset])
        return
    _move_kv_kernel[(len(source), heads, len(k_pages))](
        *(addresses, k_pages[0], source, target),
        HEADS=heads,
        PAGE=page_size,
        DIM=dim,
        V_STRIDES=values_by_token(v_pages[0]).stride()[2:],
    )


@jit
def _move_kv_kernel(
    addresses_ptr,
    anchor_ptr,
    source_ptr,
    target_ptr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    V_STRIDES: tl.constexpr,
):
    """Move one token's key and value of one head of one layer. anchor: any pages, which tell the addresses' type.

    V_STRIDES: of tokens and of dimensions within a page of values.
    """
    token, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    source, target = tl.load(source_ptr + token), tl.load(target_ptr + token)
    if (target >= 0) & (target != source):
        keys = tl.load(addresses_ptr + layer).to(anchor_ptr.dtype)
        values = tl.load(addresses_ptr + tl.num_programs(2) + layer).to(anchor_ptr.dtype)
        dims = tl.arange(0, DIM)
        from_page = (source // PAGE * HEADS + head) * (PAGE * DIM)
        to_page = (target // PAGE * HEADS + head) * (PAGE * DIM)
        moved = tl.load(keys + from_page + source % PAGE * DIM + dims)
        tl.store(keys + to_page + target % PAGE * DIM + dims, moved)
        of_dims = dims * V_STRIDES[1]
        moved = tl.load(values + from_page + source % PAGE * V_STRIDES[0] + of_dims)
        tl.store(values + to_page + target % PAGE * V_STRIDES[0] + of_dims, moved)
