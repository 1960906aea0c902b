"""Mixtures of experts: the kernels against torch, one expert after another, and how rows are cut into tiles."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead.kernels.mixture import Experts, mix_experts
from specahead.kernels.mixture.routing import plan_tiles, tile_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
CLOSE = {"atol": 2e-2, "rtol": 2e-2} if DEVICE == "cuda" else {"atol": 1e-5, "rtol": 1e-4}


def random_experts(count: int, hidden: int, inner: int, chosen: int, renormed: bool) -> Experts:
    def weight(*sizes: int) -> torch.Tensor:
        return (torch.randn(sizes) / sizes[-1] ** 0.5).to(DEVICE, DTYPE)

    return Experts(
        weight(count, hidden), weight(count, 2 * inner, hidden), weight(count, hidden, inner), chosen, renormed
    )


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 150),
    st.integers(1, 9),
    st.sampled_from([16, 48, 130]),
    st.sampled_from([16, 72]),
    st.data(),
    st.booleans(),
    st.integers(0, 99),
)
def test_the_kernels_give_what_each_expert_gives(
    rows: int, count: int, hidden: int, inner: int, data: st.DataObject, renormed: bool, seed: int
) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(seed)
    experts = random_experts(count, hidden, inner, data.draw(st.integers(1, count)), renormed)
    x = torch.randn(rows, hidden).to(DEVICE, DTYPE)
    torch.testing.assert_close(mix_experts(x, experts, "triton"), mix_experts(x, experts), **CLOSE)


@given(st.integers(0, 60), st.integers(1, 12), st.data(), st.sampled_from([16, 64]))
@settings(max_examples=60, deadline=None)
def test_tiles_hold_each_pair_once(rows: int, count: int, data: st.DataObject, size: int) -> None:
    """Of one expert each, also where some experts have no pairs and some many."""
    chosen = data.draw(st.integers(1, count))
    liked = data.draw(st.lists(st.permutations(range(count)), min_size=rows, max_size=rows))
    ids = torch.tensor([each[:chosen] for each in liked], dtype=torch.int64).view(rows, chosen)
    tiles = plan_tiles(ids, count, size)
    flat, held = ids.flatten(), list[int]()
    for expert, start, end in zip(tiles.experts.tolist(), tiles.starts.tolist(), tiles.ends.tolist(), strict=True):
        assert end - start <= size
        pairs = tiles.order[start:end].tolist() if start < end else []
        assert all(flat[pair] == expert for pair in pairs)
        held += pairs
    assert sorted(held) == list(range(rows * chosen))
    assert tiles.order[tiles.places.long()].tolist() == list(range(rows * chosen))


def test_few_rows_have_small_tiles() -> None:
    assert [tile_rows(8 * rows, 128) for rows in (1, 40, 2048, 8192)] == [16, 16, 64, 128]


def test_equal_weights_of_a_routers_choice() -> None:
    """By hand: a router that sees nothing takes any experts alike, and renormed weights add up to 1."""
    experts = random_experts(4, 16, 16, 4, True)
    experts.router.zero_()
    x = torch.randn(3, 16).to(DEVICE, DTYPE)
    each = [mix_experts(x, Experts(experts.router[:1], up[None], down[None], 1, True)) for up, down in _pairs(experts)]
    torch.testing.assert_close(mix_experts(x, experts), torch.stack(each).mean(0), **CLOSE)


def _pairs(experts: Experts) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(experts.gate_up, experts.down, strict=True))
