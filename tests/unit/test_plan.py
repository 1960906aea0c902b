"""The plan file, the announcements that it steers, and the head map that calibration makes."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from orchestrator.api.endpoints import serve_clients
from orchestrator.cluster.directory import Directory
from orchestrator.requests.access import read_access
from specahead.engine.steps.inputs import SequenceOutput
from specahead.lab.evaluation.calibration.head_map import best_draft_heads, top_k_overlap
from specahead.lab.evaluation.plans import save_plan
from specahead.models import DRAFT, PLAN
from specahead.sparsity.announce import BY_DRAFT_HEAD, announce
from specahead.sparsity.methods import METHODS, load_served_plan
from specahead.sparsity.plan import PLAN_VERSION, Plan, PlanError, load_plan, uniform_plan
from specahead.sparsity.reader import Reader
from specahead.sparsity.selection import BlockSelection
from target_service.pacing import policy_of
from target_service.policy.acceptance import OF_DRAFT
from target_service.service import run
from tests.launch_settings import launch_settings
from tests.settings import target_settings

SMALL = uniform_plan(4, 2, 2, 3, budget=0.25, provenance={"texts": 3})


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any head map, any layers dense."""
    layers, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    draft_layers, draft_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pair = st.tuples(st.integers(0, draft_layers - 1), st.integers(0, draft_heads - 1))
    row = st.tuples(*[pair] * kv_heads)
    return uniform_plan(
        layers,
        kv_heads,
        draft_layers,
        draft_heads,
        head_maps=((0.1, draw(st.tuples(*[row] * layers))),),
        method="sts",
        block_size=draw(st.sampled_from([1, 16, 32, 64])),
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
    "head_maps": ((0.1, tuple(reversed(SMALL.head_map))),),
    "layer_map": (0, 0, 0, 1),
    "blends": (((0, 0, 0.5),),) * 8,
    "head_importance": ((1.0, 2.0),) * 4,
    "head_budgets": ((1.5, 0.5),) * 4,
    "method": "sts",
    "mass": 0.9,
    "rule": "top_p",
    "sharing": "union",
    "allocation": "calibrated",
    "group_size": 64,
    "anchor_layers": (1,),
    "announced_share": 0.5,
    "memory_decay": 0.5,
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


@pytest.mark.parametrize(("stated", "acceptance"), [(0.7, 0.7), (None, None), ("much", None), (1.4, None)])
def test_the_acceptance_that_calibration_found_is_the_prior(stated: object, acceptance: float | None) -> None:
    """Without one, or with one that is none, the policy assumes its own."""
    plan = replace(SMALL, provenance={"acceptance": stated})
    assert plan.acceptance == acceptance
    runner: Any = SimpleNamespace(weight_tokens=1.0, alternatives_beside=lambda gamma: 0)
    policy = policy_of(target_settings(draft=str(DRAFT)), plan, runner, Counter())
    assert policy.acceptance.chances[0] == (OF_DRAFT if acceptance is None else acceptance)


def test_edited_provenance_is_not(tmp_path: Path) -> None:
    assert load_plan(saved(tmp_path, provenance={"note": "by hand"})).provenance == {"note": "by hand"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 2}, "version 2"),
        ({"version": 4}, "version 4"),
        ({"least_tokens": -1}, "least_tokens"),
        ({"budget": 0.0}, "budget"),
        ({"budget": 1.01}, "budget"),
        ({"budget": float("nan")}, "budget"),
        ({"budget": "a tenth"}, "plan.json"),
        ({"block_size": 24}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"sink_blocks": -1}, "sink_blocks"),
        ({"window_blocks": 0}, "window_blocks"),
        ({"target_layers": 5}, "has rows of"),
        ({"target_kv_heads": 3}, "has rows of"),
        ({"head_maps": [[0.1, [[[0, 0], [0, 3]]] * 4]]}, r"draft head \(0, 3\)"),
        ({"head_maps": [[0.1, [[[2, 0], [0, 0]]] * 4]]}, r"draft head \(2, 0\)"),
        ({"head_maps": [[0.1, [[[0], [0]]] * 4]]}, "plan.json"),
        ({"head_maps": None}, "plan.json"),
        ({"head_maps": []}, "no head map"),
        ({"layer_map": [0, 0, 0, 2]}, r"draft head \(2, 0\)"),
        ({"layer_map": [0]}, "layer_map"),
        ({"blends": []}, "blends"),
        ({"mass": 0.0}, "mass"),
        ({"rule": "top_q"}, "rule"),
        ({"sharing": "some"}, "sharing"),
        ({"allocation": "some"}, "allocation"),
        ({"group_size": 40}, "group_size"),
        ({"anchor_layers": [4]}, "anchor"),
        ({"memory_decay": 1.0}, "memory_decay"),
        ({"dense_layers": [4]}, "dense or anchor layers"),
        ({"colour": "blue"}, "expected the keys"),
    ],
)
def test_what_no_plan_can_say_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        load_plan(saved(tmp_path, **changes))


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe", b'{"hash": 1, "head_maps": []}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        load_plan(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="not a readable plan"):
        load_plan(tmp_path / "none.json")


