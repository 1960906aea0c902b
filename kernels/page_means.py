"""The mean key of each full page, by which models that choose blocks by themselves score blocks (chosen_blocks.py).

The mean of a page lies at the page's number, even where the page itself lies elsewhere (KV in tiers). So means are
shared, freed and rewritten together with their pages.

For keys in 8 bits it is the mean of the keys without their center (kernels.kv_scales). A center adds the same number to
all scores of a query, so it changes no choice.
"""

from torch import Tensor

from specahead.kernels.backends import Backend, jit, power_of_two, tl
from specahead.kernels.kv_scales import KVScales, as_bytes


def write_page_means(
    k_pages: Tensor,
    means: Tensor,
    slots: Tensor,
    page_numbers: Tensor,
    backend: Backend = "torch",
    scales: KVScales | None = None,
) -> None:
    """Write the mean key of each page that the new tokens fill, in place. The pages already hold the new keys.

    k_pages: [pages, kv_heads, page_size, head_dim], contiguous.
    means: [page numbers, kv_heads, head_dim], contiguous.
    slots: [tokens] int64, page * page_size + offset of each new token; a negative one is skipped.
    page_numbers: [tokens] int64, the index in `means` of each token's page.
    scales: those of the layer, if pages are in 8 bits.
    """
    kv_heads, page_size, dim = k_pages.shape[1:]
    of_keys = None if scales is None else scales.scales[0]
    if backend == "torch":
        fills = (slots >= 0) & (slots % page_size == page_size - 1)
        mean = as_bytes(k_pages)[slots[fills] // page_size].view(k_pages.dtype).float().mean(2)
        means[page_numbers[fills]] = (mean if of_keys is None else mean * of_keys[:, None]).to(means.dtype)
        return
    sizes = {"KV_HEADS": kv_heads, "PAGE": page_size, "DIM": dim, "COLUMNS": power_of_two(dim)}
    _page_means_kernel[(len(slots), kv_heads)](k_pages, means, slots, page_numbers, of_keys, **sizes, num_warps=1)


@jit
def _page_means_kernel(
    k_pages_ptr,
    means_ptr,
    slots_ptr,
    page_numbers_ptr,
    scales_ptr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the mean of one head of the page that one token fills, if it fills one."""
    slot, head = tl.load(slots_ptr + tl.program_id(0)), tl.program_id(1)
    if (slot >= 0) & (slot % PAGE == PAGE - 1):
        row, column = slot // PAGE * KV_HEADS + head, tl.arange(0, COLUMNS)
        inside = column < DIM
        at = row * (PAGE * DIM) + tl.arange(0, PAGE)[:, None] * DIM + column[None, :]
        keys = tl.load(k_pages_ptr + at, mask=inside[None, :], other=0.0).to(tl.float32)
        mean = tl.sum(keys, 0) / PAGE
        if scales_ptr is not None:
            mean *= tl.load(scales_ptr + head)
        number = tl.load(page_numbers_ptr + tl.program_id(0))
        tl.store(means_ptr + (number * KV_HEADS + head) * DIM + column, mean, mask=inside)
