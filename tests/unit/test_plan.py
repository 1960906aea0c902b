"""The plan file, the policy that it steers, and the head map that calibration makes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import PLAN
from sparsity.head_map import best_draft_heads, top_k_overlap
from sparsity.plan import Plan, PlanError, load_plan, save_plan, uniform_plan, with_budget
from sparsity.policy import blocks_to_pages, expand_to_target, select_top_k_blocks
from sparsity.selection import BlockSelection

SMALL = uniform_plan(4, 2, 2, 3, budget=0.25, provenance={"texts": 3})


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any head map, any layers dense."""
    layers, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    draft_layers, draft_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pair = st.tuples(st.integers(0, draft_layers - 1), st.integers(0, draft_heads - 1))
    row = st.tuples(*[pair] * kv_heads)
    return Plan(
        layers,
        kv_heads,
        draft_layers,
        draft_heads,
        draw(st.tuples(*[row] * layers)),
        block_size=draw(st.sampled_from([16, 32, 64])),
        budget=draw(st.sampled_from([0.01, 0.1, 0.5, 0.77, 1.0])),
        sink_blocks=draw(st.integers(0, 3)),
        window_blocks=draw(st.integers(1, 4)),
        dense_layers=tuple(draw(st.sets(st.integers(0, layers - 1)))),
    )


# The file


@settings(max_examples=30)
@given(plan=plans())
def test_a_plan_comes_back_as_it_was_saved(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save_plan(replace(plan, provenance={"mean_overlap": 0.5}), path)
    loaded = load_plan(path)
    assert loaded == plan
    assert loaded.hash == plan.hash
    assert loaded.provenance == {"mean_overlap": 0.5}


def test_the_bundled_plan_loads() -> None:
    assert load_plan(PLAN).target_layers == 10


CHANGES: dict[str, Any] = {
    "draft_layers": 3,
    "draft_heads": 4,
    "head_map": tuple(reversed(SMALL.head_map)),
    "block_size": 32,
    "budget": 0.26,
    "sink_blocks": 0,
    "window_blocks": 5,
    "dense_layers": (0,),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_hash_covers_what_changes_a_result(name: str) -> None:
    assert replace(SMALL, **{name: CHANGES[name]}).hash != SMALL.hash


def test_the_hash_covers_the_shape_of_the_target() -> None:
    assert uniform_plan(5, 2, 2, 3).hash != uniform_plan(4, 2, 2, 3).hash
    assert uniform_plan(4, 1, 2, 3).hash != uniform_plan(4, 2, 2, 3).hash


def test_the_hash_ignores_where_a_plan_comes_from() -> None:
    assert replace(SMALL, provenance={"texts": 4}).hash == SMALL.hash


def saved(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "plan.json"
    save_plan(SMALL, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


@pytest.mark.parametrize("name", CHANGES)
def test_an_edited_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlanError, match="states hash"):
        load_plan(saved(tmp_path, **{name: CHANGES[name]}))


def test_edited_provenance_is_not(tmp_path: Path) -> None:
    assert load_plan(saved(tmp_path, provenance={"note": "by hand"})).provenance == {"note": "by hand"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 2}, "version 2"),
        ({"budget": 0.0}, "budget"),
        ({"budget": 1.01}, "budget"),
        ({"budget": float("nan")}, "budget"),
        ({"budget": "a tenth"}, "plan.json"),
        ({"block_size": 24}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"sink_blocks": -1}, "sink_blocks"),
        ({"window_blocks": 0}, "window_blocks"),
        ({"target_layers": 5}, "head_map has rows"),
        ({"target_kv_heads": 3}, "head_map has rows"),
        ({"head_map": [[[0, 0], [0, 3]]] * 4}, r"draft head \(0, 3\)"),
        ({"head_map": [[[2, 0], [0, 0]]] * 4}, r"draft head \(2, 0\)"),
        ({"head_map": [[[0], [0]]] * 4}, "plan.json"),
        ({"head_map": None}, "plan.json"),
        ({"dense_layers": [4]}, "dense_layers"),
        ({"colour": "blue"}, "expected the keys"),
    ],
)
def test_what_no_plan_can_say_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        load_plan(saved(tmp_path, **changes))


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe", b'{"hash": 1, "head_map": []}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        load_plan(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="not a readable plan"):
        load_plan(tmp_path / "none.json")


