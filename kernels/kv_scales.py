"""KV in 8 bits: e4m3 numbers, with a scale for each KV head of a layer and a center for each of its dimensions.

A number in a page times its head's scale is the difference of a key or value to the center. Scales are powers of two,
so that no product with them rounds. A difference is rounded to 4 bits of mantissa if it lies within the range of e4m3,
whose largest number is 448 and whose smallest with a full mantissa is 1/64. Larger ones become the largest, and so does
what is no number.

Taking the same vector from all keys of a head changes no softmax over them: keys' centers are never added back. Values'
centers are added to the output once, as its weights sum to 1. Nor does attention multiply by scales for each number
(kernels.paged_attention).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.kernels.backends import Backend, constant, jit, tl

EIGHT_BITS = torch.float8_e4m3fn
LARGEST = torch.finfo(EIGHT_BITS).max
_LARGEST = constant(LARGEST)
MARGIN = 2.0  # by which differences may exceed the largest that scales were made from, at least


@dataclass(frozen=True)
class KVScales:
    """What 8-bit numbers stand for: of one layer, or with a leading dimension for layers. Keys come first."""

    scales: Tensor
    """[2, kv_heads] float32."""
    centers: Tensor
    """[2, kv_heads, dim] float32."""

    def layer(self, index: int) -> "KVScales":
        return KVScales(self.scales[index], self.centers[index])


def scales_for(largest: Tensor) -> Tensor:
    """Return the least powers of two that leave MARGIN above the largest absolute differences: float32, of their shape.

    Raises ValueError if a number is not finite.
    """
    if not bool(largest.isfinite().all()):
        raise ValueError("KV in 8 bits: keys or values that scales are made from are infinite or no numbers")
    wanted = largest.float().clamp(min=2.0**-100) * (MARGIN / LARGEST)
    return torch.exp2(wanted.log2().ceil())


def keys_to_pages(keys: Tensor, of: KVScales) -> Tensor:
    """Return keys [..., kv_heads, dim] as pages hold them. of: the layer's."""
    return _rounded(keys, of.scales[0], of.centers[0])


def values_to_pages(values: Tensor, of: KVScales) -> Tensor:
    """Return values [..., kv_heads, dim] as pages hold them. of: the layer's."""
    return _rounded(values, of.scales[1], of.centers[1])


def _rounded(x: Tensor, scales: Tensor, centers: Tensor) -> Tensor:
    # Attention multiplies tokens without weight as well: none may be NaN.
    rounded = ((x.float() - centers) / scales[:, None]).nan_to_num(-LARGEST)
    return rounded.clamp(-LARGEST, LARGEST).to(EIGHT_BITS)


def keys_of_pages(pages: Tensor, of: KVScales, dtype: torch.dtype) -> Tensor:
    """Return 8-bit keys [kv_heads, n, dim] less their centers, of a dtype."""
    return (pages.float() * of.scales[0, :, None, None]).to(dtype)


def values_of_pages(pages: Tensor, of: KVScales, dtype: torch.dtype) -> Tensor:
    """Return 8-bit values [kv_heads, n, dim] of a dtype."""
    return (pages.float() * of.scales[1, :, None, None] + of.centers[1, :, None]).to(dtype)


def as_bytes(pages: Tensor) -> Tensor:
    """Return 8-bit numbers as bytes, a view, for torch's operations that take no e4m3; others as they are."""
    return pages.view(torch.uint8) if pages.dtype == EIGHT_BITS else pages


def values_by_token(v_pages: Tensor) -> Tensor:
    """Return pages of values by token, [pages, kv_heads, page_size, dim]: in 8 bits a view, others as they are.

    In 8 bits they are [pages, kv_heads, dim, page_size]. Hopper's tensor cores multiply weights with 8-bit values only
    if the tokens of a dimension lie side by side.
    """
    return v_pages.transpose(2, 3) if v_pages.dtype == EIGHT_BITS else v_pages


def copy_keys(pages: Tensor, rows: Tensor, of: KVScales, out: Tensor, backend: Backend = "torch") -> None:
    """Copy rows of 8-bit keys to `out`, less their centers.

    pages: [pages, kv_heads, page_size, dim], contiguous. rows: [n] int64, page * kv_heads + head, as many of each head:
        head by head. of: the layer's. out: [n, page_size * dim], contiguous.
    """
    if backend == "torch":
        out.copy_(keys_of_pages(_rows_by_head(pages, rows), of, out.dtype).view(out.shape))
    else:
        _copy_rows(pages, rows, of.scales[0], None, out)


def copy_values(pages: Tensor, rows: Tensor, of: KVScales, out: Tensor, backend: Backend = "torch") -> None:
    """Copy rows of 8-bit values to `out`. The arguments are those of `copy_keys`, but for the shape of pages
    (`values_by_token`).
    """
    if backend == "torch":
        out.copy_(values_of_pages(_rows_by_head(values_by_token(pages), rows), of, out.dtype).view(out.shape))
    else:
        _copy_rows(values_by_token(pages), rows, of.scales[1], of.centers[1], out)


def _rows_by_head(pages: Tensor, rows: Tensor) -> Tensor:
    kv_heads, _, dim = pages.shape[1:]
    copied = as_bytes(pages).flatten(0, 1)[rows]
    return copied.view(pages.dtype).reshape(kv_heads, -1, dim)


def _copy_rows(pages: Tensor, rows: Tensor, scales: Tensor, centers: Tensor | None, out: Tensor) -> None:
    kv_heads, page_size, dim = pages.shape[1:]
    if len(rows):
        _copy_rows_kernel[(len(rows),)](
            pages, rows, scales, centers, out, KV_HEADS=kv_heads, PAGE=page_size, DIM=dim, STRIDES=pages.stride()[2:]
        )


@jit
def _copy_rows_kernel(
    pages_ptr,
    rows_ptr,
    kv_scales_ptr,
    centers_ptr,
    out_ptr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    STRIDES: tl.constexpr,
):
    """STRIDES: of tokens and of dimensions within a page."""
    place = tl.program_id(0)
    row = tl.load(rows_ptr + place)
    head = row % KV_HEADS
    token, column = tl.arange(0, PAGE), tl.arange(0, DIM)
    at = (token * STRIDES[0])[:, None] + (column * STRIDES[1])[None, :]
    numbers = tl.load(pages_ptr + row * (PAGE * DIM) + at).to(tl.float32) * tl.load(kv_scales_ptr + head)
    if centers_ptr is not None:
        numbers += tl.load(centers_ptr + head * DIM + column)[None, :]
    out_at = place.to(tl.int64) * (PAGE * DIM) + (token * DIM)[:, None] + column[None, :]
    tl.store(out_ptr + out_at, numbers.to(out_ptr.dtype.element_ty))


@jit
def in_pages(x, scale, center, dtype: tl.constexpr):
    """Return numbers of a head as pages of `dtype` hold them."""
    return tl.clamp((x.to(tl.float32) - center) / scale, -_LARGEST, _LARGEST).to(dtype)