def test_another_budget(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    save_plan(SMALL, file)
    assert load_served_plan(file, 0.0, "") == SMALL
    assert load_served_plan(file, 1.0, "sts") == replace(SMALL, budget=1.0, method="sts")
    with pytest.raises(PlanError, match="budget"):
        load_served_plan(file, 1.5, "")


def test_both_sides_of_a_pair_without_a_plan_come_to_the_same_one(tmp_path: Path) -> None:
    """By the models' configs alone: layers in proportion, KV heads by their place, all equally important."""
    for name, layers, heads, kv_heads in (("target", 6, 4, 2), ("draft", 3, 6, 2)):
        how = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        LlamaConfig(hidden_size=48, vocab_size=97, head_dim=8, **how).save_pretrained(tmp_path / name)
    config = launch_settings(["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")], {})
    plan, same = (
        load_served_plan(side.plan_file, side.budget, side.method, *side.pair) for side in (config.target, config.draft)
    )
    assert plan == same and plan.hash == same.hash and not plan.is_calibrated and load_plan(PLAN).is_calibrated
    assert (plan.draft_layers, plan.draft_heads, plan.dense_layers) == (3, 6, ())
    assert plan.layer_map == (0, 0, 1, 1, 2, 2)
    assert all(plan.reads_wholly(tokens) for tokens in (1, 1024, 10**6))  # until a budget is stated
    assert not load_plan(PLAN).reads_wholly(1025) and load_plan(PLAN).reads_wholly(1024)
    stated = load_served_plan("", 0.25, "", *config.target.pair)
    assert (stated.budget, stated.reads_wholly(1024), stated.reads_wholly(1025)) == (0.25, True, False)
    third = pytest.approx(1 / 3)
    assert plan.blends[2:4] == (
        ((0, 0, third), (0, 1, third), (0, 2, third)),
        ((0, 3, third), (0, 4, third), (0, 5, third)),
    )
    assert plan.head_map[5] == ((2, 0), (2, 3))
    assert {value for row in plan.head_importance for value in row} == {1.0}


@given(st.integers(1, 40), st.integers(1, 16), st.integers(1, 40), st.integers(1, 32))
def test_any_two_models_have_a_plan(layers: int, kv_heads: int, draft_layers: int, draft_heads: int) -> None:
    """Plan itself checks that it names heads that there are. None is left out that there are enough KV heads for."""
    plan = uniform_plan(layers, kv_heads, draft_layers, draft_heads)
    assert list(plan.layer_map) == sorted(plan.layer_map)
    heard = {pair for blend in plan.blends for pair in ((i, j) for i, j, _ in blend)}
    assert heard == {(layer, head) for layer in set(plan.layer_map) for head in _heard(kv_heads, draft_heads)}
    assert all(sum(weight for *_, weight in blend) == pytest.approx(1) for blend in plan.blends)


def _heard(kv_heads: int, draft_heads: int) -> set[int]:
    return (
        set(range(draft_heads)) if draft_heads >= kv_heads else {i * draft_heads // kv_heads for i in range(kv_heads)}
    )


def test_services_refuse_a_plan_that_they_cannot_serve(tmp_path: Path) -> None:
    """Before they load a model, of which there is none here; another method makes another plan to shake hands on."""
    path = tmp_path / "plan.json"

    def opened(plan: Plan, method: str = "") -> None:
        save_plan(plan, path)
        settings = target_settings(model=str(tmp_path), plan=str(path), method=method)
        asyncio.run(run(settings, lambda server: None))

    for sharing in ("first", "union", "per_query"):
        with pytest.raises(PlanError, match=f"{sharing}' is for evaluation"):
            opened(replace(SMALL, sharing=sharing, method="sts"))  # type: ignore[arg-type]
    for name in ("nonesuch", "oracle", "quest", "tidal", "twilight"):
        with pytest.raises(PlanError, match=f"'{name}'; known are dense, streaming, pillar, sts, specattn, ahead"):
            opened(SMALL, method=name)
    with pytest.raises((OSError, ValueError)) as refusal:
        opened(SMALL, method="sts")
    assert not isinstance(refusal.value, PlanError)
    assert replace(SMALL, method="sts").hash != SMALL.hash == replace(SMALL, method="ahead").hash


async def test_the_client_endpoints_refuse_a_plan_of_another_version(tmp_path: Path) -> None:
    """Where services run already, they are the first to read it."""
    plan = tmp_path / "plan.json"
    plan.write_text('{"version": 1}')
    config = launch_settings(["--target-address", "127.0.0.1:1", "--plan", str(plan)], {})
    directories = {"target": Directory({"target": "127.0.0.1:1"}), "draft": Directory()}
    with pytest.raises(PlanError, match=f"{plan}: version 1, this program reads {PLAN_VERSION}"):
        async with serve_clients(config, read_access(config), [directories], {}):
            pass


def test_the_map_of_the_nearest_budget_counts() -> None:
    other = tuple(reversed(SMALL.head_map))
    plan = replace(SMALL, head_maps=((0.05, SMALL.head_map), (0.2, other)))
    assert replace(plan, budget=0.09).head_map == SMALL.head_map
    assert replace(plan, budget=0.11).head_map == other


# What is announced and what is read


@st.composite
def contexts(draw: st.DrawFn) -> tuple[Plan, int, np.ndarray]:
    """A plan, committed tokens, and softmax mass per block, with ties."""
    plan, base = draw(plans()), draw(st.integers(1, 900))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (plan.draft_layers, plan.draft_heads, plan.num_blocks(base))
    weights = rng.integers(0, 8, shape) / 8 if draw(st.booleans()) else rng.random(shape)
    return plan, base, weights.astype(np.float32)


def sts(plan: Plan, base: int, weights: np.ndarray) -> BlockSelection:
    return announce(BY_DRAFT_HEAD, torch.from_numpy(weights), plan, "top_k", base)


def read_by(plan: Plan, base: int, length: int, selection: BlockSelection) -> np.ndarray:
    """bool [layers, kv_heads, blocks]"""
    reader = Reader(METHODS["sts"], plan)
    reader.read(selection, base, length)
    reader.finish(SequenceOutput())
    assert reader.chosen is not None
    return reader.chosen.numpy()


def lists_of(selection: BlockSelection) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in selection.matrix()]