def test_another_budget() -> None:
    assert with_budget(SMALL, None) is SMALL
    assert with_budget(SMALL, 1.0) == replace(SMALL, budget=1.0)
    with pytest.raises(PlanError, match="budget"):
        with_budget(SMALL, 0.0)


# The policy


@st.composite
def contexts(draw: st.DrawFn) -> tuple[Plan, int, np.ndarray]:
    """A plan, committed tokens, and softmax mass per block, with ties."""
    plan, base = draw(plans()), draw(st.integers(1, 900))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (plan.draft_layers, plan.draft_heads, plan.num_blocks(base))
    weights = rng.integers(0, 8, shape) / 8 if draw(st.booleans()) else rng.random(shape)
    return plan, base, weights.astype(np.float32)


@given(contexts())
def test_announced_are_the_heaviest_blocks_within_the_budget(context: tuple[Plan, int, np.ndarray]) -> None:
    """Never a mandatory one; with them no more than the budget; as many as it leaves room for."""
    plan, base, weights = context
    blocks = plan.num_blocks(base)
    (selection,) = select_top_k_blocks([torch.from_numpy(weights)], plan)
    assert (selection.num_heads, selection.num_blocks) == (len(plan.announced_heads), blocks)
    assert (np.diff(selection.keys) > 0).all()
    free = [b for b in range(blocks) if plan.sink_blocks <= b < blocks - plan.window_blocks]
    budget = min(blocks, max(1, int(np.ceil(plan.budget * blocks))))
    room = min(len(free), max(0, budget - (blocks - len(free))))
    for (layer, head), chosen in zip(plan.announced_heads, selection.lists(), strict=True):
        heaviest = sorted(free, key=lambda block: (-weights[layer, head, block], block))[:room]
        assert chosen == sorted(heaviest)


@given(contexts(), st.integers(0, 70))
def test_expansion_is_what_its_description_says(context: tuple[Plan, int, np.ndarray], more: int) -> None:
    """Block by block, for a round that ends `more` tokens after the committed ones."""
    plan, base, weights = context
    (selection,) = select_top_k_blocks([torch.from_numpy(weights)], plan)
    wanted = expand_to_target(selection, plan, base, base + more)
    announced = dict(zip(plan.announced_heads, selection.lists(), strict=True))
    blocks, known = plan.num_blocks(base + more), plan.num_blocks(base)
    assert wanted.shape == (plan.target_layers, plan.target_kv_heads, blocks)
    for layer, row in enumerate(plan.head_map):
        for kv_head, pair in enumerate(row):
            for block in range(blocks):
                dense = layer in plan.dense_layers
                mandatory = block < plan.sink_blocks or block >= known - plan.window_blocks
                read = dense or mandatory or block in announced[pair]
                assert wanted[layer, kv_head, block] == read


@given(contexts(), st.integers(0, 70))
def test_budget_1_reads_every_page(context: tuple[Plan, int, np.ndarray], more: int) -> None:
    plan, base, weights = context
    plan = with_budget(plan, 1.0)
    (selection,) = select_top_k_blocks([torch.from_numpy(weights)], plan)
    wanted = expand_to_target(selection, plan, base, base + more)
    pages = blocks_to_pages(wanted, plan.block_size, 16, base + more)
    assert pages.shape[-1] == -(-(base + more) // 16)
    assert pages.all()


@given(st.lists(st.integers(1, 900), min_size=1, max_size=4), plans())
def test_sequences_selected_together_are_selected_as_each_alone(bases: list[int], plan: Plan) -> None:
    rng = np.random.default_rng(len(bases))
    shapes = [(plan.draft_layers, plan.draft_heads, plan.num_blocks(base)) for base in bases]
    weights = [torch.from_numpy(rng.random(shape).astype(np.float32)) for shape in shapes]
    for alone, together in zip(weights, select_top_k_blocks(weights, plan), strict=True):
        (selection,) = select_top_k_blocks([alone], plan)
        assert together.num_blocks == selection.num_blocks == alone.shape[2]
        assert together.lists() == selection.lists()


def test_no_selection_reads_every_block() -> None:
    assert expand_to_target(None, SMALL, 100, 105).all()


def test_a_selection_of_other_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="selection over 1 heads"):
        expand_to_target(BlockSelection.from_lists([[1]], 7), SMALL, 100, 105)


