"""Merging partial attentions: Triton (on a GPU, or interpreted) and torch against float64, and against one softmax."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specahead.kernels.merged_attention import merge_attended
from specahead.kernels.prompt_attention import attend_to_piece


def needs(backend: str) -> None:
    """Skip a test of Triton where there is none."""
    if backend == "triton":
        pytest.importorskip("triton")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])
SIZES = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 20), st.sampled_from([1, 8, 12, 64]))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
# The axes [batch, heads, rows, dim] as they lie in memory, outermost first; how far apart neighbours of the last are.
LAYOUTS = st.tuples(st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2)]), st.integers(1, 2))

CUTS = [(0, 40), (40, 42), (42, 90)]


def laid_out(values: Tensor, layout: tuple[tuple[int, ...], int], dtype: torch.dtype) -> Tensor:
    """The same numbers, rounded, at other places in memory; between them are NaN."""
    order, apart = layout
    own = values.permute(order)
    memory = torch.full((*own.shape[:3], own.shape[3] * apart), torch.nan, dtype=dtype, device=DEVICE)[..., ::apart]
    memory.copy_(own)
    return memory.permute(*(order.index(axis) for axis in range(4)))


def totals(random: torch.Generator, *shape: int) -> Tensor:
    """Log-sum-exps as far apart as long and short pieces have them, some equal, some of nothing."""
    drawn = torch.randint(-3, 4, shape, generator=random) * torch.tensor([0.5, 40.0])[torch.arange(shape[2]) % 2, None]
    return drawn.masked_fill(torch.rand(shape, generator=random) < 0.2, -torch.inf)


@BACKENDS
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter: inf - inf, exp(inf)
@settings(max_examples=40, deadline=None)
@given(SIZES, DTYPES, DTYPES, DTYPES, LAYOUTS, LAYOUTS, LAYOUTS, st.integers(0, 99))
def test_it_weighs_by_what_was_seen(
    backend: str,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    of_piece: torch.dtype,
    of_out: torch.dtype,
    layout: tuple[tuple[int, ...], int],
    layout_of_piece: tuple[tuple[int, ...], int],
    layout_of_out: tuple[tuple[int, ...], int],
    seed: int,
) -> None:
    """A part of the rows may be wanted, and layouts may be any; what is around stays as it is."""
    needs(backend)
    random = torch.Generator().manual_seed(seed)
    batch, heads, rows, dim = sizes
    skipped = seed % rows
    wanted = slice(skipped, skipped + int(torch.randint(0, rows - skipped + 1, (), generator=random)))
    running = laid_out(torch.randn(sizes, generator=random), layout, dtype)
    piece = laid_out(torch.randn(sizes, generator=random), layout_of_piece, of_piece)
    total, weight = (totals(random, batch, heads, rows, 1).to(DEVICE) for _ in range(2))
    if batch == 1:  # as of some rows among those of several sequences
        total = torch.cat([total, total, total], 2)[:, :, rows : 2 * rows]
    around = laid_out(torch.full((batch, heads, wanted.stop - wanted.start + 2, dim), torch.nan), layout_of_out, of_out)

    merged = merge_attended(running, total, piece, weight, around[:, :, 1:-1], skipped, backend)

    one, other = total.double(), weight.double()
    parts = torch.softmax(torch.cat([one, other], 3), 3)
    parts = parts.masked_fill((one == other), 0.5).split(1, 3)
    exact = (parts[0] * running.double() + parts[1] * piece.double())[:, :, wanted]
    rtol = 1e-5 if of_out == torch.float32 else 2**-7
    torch.testing.assert_close(around[:, :, 1:-1].double(), exact, rtol=rtol, atol=1e-5)
    assert around[:, :, [0, -1]].isnan().all()
    exact = torch.logaddexp(one, other)[:, :, wanted]
    assert merged.dtype == torch.float32 and merged.is_contiguous()
    torch.testing.assert_close(merged.double(), exact, rtol=1e-6, atol=1e-6)


@BACKENDS
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_saw_nothing_counts_for_nothing(backend: str) -> None:
    """Four rows, of which the last three are wanted."""
    needs(backend)
    nothing = -torch.inf
    total, weight = torch.tensor([[9.0, 1, nothing, nothing], [9.0, nothing, 1, nothing]], device=DEVICE)
    out = torch.empty(1, 1, 3, 1, device=DEVICE)
    pieces = (torch.full((1, 1, 4, 1), value, device=DEVICE) for value in (2.0, 6.0))
    weights = (each.view(1, 1, 4, 1) for each in (total, weight))
    merged = merge_attended(next(pieces), next(weights), next(pieces), next(weights), out, 1, backend)
    assert out.flatten().tolist() == [2, 6, 4] and merged.flatten().tolist() == [1, 1, nothing]


@BACKENDS
def test_pieces_one_after_another_are_one_attention(backend: str) -> None:
    """Into what was merged before: three pieces of keys."""
    needs(backend)
    random = torch.Generator().manual_seed(1)
    queries, keys, values = (torch.randn(2, 6, n, 16, generator=random).to(DEVICE) for n in (5, 90, 90))
    exact, exact_total = attend_to_piece(queries, keys, values, False, 0.3, False)
    pieces = (attend_to_piece(queries, keys[:, :, a:b], values[:, :, a:b], False, 0.3, False) for a, b in CUTS)
    running, total = next(pieces)
    for piece, weight in pieces:
        total = merge_attended(running, total, piece, weight, running, backend=backend)
    torch.testing.assert_close(running, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, exact_total, rtol=1e-5, atol=1e-5)


@BACKENDS
def test_several_pieces_in_one_launch_are_merged_as_one_after_another(backend: str) -> None:
    needs(backend)
    random = torch.Generator().manual_seed(2)
    (running, total), *others = (
        (torch.randn(2, 6, 5, 16, generator=random).to(DEVICE), totals(random, 2, 6, 5, 1).to(DEVICE)) for _ in range(4)
    )
    exact, exact_total = running, total
    for other in others:
        merged = torch.empty_like(running)
        exact_total = merge_attended(exact, exact_total, *other, merged)
        exact = merged
    out = torch.empty_like(running)
    pieces, weights = map(torch.cat, zip(*others, strict=True))
    sums = merge_attended(running, total, pieces, weights, out, backend=backend)
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums, exact_total, rtol=1e-5, atol=1e-5)
