"""The products of experts, over tiles of pairs of one expert each (routing.py)."""

from dataclasses import replace

import torch
from torch import Tensor

from specahead.kernels.backends import follow, jit, overlapping_launch, tl
from specahead.kernels.linear import BLOCK, EightBitWeight, GroupedWeight
from specahead.kernels.linear.few_rows import Tuning, as_kernels_take
from specahead.kernels.linear.summing import Sums, gate, sum_products
from specahead.kernels.mixture.routing import Tiles

# The weights of all experts, below one another: [experts * outputs, inputs].
ExpertWeight = Tensor | EightBitWeight | GroupedWeight


# Few rows wait for weights. A program that has a multiprocessor to itself waits at its beginning, for the tile and the
# first weights, and at its end; so two or three share one: a stage takes 2 * columns * depth bytes of its weights in 16
# bits (twice that with gates and ups), the same for x by the tile's rows, and a multiprocessor has 227 KiB in all.
FEW_ROWS = {
    # whether the layer is gated, bits of its weights
    (True, 16): Tuning(64, 128, 4, 3),
    (False, 16): Tuning(128, 128, 4, 3),
    (True, 8): Tuning(64, 128, 4, 4),
    (False, 8): Tuning(128, 128, 4, 4),
    (True, 4): Tuning(64, 256, 4, 3),
    (False, 4): Tuning(128, 256, 4, 3),
}
MANY_ROWS = {
    (True, 16): Tuning(64, 64, 8, 3),
    (False, 16): Tuning(128, 64, 8, 3),
    (True, 8): Tuning(64, 128, 8, 3),
    (False, 8): Tuning(128, 128, 8, 3),
    (True, 4): Tuning(64, 256, 8, 2),
    (False, 4): Tuning(128, 256, 8, 2),
}
FEW = 16  # rows of a tile


def multiply_gated(
    x: Tensor, gate_up: ExpertWeight, experts: int, tiles: Tiles, chosen: int, cut: Tuning | None = None
) -> Tensor:
    """Return silu(gate) * up of each pair, [pairs, inner], in the dtype of x, in the order of the tiles.

    x: [rows, hidden], contiguous. gate_up: [experts * 2 * inner, hidden], the gates of an expert above its ups.
    chosen: experts of a row. cut: None: the one for its size.
    """
    inner = len(gate_up) // experts // 2
    out = torch.empty(len(tiles.order), inner, dtype=x.dtype, device=x.device)
    _multiply(x, gate_up, inner, out, None, tiles, chosen, cut)
    return out


def multiply_down(
    inner: Tensor, down: ExpertWeight, experts: int, tiles: Tiles, weights: Tensor, cut: Tuning | None = None
) -> Tensor:
    """Return what each row's experts give, times their weights, [chosen, rows, hidden], in the model's dtype.

    inner: [pairs, inner], in the order of the tiles. down: [experts * hidden, inner]. weights: [rows, chosen] float32.
    """
    hidden = len(down) // experts
    rows, chosen = weights.shape
    out = torch.empty(chosen, rows, hidden, dtype=down.dtype, device=inner.device)
    _multiply(inner, down, hidden, out, weights, tiles, chosen, cut)
    return out


def _multiply(
    x: Tensor,
    weight: ExpertWeight,
    outputs: int,
    out: Tensor,
    weights: Tensor | None,
    tiles: Tiles,
    chosen: int,
    cut: Tuning | None,
) -> None:
    items, word, group = as_kernels_take(weight)
    cut = cut or default_cut(weight, x.shape[1], tiles.size, weights is None)
    _multiply_kernel[(len(tiles.experts), -(-outputs // cut.columns))](
        x_ptr=x,
        weight=items,
        out_ptr=out,
        weights_ptr=weights,
        order_ptr=tiles.order,
        experts_ptr=tiles.experts,
        starts_ptr=tiles.starts,
        ends_ptr=tiles.ends,
        rows=len(tiles.order) // chosen,
        outputs=outputs,
        inputs=x.shape[1],
        lines=len(weight),
        CHOSEN=chosen,
        ROWS=tiles.size,
        COLUMNS=cut.columns,
        SUMS=Sums(x.shape[1], cut.depth, word, group, cut.stages),
        num_warps=cut.warps,
        **overlapping_launch(x.device),
    )


def default_cut(weight: ExpertWeight, inputs: int, rows: int, gated: bool) -> Tuning:
    """Return the cut of a layer of experts. rows: of a tile."""
    bits = 16 if isinstance(weight, Tensor) else 4 if isinstance(weight, GroupedWeight) and weight.numbers == 8 else 8
    cut = (FEW_ROWS if rows == FEW else MANY_ROWS)[gated, bits]
    if isinstance(weight, GroupedWeight):
        return replace(cut, depth=weight.span)
    if isinstance(weight, Tensor):
        return replace(cut, depth=2 * cut.depth // weight.itemsize)
    return cut if inputs % cut.depth == 0 else replace(cut, depth=BLOCK)


@jit
def _multiply_kernel(
    x_ptr,
    weight,
    out_ptr,
    weights_ptr,
    order_ptr,
    experts_ptr,
    starts_ptr,
    ends_ptr,
    rows,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    lines: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the pairs of one tile by COLUMNS outputs of its expert: gated, or with weights times these.

    The weights of experts are the left side of the product, as in kernels.linear.few_rows.
    """
    follow(PDL)
    tile = tl.program_id(0)
    start, end = tl.load(starts_ptr + tile), tl.load(ends_ptr + tile)
    if start >= end:
        return
    GATED: tl.constexpr = weights_ptr is None
    HEIGHT: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    of_expert = tl.load(experts_ptr + tile).to(tl.int64) * (HEIGHT // COLUMNS * outputs)
    line = tl.arange(0, HEIGHT)
    known = of_expert + tl.minimum(tl.program_id(1) * COLUMNS + line % COLUMNS, outputs - 1)
    known += line // COLUMNS * outputs
    place = start + tl.arange(0, ROWS)
    there = place < end
    pair = tl.load(order_ptr + place, mask=there, other=0)
    row = (pair // CHOSEN if GATED else tl.minimum(place, end - 1)).to(tl.int64)
    weights_at, x_at = weight.numbers + known * (inputs // SUMS.WORD), x_ptr + row * inputs
    sums = sum_products(weight, weights_at, x_at, there, known, lines, 0, SUMS, PDL)
    if GATED:
        sums = gate(sums, out_ptr.dtype.element_ty)
        to = place
    else:
        sums *= tl.load(weights_ptr + pair, mask=there, other=0.0)[None, :]
        to = pair % CHOSEN * rows + pair // CHOSEN
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    out_at = out_ptr + to.to(tl.int64)[None, :] * outputs + column[:, None]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=there[None, :] & (column < outputs)[:, None])
