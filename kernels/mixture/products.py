"""The products of experts, over tiles of pairs of one expert each (routing.py), and the sums of a row's pairs."""

import torch
from torch import Tensor

from specahead.kernels.backends import jit, power_of_two, tl
from specahead.kernels.mixture.routing import Tiles


def multiply_gated(x: Tensor, gate_up: Tensor, tiles: Tiles, chosen: int) -> Tensor:
    """Return silu(gate) * up of each pair, [pairs, inner], in the order of the tiles.

    x: [rows, hidden], contiguous. gate_up: [experts, 2 * inner, hidden]. chosen: experts of a row.
    """
    inner = gate_up.shape[1] // 2
    out = torch.empty(len(tiles.order), inner, dtype=x.dtype, device=x.device)
    columns = 64
    _gated_kernel[(len(tiles.experts), -(-inner // columns))](
        x_ptr=x,
        gate_up_ptr=gate_up,
        out_ptr=out,
        inner=inner,
        hidden=x.shape[1],
        CHOSEN=chosen,
        **_pointers(tiles),
        **_cut(tiles.size, columns),
    )
    return out


def multiply_down(inner: Tensor, down: Tensor, tiles: Tiles, weights: Tensor) -> Tensor:
    """Return what each pair's expert gives, times the pair's weight, [pairs, hidden], in the order of the tiles.

    inner: [pairs, inner]. down: [experts, hidden, inner]. weights: [pairs] float32, in the order of rows.
    """
    hidden = down.shape[1]
    out = torch.empty(len(inner), hidden, dtype=inner.dtype, device=inner.device)
    columns = 64 if tiles.size == 16 else 128
    _down_kernel[(len(tiles.experts), -(-hidden // columns))](
        inner_ptr=inner,
        down_ptr=down,
        out_ptr=out,
        weights_ptr=weights,
        hidden=hidden,
        inner=inner.shape[1],
        **_pointers(tiles),
        **_cut(tiles.size, columns),
    )
    return out


def add_up_pairs(given: Tensor, tiles: Tiles, chosen: int) -> Tensor:
    """Return the sum of each row's pairs, [rows, hidden]. given: [pairs, hidden], in the order of the tiles."""
    rows, hidden = len(given) // chosen, given.shape[1]
    out = torch.empty(rows, hidden, dtype=given.dtype, device=given.device)
    width = min(1024, power_of_two(hidden))
    _add_up_kernel[(rows, -(-hidden // width))](given, out, tiles.places, hidden, CHOSEN=chosen, WIDTH=width)
    return out


def _pointers(tiles: Tiles) -> dict[str, Tensor]:
    """Return what both products take of the tiles."""
    return {"order_ptr": tiles.order, "experts_ptr": tiles.experts, "starts_ptr": tiles.starts, "ends_ptr": tiles.ends}


def _cut(rows: int, columns: int) -> dict[str, int]:
    """Return how a launch is cut: few rows wait for weights, so that more of them are on their way at once."""
    few = rows == 16
    return {
        "ROWS": rows,
        "COLUMNS": columns,
        "DEPTH": 128 if few else 64,
        "STAGES": 4 if few else 3,
        "num_warps": 4 if few else 8,
    }


@jit
def _gated_kernel(
    x_ptr,
    gate_up_ptr,
    out_ptr,
    order_ptr,
    experts_ptr,
    starts_ptr,
    ends_ptr,
    inner: tl.constexpr,
    hidden: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply the rows of one tile by COLUMNS gates and ups of its expert."""
    tile = tl.program_id(0)
    start, end = tl.load(starts_ptr + tile), tl.load(ends_ptr + tile)
    if start >= end:
        return
    place = start + tl.arange(0, ROWS)
    there = place < end
    row = (tl.load(order_ptr + place, mask=there, other=0) // CHOSEN).to(tl.int64)
    column, depth = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    inside = column < inner
    known = tl.minimum(column, inner - 1).to(tl.int64)
    gates_at = gate_up_ptr + tl.load(experts_ptr + tile).to(tl.int64) * 2 * inner * hidden + known[None, :] * hidden
    ups_at = gates_at + inner * hidden
    gates, ups = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, hidden, DEPTH, num_stages=STAGES):
        left = at + depth < hidden
        x = tl.load(x_ptr + row[:, None] * hidden + (at + depth)[None, :], mask=left[None, :], other=0.0)
        gates = tl.dot(
            x, tl.load(gates_at + (at + depth)[:, None], mask=left[:, None], other=0.0), gates, input_precision="ieee"
        )
        ups = tl.dot(
            x, tl.load(ups_at + (at + depth)[:, None], mask=left[:, None], other=0.0), ups, input_precision="ieee"
        )
    out = gates * tl.sigmoid(gates) * ups
    out_at = out_ptr + place.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=there[:, None] & inside[None, :])


@jit
def _down_kernel(
    inner_ptr,
    down_ptr,
    out_ptr,
    weights_ptr,
    order_ptr,
    experts_ptr,
    starts_ptr,
    ends_ptr,
    hidden: tl.constexpr,
    inner: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply the pairs of one tile by COLUMNS outputs of its expert, and by their weights."""
    tile = tl.program_id(0)
    start, end = tl.load(starts_ptr + tile), tl.load(ends_ptr + tile)
    if start >= end:
        return
    place = start + tl.arange(0, ROWS)
    there = place < end
    column, depth = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    known = tl.minimum(column, hidden - 1).to(tl.int64)
    weights_at = down_ptr + tl.load(experts_ptr + tile).to(tl.int64) * hidden * inner + known[None, :] * inner
    pair = tl.minimum(place, end - 1).to(tl.int64)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, inner, DEPTH, num_stages=STAGES):
        left = at + depth < inner
        given = tl.load(inner_ptr + pair[:, None] * inner + (at + depth)[None, :], mask=left[None, :], other=0.0)
        sums = tl.dot(
            given,
            tl.load(weights_at + (at + depth)[:, None], mask=left[:, None], other=0.0),
            sums,
            input_precision="ieee",
        )
    share = tl.load(weights_ptr + tl.load(order_ptr + place, mask=there, other=0), mask=there, other=0.0)
    out_at = out_ptr + place.to(tl.int64)[:, None] * hidden + column[None, :]
    inside = there[:, None] & (column < hidden)[None, :]
    tl.store(out_at, (sums * share[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _add_up_kernel(given_ptr, out_ptr, places_ptr, hidden: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH], tl.float32)
    for number in tl.static_range(CHOSEN):
        place = tl.load(places_ptr + row * CHOSEN + number).to(tl.int64)
        sums += tl.load(given_ptr + place * hidden + at, mask=at < hidden, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * hidden + at, sums.to(out_ptr.dtype.element_ty), mask=at < hidden)
