"""The plan file, and the announcements that it steers."""

import json
import shutil
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
from specahead.lab.evaluation.plans import save_plan
from specahead.models import DRAFT, PLAN
from specahead.sparsity.announce import LEAST_WINDOW, announced_limits
from specahead.sparsity.plan import HUB_NAME, PLAN_VERSION, Plan, PlanError, load_plan, uniform_plan
from specahead.sparsity.served_plan import load_served_plan
from target_service.pacing import policy_of
from target_service.policy.acceptance import OF_DRAFT
from target_service.target import Target
from tests.launch_settings import launch_settings
from tests.plans import announce
from tests.settings import target_settings

SMALL = uniform_plan(4, 2, 2, 3, budget=0.25, provenance={"texts": 3})


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any blends, any layers dense."""
    layers, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    draft_layers, draft_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    part = st.tuples(
        st.integers(0, draft_layers - 1), st.integers(0, draft_heads - 1), st.sampled_from([0.25, 0.5, 1.0])
    )
    return uniform_plan(
        layers,
        kv_heads,
        draft_layers,
        draft_heads,
        blends=draw(st.tuples(*[st.lists(part, max_size=3).map(tuple)] * (layers * kv_heads))),
        block_size=draw(st.sampled_from([1, 16, 32, 64])),
        budget=draw(st.sampled_from([0.01, 0.1, 0.5, 0.77, 1.0])),
        group_size=draw(st.sampled_from([0, 64, 512])),
        sink_blocks=draw(st.integers(0, 3)),
        window_blocks=draw(st.integers(1, 4)),
        dense_layers=tuple(draw(st.sets(st.integers(0, layers - 1)))),
    )


# The file


@settings(max_examples=30)
@given(plan=plans())
def test_a_plan_comes_back_as_it_was_saved(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save_plan(replace(plan, provenance={"note": 0.5}), path)
    loaded = load_plan(path)
    assert loaded == plan
    assert loaded.hash == plan.hash
    assert loaded.provenance == {"note": 0.5}


CHANGES: dict[str, Any] = {
    "draft_layers": 3,
    "draft_heads": 4,
    "blends": (((0, 0, 0.5),),) * 8,
    "head_importance": ((1.0, 2.0),) * 4,
    "group_size": 64,
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
    runner: Any = SimpleNamespace(weight_tokens=1.0, read_share=lambda rows: 1.0, alternatives_beside=lambda gamma: 0)
    policy = policy_of(Target(runner, plan, target_settings(draft=str(DRAFT))))
    assert policy.gains.acceptance.chances[0] == (OF_DRAFT if acceptance is None else acceptance)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 3}, "version 3, this program reads 5; calibrate again"),
        ({"version": 6}, "version 6"),
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
        ({"blends": [[[0, 3, 1.0]]] * 8}, r"draft head \(0, 3\)"),
        ({"blends": [[[2, 0, 1.0]]] * 8}, r"draft head \(2, 0\)"),
        ({"blends": [[[0, 0]]] * 8}, "plan.json"),
        ({"blends": None}, "plan.json"),
        ({"blends": []}, "blends"),
        ({"group_size": 40}, "group_size"),
        ({"variance_limit": -0.1}, "variance_limit"),
        ({"memory_decay": 1.0}, "memory_decay"),
        ({"dense_layers": [4]}, "dense layers"),
        ({"colour": "blue"}, "expected the keys"),
    ],
)
def test_what_no_plan_can_say_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        load_plan(saved(tmp_path, **changes))


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe", b'{"hash": 1, "blends": []}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        load_plan(path)


def test_another_budget(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    save_plan(SMALL, file)
    assert load_served_plan(file, 0.0) == SMALL
    assert load_served_plan(file, 1.0) == replace(SMALL, budget=1.0)
    with pytest.raises(PlanError, match="budget"):
        load_served_plan(file, 1.5)


def test_both_sides_of_a_pair_without_a_plan_come_to_the_same_one(tmp_path: Path) -> None:
    """By the models' configs alone: layers in proportion, KV heads by their place, all equally important."""
    for name, layers, heads, kv_heads in (("target", 6, 4, 2), ("draft", 3, 6, 2)):
        how = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        LlamaConfig(hidden_size=48, vocab_size=97, head_dim=8, **how).save_pretrained(tmp_path / name)
    config = launch_settings(["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")], {})
    plan, same = (load_served_plan(side.plan_file, side.budget, *side.pair) for side in (config.target, config.draft))
    assert plan == same and plan.hash == same.hash and not plan.is_calibrated and load_plan(PLAN).is_calibrated
    assert (plan.draft_layers, plan.draft_heads, plan.dense_layers) == (3, 6, ())
    assert [blend[0][0] for blend in plan.blends] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert all(plan.reads_wholly(tokens) for tokens in (1, 1024, 10**6))  # until a budget is stated
    assert not load_plan(PLAN).reads_wholly(1025) and load_plan(PLAN).reads_wholly(1024)
    stated = load_served_plan("", 0.25, *config.target.pair)
    assert (stated.budget, stated.reads_wholly(1024), stated.reads_wholly(1025)) == (0.25, True, False)
    third = pytest.approx(1 / 3)
    assert plan.blends[2:4] == (
        ((0, 0, third), (0, 1, third), (0, 2, third)),
        ((0, 3, third), (0, 4, third), (0, 5, third)),
    )
    assert {value for row in plan.head_importance for value in row} == {1.0}


