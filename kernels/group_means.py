"""Means of groups of tokens over paged KV, which stand in for tokens that attention does not read."""

from torch import Tensor

from specahead.kernels.backends import Backend, jit, power_of_two, send, tl
from specahead.kernels.kv_scales import values_by_token
from specahead.kernels.kv_write import page_addresses


def make_group_means(
    k_pages: list[Tensor],
    v_pages: list[Tensor],
    pages: Tensor,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    k_variance: Tensor,
    backend: Backend = "torch",
) -> None:
    """Compute means of the keys and values of groups, and the variances of their keys (divided by the group's size).

    k_pages, v_pages: a layer each, [pages, kv_heads, page_size, head_dim], contiguous; values in 8 bits as
        `kv_scales.values_by_token` has them
    pages: [groups, pages of a group] int64; slots: [groups] int64, where each group's results are put
    k, v, k_variance: [layers, slots, kv_heads, head_dim] float32, contiguous, where the results are put
    """
    groups, per_group = pages.shape
    if backend == "torch":
        for layer, (k_source, v_source) in enumerate(zip(k_pages, v_pages, strict=True)):
            # [groups, pages, kv_heads, tokens, dim]
            keys, values = (
                source[pages.flatten()].unflatten(0, (groups, per_group)).float()
                for source in (k_source, values_by_token(v_source))
            )
            k[layer, slots] = keys.mean((1, 3))
            k_variance[layer, slots] = keys.var((1, 3), correction=0)
            v[layer, slots] = values.mean((1, 3))
        return
    layers, mean_slots, kv_heads, dim = k.shape
    _group_means_kernel[(groups, layers, kv_heads)](
        addresses_ptr=send(page_addresses(k_pages, v_pages), k.device),
        anchor_ptr=k_pages[0],
        pages_ptr=pages,
        slots_ptr=slots,
        k_ptr=k,
        v_ptr=v,
        k_variance_ptr=k_variance,
        mean_slots=mean_slots,
        per_group=per_group,
        layers=layers,
        KV_HEADS=kv_heads,
        PAGE=k_pages[0].shape[2],
        DIM=dim,
        V_STRIDES=values_by_token(v_pages[0]).stride()[2:],
        COLUMNS=power_of_two(dim),
    )


@jit
def _page_tile(
    ptr, page, kv_head, column, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, STRIDES: tl.constexpr
):
    """Return one head's tokens of one page, float32 [PAGE, columns], 0 beyond DIM.

    STRIDES: of tokens and of dimensions within a page.
    """
    at = (page * KV_HEADS + kv_head) * (PAGE * DIM)
    inside = (tl.arange(0, PAGE) * STRIDES[0])[:, None] + (column * STRIDES[1])[None, :]
    return tl.load(ptr + at + inside, mask=(column < DIM)[None, :], other=0.0).to(tl.float32)


@jit
def _group_means_kernel(
    addresses_ptr,
    anchor_ptr,
    pages_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    k_variance_ptr,
    mean_slots,
    per_group,
    layers,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    V_STRIDES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Average one group of one layer's head. Keys are read twice: variances come from differences to the mean.

    anchor: any pages, which tell the addresses' type
    """
    column = tl.arange(0, COLUMNS)
    group, layer, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keys = tl.load(addresses_ptr + layer).to(anchor_ptr.dtype)
    values = tl.load(addresses_ptr + layers + layer).to(anchor_ptr.dtype)
    k_sums = tl.zeros([PAGE, COLUMNS], tl.float32)
    v_sums = tl.zeros([PAGE, COLUMNS], tl.float32)
    for i in tl.range(0, per_group):
        page = tl.load(pages_ptr + group * per_group + i)
        k_sums += _page_tile(keys, page, kv_head, column, KV_HEADS, PAGE, DIM, (DIM, 1))
        v_sums += _page_tile(values, page, kv_head, column, KV_HEADS, PAGE, DIM, V_STRIDES)
    tokens = per_group * PAGE
    k_mean = tl.sum(k_sums, 0) / tokens
    squares = tl.zeros([PAGE, COLUMNS], tl.float32)
    for i in tl.range(0, per_group):
        page = tl.load(pages_ptr + group * per_group + i)
        off = _page_tile(keys, page, kv_head, column, KV_HEADS, PAGE, DIM, (DIM, 1)) - k_mean[None, :]
        squares += off * off
    slot = tl.load(slots_ptr + group)
    at = ((layer * mean_slots + slot) * KV_HEADS + kv_head) * DIM + column
    tl.store(k_ptr + at, k_mean, mask=column < DIM)
    tl.store(v_ptr + at, tl.sum(v_sums, 0) / tokens, mask=column < DIM)
    tl.store(k_variance_ptr + at, tl.sum(squares, 0) / tokens, mask=column < DIM)