def test_a_plan_without_sparse_layers_announces_nothing() -> None:
    plan = uniform_plan(2, 2, 2, 2, dense_layers=(0, 1))
    (selection,) = select_top_k_blocks([torch.rand(2, 2, 30)], plan)
    assert (selection.num_heads, selection.num_blocks, len(selection.keys)) == (0, 30, 0)
    assert expand_to_target(selection, plan, 480, 484).all()


def test_blocks_to_pages_by_hand() -> None:
    """A block of 48 tokens is three pages of 16; the last block may end early."""
    wanted = np.array([[True, False, True], [False, True, False]])
    pages = blocks_to_pages(wanted, 48, 16, 120)
    assert pages.astype(int).tolist() == [[1, 1, 1, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 0, 0]]
    assert np.array_equal(blocks_to_pages(wanted, 16, 16, 48), wanted)


# Selections


def test_resizing_keeps_blocks_and_drops_those_beyond() -> None:
    selection = BlockSelection.from_lists([[0, 4], [2, 3]], 5)
    assert selection.resized(9).lists() == [[0, 4], [2, 3]]
    assert selection.resized(3).lists() == [[0], [2]]
    assert selection.resized(0).lists() == [[], []]


def test_joining_is_the_union_in_the_longer_context() -> None:
    joined = BlockSelection.from_lists([[0, 4], []], 5).joined(BlockSelection.from_lists([[1, 4], [7]], 8))
    assert joined.num_blocks == 8
    assert joined.lists() == [[0, 1, 4], [7]]
    with pytest.raises(ValueError, match="cannot be joined"):
        joined.joined(BlockSelection.from_lists([[1]], 8))


# The head map


@pytest.mark.parametrize("seed", range(8))
def test_overlap_is_counted_pair_by_pair(seed: int) -> None:
    """With ties, as flat weights have them; k beyond the blocks takes all."""
    rng = np.random.default_rng(seed)
    blocks, k = int(rng.integers(1, 12)), int(rng.integers(1, 14))
    draft, target = (rng.integers(0, 5, (n, blocks)).astype(np.float32) for n in (3, 4))

    def top(row: np.ndarray) -> set[int]:
        return set(np.argsort(-row, kind="stable")[:k].tolist())

    got = top_k_overlap(torch.from_numpy(draft), torch.from_numpy(target), k)
    assert got.tolist() == [[len(top(t) & top(d)) for d in draft] for t in target]


def test_the_best_draft_head_has_the_most_overlap() -> None:
    overlap = torch.tensor([[1.0, 5.0, 2.0], [7.0, 0.0, 3.0]])
    heads, scores = best_draft_heads(overlap)
    assert heads.tolist() == [1, 0]
    assert scores.tolist() == [5.0, 7.0]


def test_a_head_that_looks_alike_is_found() -> None:
    """Target heads are noisy copies of draft heads; the map finds the original of each."""
    torch.manual_seed(0)
    overlap = torch.zeros(4, 6)
    origin = [4, 0, 5, 0]
    for _ in range(30):
        draft = torch.rand(6, 40)
        overlap += top_k_overlap(draft, draft[origin] + 0.2 * torch.rand(4, 40), 5)
    assert best_draft_heads(overlap)[0].tolist() == origin