def draft_heads(plan: Plan) -> list[tuple[int, int]]:
    """The draft heads that sparse layers listen to, in the order of an announcement's rows."""
    return sorted({pair for layer in plan.sparse_layers for pair in plan.head_map[layer]})


@settings(max_examples=60)
@given(contexts())
def test_announced_are_the_heaviest_blocks_within_the_budget(context: tuple[Plan, int, np.ndarray]) -> None:
    """Never a mandatory one; with them no more than the budget; as many as it leaves room for."""
    plan, base, weights = context
    blocks, heads = plan.num_blocks(base), draft_heads(plan)
    selection = sts(plan, base, weights)
    assert (selection.num_heads, selection.num_blocks) == (len(heads), blocks)
    free = [b for b in range(blocks) if plan.sink_blocks <= b < blocks - plan.window_blocks]
    budget = min(blocks, max(1, int(np.ceil(plan.budget * blocks))))
    room = min(len(free), max(0, budget - (blocks - len(free))))
    for (layer, head), chosen in zip(heads, lists_of(selection), strict=True):
        heaviest = sorted(free, key=lambda block: (-weights[layer, head, block], block))[:room]
        assert chosen == sorted(heaviest)


@settings(max_examples=60)
@given(contexts(), st.integers(1, 70))
def test_what_is_read_is_what_was_announced_and_what_must_be(context: tuple[Plan, int, np.ndarray], more: int) -> None:
    """Block by block, for a round that ends `more` tokens after the committed ones."""
    plan, base, weights = context
    selection = sts(plan, base, weights)
    read = read_by(plan, base, base + more, selection)
    announced = dict(zip(draft_heads(plan), [set(row) for row in lists_of(selection)], strict=True))
    blocks, known = plan.num_blocks(base + more), plan.num_blocks(base)
    assert read.shape == (plan.target_layers, plan.target_kv_heads, blocks)
    for layer, row in enumerate(plan.head_map):
        for kv_head, pair in enumerate(row):
            for block in range(blocks):
                mandatory = block < plan.sink_blocks or block >= known - plan.window_blocks
                wanted = layer in plan.dense_layers or mandatory or block in announced[pair]
                assert read[layer, kv_head, block] == wanted


@settings(max_examples=40)
@given(contexts(), st.integers(1, 70))
def test_budget_1_reads_every_block(context: tuple[Plan, int, np.ndarray], more: int) -> None:
    plan, base, weights = context
    plan = replace(plan, budget=1.0)
    read = read_by(plan, base, base + more, sts(plan, base, weights))
    assert read.shape[-1] == plan.num_blocks(base + more)
    assert read.all()


def test_a_plan_without_sparse_layers_announces_nothing() -> None:
    plan = uniform_plan(2, 2, 2, 2, dense_layers=(0, 1))
    for name in ("sts", "specattn", "ahead"):
        announcing = METHODS[name].announcing
        assert announcing is not None
        selection = announce(announcing, torch.rand(2, 2, 30), plan, "top_k", 480)
        assert (selection.num_heads, selection.num_blocks, selection.matrix().sum()) == (0, 30, 0)
        reader = Reader(METHODS[name], plan)
        assert reader.read(selection, 480, 484) is None
        reader.finish(SequenceOutput())
        assert reader.chosen is not None
        assert reader.chosen.all()


# Selections


def test_resizing_keeps_blocks_and_drops_those_beyond() -> None:
    selection = BlockSelection.from_lists([[0, 4], [2, 3]], 5)
    assert lists_of(selection.resized(9)) == [[0, 4], [2, 3]]
    assert lists_of(selection.resized(3)) == [[0], [2]]
    assert lists_of(selection.resized(0)) == [[], []]


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
