"""Mixtures of experts: the kernels against torch, one expert after another, and how rows are cut into tiles."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead.kernels.linear import EightBitWeight, GroupedWeight, group_weight, quantize
from specahead.kernels.mixture import Experts, ExpertWeight, mix_experts
from specahead.kernels.mixture.products import FEW, default_cut
from specahead.kernels.mixture.routing import Choice, Tiles, choose_experts, count_tiles, plan_tiles, tile_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
CLOSE = {"atol": 2e-2, "rtol": 2e-2} if DEVICE == "cuda" else {"atol": 1e-5, "rtol": 1e-4}
FEWER_BITS = ["8 bits", "8 bits in groups", "4 bits in groups"]


def held(weight: torch.Tensor, how: str) -> ExpertWeight:
    """A weight in so many bits, near what it is in 16."""
    if how == "8 bits":
        return quantize(weight)
    groups = weight.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(2)
    numbers = (groups / scales[..., None]).flatten(1)
    if how == "8 bits in groups":
        return group_weight((448 * numbers).to(torch.float8_e4m3fn), scales / 448, None, weight.dtype)
    zeros = torch.full_like(scales, 8, dtype=torch.uint8)
    return group_weight((7 * numbers + 8).round().to(torch.uint8), scales.half() / 7, zeros, weight.dtype)


def random_experts(
    count: int, hidden: int, inner: int, chosen: int, renormed: bool = True, how: str = "16 bits"
) -> Experts:
    def weight(*sizes: int) -> torch.Tensor:
        return (torch.randn(sizes) / sizes[-1] ** 0.5).to(DEVICE, DTYPE)

    router, gate_up, down = weight(count, hidden), weight(count * 2 * inner, hidden), weight(count * hidden, inner)
    if how == "16 bits":
        return Experts(router, gate_up, down, chosen, renormed)
    return Experts(router.half(), held(gate_up, how), held(down, how), chosen, renormed)


@settings(max_examples=5, deadline=None)
@given(
    st.integers(1, 40),
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
    parts = mix_experts(x, experts, "triton", in_parts=True)
    assert parts.shape == (experts.chosen, rows, hidden)
    torch.testing.assert_close(parts.float().sum(0).to(DTYPE), mix_experts(x, experts), **CLOSE)


@pytest.mark.parametrize("how", FEWER_BITS)
@pytest.mark.parametrize(("rows", "hidden", "inner"), [(5, 256, 128), (70, 128, 256), (150, 128, 128)])
def test_experts_in_fewer_bits(how: str, rows: int, hidden: int, inner: int) -> None:
    """Rows are not rounded, so what differs is within a float16's rounding."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    experts = random_experts(3, hidden, inner, 2, how=how)
    assert isinstance(experts.gate_up, EightBitWeight if how == "8 bits" else GroupedWeight)
    x = torch.randn(rows, hidden).to(DEVICE, torch.float16)
    out = mix_experts(x, experts, "triton")
    assert out.dtype == DTYPE
    torch.testing.assert_close(out, mix_experts(x, experts), atol=2e-2, rtol=1e-2)


@given(st.integers(1, 300), st.integers(1, 40), st.data(), st.booleans())
@settings(max_examples=8, deadline=None)
def test_a_router_chooses_and_weighs_alike(rows: int, count: int, data: st.DataObject, renormed: bool) -> None:
    pytest.importorskip("triton")
    chosen, parts = data.draw(st.integers(1, min(count, 9))), data.draw(st.integers(0, 3))
    logits = torch.stack([torch.randperm(count) for _ in range(rows)]).float() / 3
    logits = (logits if not parts else torch.stack([logits / parts] * parts)).to(DEVICE)
    ours, theirs = (choose_experts(logits, chosen, renormed, backend) for backend in ("triton", "torch"))
    assert torch.equal(ours.ids, theirs.ids)
    torch.testing.assert_close(ours.weights, theirs.weights)
    assert ours.counts is not None
    assert torch.equal(ours.counts.sum(0).cpu(), theirs.ids.cpu().long().flatten().bincount(minlength=count))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_router_without_numbers_still_chooses_different_experts() -> None:
    """As in rows that fill a step up: each pair has a place, or a kernel would read places that nothing has written."""
    pytest.importorskip("triton")
    logits = torch.zeros(3, 5, device=DEVICE)
    logits[0], logits[1, 2] = float("nan"), float("inf")
    choice = choose_experts(logits, 4, True, "triton")
    assert [len(set(each)) for each in choice.ids.tolist()] == [4] * 3
    assert sorted(plan_tiles(choice, 5, 16, "triton").order.tolist()) == list(range(12))
    assert choice.ids[2].tolist() == [0, 1, 2, 3]


def check_tiles(tiles: Tiles, choice: Choice) -> None:
    """They hold each pair once, and are of one expert each."""
    flat, found = choice.ids.flatten(), list[int]()
    for expert, start, end in zip(tiles.experts.tolist(), tiles.starts.tolist(), tiles.ends.tolist(), strict=True):
        assert end - start <= tiles.size
        pairs = tiles.order[start:end].tolist() if start < end else []
        assert all(flat[pair] == expert for pair in pairs)
        found += pairs
    assert sorted(found) == list(range(len(flat)))


@given(st.integers(1, 300), st.integers(1, 12), st.data(), st.sampled_from([16, 64]))
@settings(max_examples=8, deadline=None)
def test_tiles_hold_each_pair_once(rows: int, count: int, data: st.DataObject, size: int) -> None:
    """Some experts have no pairs, and some have many."""
    pytest.importorskip("triton")
    chosen = data.draw(st.integers(1, count))
    logits = torch.randn(rows, count, device=DEVICE) + data.draw(st.integers(0, 9)) * torch.arange(count, device=DEVICE)
    choice = choose_experts(logits, chosen, True, "triton")
    ours, theirs = (plan_tiles(choice, count, size, backend) for backend in ("triton", "torch"))
    check_tiles(ours, choice)
    check_tiles(theirs, choice)
    assert torch.equal(ours.order, theirs.order)
    assert len(ours.experts) == count_tiles(rows * chosen, count, size)


def test_few_rows_have_small_tiles() -> None:
    assert [tile_rows(8 * rows, 128) for rows in (1, 40, 2048, 8192)] == [16, 16, 64, 128]
    assert count_tiles(320, 128, 16) == 140


@pytest.mark.parametrize("rows", [FEW, 64])
@pytest.mark.parametrize("how", ["16 bits", *FEWER_BITS])
def test_words_are_taken_in_whole_steps(how: str, rows: int) -> None:
    for inputs in (128, 384, 512):
        weight = torch.randn(4, inputs).to(DEVICE, DTYPE)
        weight = weight if how == "16 bits" else held(weight, how)
        cut = default_cut(weight, inputs, rows, gated=True)
        assert how == "16 bits" or inputs % cut.depth == 0


def test_equal_weights_of_a_routers_choice() -> None:
    """By hand: a router that sees nothing takes any experts alike, and renormed weights add up to 1."""
    experts = random_experts(4, 16, 16, 4)
    experts.router.zero_()
    x = torch.randn(3, 16).to(DEVICE, DTYPE)
    each = [
        mix_experts(x, Experts(experts.router[:1], gate_up, down, 1, True))
        for gate_up, down in zip(experts.gate_up.chunk(4), experts.down.chunk(4), strict=True)
    ]
    torch.testing.assert_close(mix_experts(x, experts), torch.stack(each).mean(0), **CLOSE)