@given(st.integers(1, 40), st.integers(1, 16), st.integers(1, 40), st.integers(1, 32))
def test_any_two_models_have_a_plan(layers: int, kv_heads: int, draft_layers: int, draft_heads: int) -> None:
    """Plan itself checks that it names heads that there are. None is left out that there are enough KV heads for."""
    plan = uniform_plan(layers, kv_heads, draft_layers, draft_heads)
    layers_heard = [blend[0][0] for blend in plan.blends]
    assert layers_heard == sorted(layers_heard)
    heard = {pair for blend in plan.blends for pair in ((i, j) for i, j, _ in blend)}
    assert heard == {(layer, head) for layer in set(layers_heard) for head in _heard(kv_heads, draft_heads)}
    assert all(sum(weight for *_, weight in blend) == pytest.approx(1) for blend in plan.blends)


def _heard(kv_heads: int, draft_heads: int) -> set[int]:
    return (
        set(range(draft_heads)) if draft_heads >= kv_heads else {i * draft_heads // kv_heads for i in range(kv_heads)}
    )


async def test_the_client_endpoints_refuse_a_plan_of_another_version(tmp_path: Path) -> None:
    """Where services run already, they are the first to read it."""
    plan = tmp_path / "plan.json"
    plan.write_text('{"version": 1}')
    config = launch_settings(["--target-address", "127.0.0.1:1", "--plan", str(plan)], {})
    directories = {"target": Directory({"target": "127.0.0.1:1"}), "draft": Directory()}
    with pytest.raises(PlanError, match=f"{plan}: version 1, this program reads {PLAN_VERSION}"):
        async with serve_clients(config, read_access(config), directories, {}):
            pass


@pytest.mark.parametrize(("known", "limit"), [(None, 0.1), (0.01, 0.1), (0.05, 0.2), (0.6, 1.0), ("much", 0.1)])
def test_the_limit_of_divergence_follows_from_what_calibration_has_found(known: Any, limit: float) -> None:
    plan = replace(load_plan(PLAN), provenance={} if known is None else {"divergence": known})
    assert plan.max_divergence == pytest.approx(limit)


# What is announced


@settings(max_examples=60)
@given(plans(), st.integers(1, 900), st.integers(0, 2**32 - 1), st.booleans())
def test_announced_are_the_heaviest_blocks_within_the_budget(plan: Plan, base: int, seed: int, ties: bool) -> None:
    """Over all rows; never a mandatory block; as many as there is room for, unless the others weigh nothing."""
    rng = np.random.default_rng(seed)
    shape = (plan.draft_layers, plan.draft_heads, plan.num_blocks(base))
    weights = (rng.integers(0, 8, shape) / 8 if ties else rng.random(shape)).astype(np.float32)
    selection = announce(torch.from_numpy(weights), plan, base)
    first, end, count = announced_limits(plan, base)
    kv_heads, blocks = plan.target_kv_heads, plan.num_blocks(base)
    assert (selection.num_heads, selection.num_blocks) == (len(plan.sparse_layers) * kv_heads, blocks)
    assert first == min(plan.sink_blocks, blocks) and end == max(first, blocks - LEAST_WINDOW)
    scores = np.zeros((selection.num_heads, blocks))
    for row, (layer, head) in enumerate((i, j) for i in plan.sparse_layers for j in range(kv_heads)):
        for i, j, weight in plan.blends[layer * kv_heads + head]:
            scores[row] += weight * weights[i, j]
    chosen = selection.matrix()
    free = np.zeros_like(chosen)
    free[:, first:end] = scores[:, first:end] > 0
    assert not (chosen & ~free).any()
    assert chosen.sum() == min(max(0, count), free.sum())
    if chosen.any() and (free & ~chosen).any():
        assert scores[chosen].min() >= scores[free & ~chosen].max() - 1e-6


# Selections


def test_a_plan_lies_in_a_folder_or_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one name in both; a repository is asked only for what is no path here."""
    asked = []

    def cached(name: str, file: str) -> str:
        asked.append((name, file))
        if name != "org/pair.v2":
            raise OSError(f"{name} is not a local folder\nand not a valid identifier")
        return str(tmp_path / file)

    monkeypatch.setattr("transformers.utils.cached_file", cached)
    shutil.copy(PLAN, tmp_path / HUB_NAME)
    assert load_plan(tmp_path) == load_plan(PLAN) == load_plan("org/pair.v2") and asked == [("org/pair.v2", HUB_NAME)]
    with pytest.raises(PlanError, match=r"org/none: no such file, and no specahead-plan.json from .*: org/none is not"):
        load_plan("org/none")
    for name in (tmp_path / "sub" / "plan.json", "here/plan.json", "plan", "../a/b"):
        with pytest.raises(PlanError, match=f"{name}: not a readable plan: No such file"):
            load_plan(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PlanError, match=f"empty/{HUB_NAME}: not a readable plan"):
        load_plan(tmp_path / "empty")
    assert len(asked) == 2
