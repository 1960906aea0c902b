"""The mean key of each full page, which a model that chooses blocks by itself scores them by (kernels.chosen_blocks).

Means lie at the numbers of their pages, wherever these lie. So they are shared, freed and written anew together with
their pages.
Of keys in 8 bits the mean is that of what is read, less the center of the keys (kernels.kv_scales): a center adds the
same to all products of a query, which changes no choice.
"""

from torch import Tensor

from specahead.kernels.backends import Backend, jit, power_of_two, tl
from specahead.kernels.kv_scales import KVScales, as_bytes


def write_page_means(
    k_pages: Tensor,
    means: Tensor,
    slots: Tensor,
    numbers: Tensor,
    backend: Backend = "torch",
    scales: KVScales | None = None,
) -> None:
    """Write the mean key of each page whose last token is among new ones, in place. Their keys are in the pages.

    k_pages: [pages, kv_heads, page_size, head_dim], contiguous.
    means: [numbers, kv_heads, head_dim], contiguous.
    slots: [tokens] int64, page * page_size + offset of each new token; a negative one is skipped.
    numbers: [tokens] int64, where in `means` the mean of each token's page lies.
    scales: the layer's, for pages in 8 bits.
    """
    kv_heads, page_size, dim = k_pages.shape[1:]
    of_keys = None if scales is None else scales.scales[0]
    if backend == "torch":
        fills = (slots >= 0) & (slots % page_size == page_size - 1)
        mean = as_bytes(k_pages)[slots[fills] // page_size].view(k_pages.dtype).float().mean(2)
        means[numbers[fills]] = (mean if of_keys is None else mean * of_keys[:, None]).to(means.dtype)
        return
    sizes = {"KV_HEADS": kv_heads, "PAGE": page_size, "DIM": dim, "COLUMNS": power_of_two(dim)}
    _page_means_kernel[(len(slots), kv_heads)](k_pages, means, slots, numbers, of_keys, **sizes, num_warps=1)


@jit
def _page_means_kernel(
    k_pages_ptr,
    means_ptr,
    slots_ptr,
    numbers_ptr,
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
        number = tl.load(numbers_ptr + tl.program_id(0))
        tl.store(means_ptr + (number * KV_HEADS + head) * DIM + column, mean, mask=inside)
