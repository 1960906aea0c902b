"""Each served sparsity method against a plain reference on small cases."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specahead.engine.steps.inputs import SequenceOutput
from specahead.kernels.selection import Remembered, score_blocks, select_over_rows
from specahead.lab.evaluation.choice import choose_over_all
from specahead.sparsity import announce, in_advance
from specahead.sparsity.announce import LEAST_WINDOW, shared_room, summary_tokens
from specahead.sparsity.choice import choose, mandatory
from specahead.sparsity.in_advance import RoundView
from specahead.sparsity.methods import METHODS, check_method, check_served, method_named, methods_of
from specahead.sparsity.plan import Plan, PlanError, uniform_plan
from specahead.sparsity.reader import Reader
from specahead.sparsity.selection import BlockSelection

LAYERS, KV_HEADS, DRAFT_LAYERS, DRAFT_HEADS = 4, 2, 2, 3
BASE, LENGTH = 790, 794  # 50 blocks of 16, the last one partial


def plan_with(**changes: Any) -> Plan:
    plan = uniform_plan(LAYERS, KV_HEADS, DRAFT_LAYERS, DRAFT_HEADS, anchor_layers=(1,), budget=0.25)
    return replace(plan, **changes)


def evidence_of(seed: int, queries: int = 3) -> Tensor:
    scores = torch.randn(queries, DRAFT_LAYERS, DRAFT_HEADS, 50, generator=torch.Generator().manual_seed(seed))
    return (2 * scores).softmax(-1)


def best(scores: Tensor, k: int, first: int, last: int) -> set[int]:
    """The k highest blocks of [blocks] in [first, last)"""
    return set(sorted(range(first, last), key=lambda b: -float(scores[b]))[:k])


def as_sets(chosen: Tensor) -> list[set[int]]:
    return [set(torch.nonzero(row).flatten().tolist()) for row in chosen.flatten(0, -2)]


# Choices.


@pytest.mark.parametrize("seed", range(6))
def test_top_k_leaves_room_for_what_is_read_anyway(seed: int) -> None:
    plan = plan_with()
    scores = evidence_of(seed)[0].flatten(0, 1)
    chosen = choose(scores, plan, "top_k", BASE)
    room = 13 - 1 - 4  # a quarter of 50 rounded up, one sink, four of window
    assert as_sets(chosen) == [best(row, room, 1, 46) for row in scores]


def test_a_small_budget_chooses_nothing_but_what_must_be() -> None:
    assert not choose(evidence_of(0)[0, 0], plan_with(budget=0.05), "top_k", BASE).any()


@pytest.mark.parametrize("row", ["peaked", "flat", "tied", "single"])
@pytest.mark.parametrize("mass", [0.5, 0.9, 1.0])
def test_a_nucleus_holds_its_mass(row: str, mass: float) -> None:
    rows = {
        "peaked": torch.tensor([0.97, 0.01, 0.01, 0.01]),
        "flat": torch.full((50,), 0.02),
        "tied": torch.tensor([0.3, 0.3, 0.3, 0.1]),
        "single": torch.tensor([1.0]),
    }
    weights = rows[row]
    chosen = choose(weights[None], plan_with(mass=mass), "top_p", BASE)[0]
    assert weights[chosen].sum() >= mass * weights.sum() - 1e-9
    if row == "peaked" and mass < 0.97:
        assert chosen.tolist() == [True, False, False, False]


def test_one_budget_for_all_takes_the_highest_of_all_rows() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.8], [0.2, 0.0, 0.7]])
    assert choose_over_all(scores, 3).tolist() == [[True, False, True], [False, False, True]]
    assert choose_over_all(scores, 100).sum() == 5  # what has no score is not read
    assert not choose_over_all(scores, -3).any()


def test_calibrated_shares_move_the_budget_between_heads() -> None:
    scores = evidence_of(2)[0, 0]
    shares = torch.tensor([0.5, 1.0, 1.5])
    counts = choose(scores, plan_with(), "top_k", BASE, shares).sum(1).tolist()
    assert counts == [round(s * 0.25 * 50) - 5 for s in (0.5, 1.0, 1.5)]


def test_mandatory_blocks() -> None:
    always = mandatory(plan_with(), BASE, 50)
    assert torch.nonzero(always).flatten().tolist() == [0, 46, 47, 48, 49]


# Announcing methods.


@pytest.mark.parametrize("seed", range(4))
def test_sts_reads_what_its_draft_heads_weigh_most(seed: int) -> None:
    plan, evidence = plan_with(dense_layers=(0,)), evidence_of(seed)
    announced = announce.announce(announce.BY_DRAFT_HEAD, evidence.mean(0), plan, "top_k", BASE)
    reader = Reader(METHODS["sts"], plan)
    reader.read(announced, BASE, LENGTH)
    reader.finish(SequenceOutput())
    assert reader.chosen is not None
    for layer in range(1, LAYERS):
        for head in range(KV_HEADS):
            weights = evidence.mean(0)[plan.head_map[layer][head]]
            expected = best(weights, 8, 1, 46) | {0, 46, 47, 48, 49}
            assert as_sets(reader.chosen[layer, head][None]) == [expected]
    assert reader.chosen[0].all()


@pytest.mark.parametrize("seed", range(4))
def test_specattn_reads_the_nucleus_of_its_draft_layer(seed: int) -> None:
    plan, evidence = plan_with(mass=0.8), evidence_of(seed)
    announced = announce.announce(announce.BY_DRAFT_LAYER, evidence.mean(0), plan, "top_p", BASE)
    assert announced.num_heads == 2
    reader = Reader(METHODS["specattn"], plan)
    reader.read(announced, BASE, LENGTH)
    reader.finish(SequenceOutput())
    assert reader.chosen is not None
    for layer in range(LAYERS):
        weights = evidence.mean((0, 2))[plan.layer_map[layer]]
        read = reader.chosen[layer, 0]
        assert weights[read].sum() >= 0.8 - 1e-6
        lightest = weights[read & ~mandatory(plan, BASE, 50)].min()
        assert (weights[~read] < lightest).all()
        assert torch.equal(read, reader.chosen[layer, 1])


def ahead_reference(evidence: Tensor, plan: Plan) -> set[tuple[int, int]]:
    """(target head, block) pairs that `ahead` announces."""
    scored = []
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            row = sum(w * evidence.mean(0)[i, j] for i, j, w in plan.blends[layer * KV_HEADS + head])
            importance = plan.head_importance[layer][head]
            scored += [(importance * float(row[b]), layer * KV_HEADS + head, b) for b in range(1, 49)]
    room = int(plan.announced_share * shared_room(plan, BASE, 50))
    return {(head, block) for _, head, block in sorted(scored, reverse=True)[:room]}


@pytest.mark.parametrize("seed", range(4))
def test_ahead_announces_the_best_of_all_heads(seed: int) -> None:
    importance = tuple((1.0, 0.2 + layer) for layer in range(LAYERS))
    blends = tuple(((0, 0, 0.5), (1, i % 3, 1.0)) for i in range(LAYERS * KV_HEADS))
    plan = plan_with(head_importance=importance, blends=blends)
    announced = announce.announce(announce.BY_TARGET_HEAD, evidence_of(seed).mean(0), plan, "top_k", BASE)
    matrix = announced.matrix()
    found = {(h, b) for h, b in zip(*matrix.nonzero(), strict=True)}
    assert {(int(h), int(b)) for h, b in found} == ahead_reference(evidence_of(seed), plan)
    rows = matrix.sum(1)
    assert rows.max() > rows.min(), "one budget: heads differ"


def test_the_shared_room_counts_everything_that_is_read() -> None:
    """Chosen blocks, mandatory ones and summaries add up to the budget."""
    plan = plan_with(group_size=64)
    heads = LAYERS * KV_HEADS
    mandatory_blocks = int(mandatory(plan, BASE, 50, LEAST_WINDOW).sum())
    tokens = 16 * (shared_room(plan, BASE, 50) + heads * mandatory_blocks) + heads * summary_tokens(plan, BASE)
    assert 0 <= tokens - 0.25 * heads * 50 * 16 < 16


def read_of_ahead(plan: Plan, announced: Tensor, memory: Tensor) -> Tensor:
    """What a pass reads by what `ahead` asks of it, bool [layers, kv_heads, 50], with weights that it remembers.

    announced: bool and memory: float32, of the same shape.
    """
    selection = BlockSelection.from_matrix(announced.flatten(0, 1).numpy())
    read = Reader(METHODS["ahead"], plan).read(selection, BASE, LENGTH)
    assert read is not None
    assert read.budget is not None
    assert read.emit_weights
    budget = read.budget
    bitmap = torch.from_numpy(budget.bitmap.view("int64").copy())[None]
    numbers = (budget.first, budget.last, 50, budget.room, 0)
    first, last, blocks, room, place = (torch.tensor([n], dtype=torch.int32) for n in numbers)
    remembered = Remembered(memory.flatten(0, 1)[None], place)
    forced, scores, left = score_blocks(remembered, budget.memory.importance, bitmap, (first, last, blocks), room)
    lists, counts = select_over_rows(scores, left, forced, "torch", KV_HEADS)
    chosen = torch.zeros(LAYERS, KV_HEADS, 50, dtype=torch.bool)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            chosen[layer, head, lists[layer, 0, head, : counts[layer, 0, head]].long()] = True
    return chosen


def test_ahead_reads_the_announcement_then_what_weighed_most() -> None:
    plan = plan_with(budget=0.2, group_size=0)
    shape = (LAYERS, KV_HEADS, 50)
    room = shared_room(plan, BASE, 50)
    generator = torch.Generator().manual_seed(3)
    memory = torch.rand(shape, generator=generator)
    announced = torch.rand(shape, generator=generator) < 0.06
    announced[..., :1] = announced[..., 49:] = False
    read = read_of_ahead(plan, announced, memory)
    always = mandatory(plan, BASE, 50, LEAST_WINDOW)
    assert read[..., always].all()
    chosen = read & ~always
    assert int(chosen.sum()) == room > int(announced.sum()), "what is read anyway takes no room"
    assert (chosen | ~announced).all()
    rest = ~announced & ~always
    assert memory[chosen & rest].min() > memory[~chosen & rest].max()


def test_ahead_without_memory_reads_the_announcement() -> None:
    plan = plan_with()
    announced = torch.rand(LAYERS, KV_HEADS, 50) < 0.1
    read = read_of_ahead(plan, announced, torch.zeros(LAYERS, KV_HEADS, 50))
    assert torch.equal(read, announced | mandatory(plan, BASE, 50, LEAST_WINDOW))


def test_streaming_fills_the_budget_with_the_window() -> None:
    plan = plan_with()
    view = RoundView(plan, "top_k", BASE, 50, None, None)
    assert as_sets(in_advance.streaming(view))[0] == {0, *range(38, 50)}


def test_pillar_reads_everything_once_then_what_weighed_most() -> None:
    plan = plan_with()
    reader = Reader(METHODS["pillar"], plan)
    reader.read(None, BASE, LENGTH)
    weights = torch.rand(LAYERS, KV_HEADS, 50, generator=torch.Generator().manual_seed(5))
    reader.finish(SequenceOutput(read_weights=weights))
    assert reader.chosen is not None
    assert reader.chosen.all()
    reader.read(None, BASE, LENGTH)
    reader.finish(SequenceOutput(read_weights=weights))
    expected = [best(row, 8, 1, 46) | {0, 46, 47, 48, 49} for row in weights.flatten(0, 1)]
    assert as_sets(reader.chosen) == expected


def test_memory_fades() -> None:
    plan = plan_with(memory_decay=0.5)
    reader = Reader(METHODS["pillar"], plan)
    first, second = torch.rand(LAYERS, KV_HEADS, 50), torch.rand(LAYERS, KV_HEADS, 51)
    for weights, length in ((first, LENGTH), (second, LENGTH + 16)):
        reader.read(None, length - 4, length)
        reader.finish(SequenceOutput(read_weights=weights))
    assert reader._memory is not None
    longer = torch.nn.functional.pad(first, (0, 1))
    torch.testing.assert_close(reader._memory, torch.maximum(second, 0.5 * longer))


# The registry and the reader.


def test_every_method_of_the_table_is_there() -> None:
    assert set(METHODS) == {"dense", "streaming", "pillar", "sts", "specattn", "ahead"}
    assert set(methods_of(plan_with())) == set(METHODS)


@pytest.mark.parametrize("name", ["nonesuch", "oracle", "quest", "tidal", "twilight"])
def test_a_name_that_is_not_served_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(PlanError, match=f"'{name}'; known are dense, streaming, pillar, sts, specattn, ahead"):
        method_named(name)


@pytest.mark.parametrize("method", ["ahead", "streaming"])
def test_a_plan_that_a_method_cannot_use_is_refused(method: str) -> None:
    plan = plan_with(rule="top_p")
    with pytest.raises(PlanError, match="top_k"):
        check_method(METHODS[method], plan)
    assert method not in methods_of(plan)


@pytest.mark.parametrize("sharing", ["first", "union", "per_query"])
def test_sharing_other_than_pooled_is_not_served(sharing: str) -> None:
    check_served(plan_with(method="sts"))
    with pytest.raises(PlanError, match=f"{sharing}' is for evaluation"):
        check_served(plan_with(method="sts", sharing=sharing))


@pytest.mark.parametrize("method", ["sts", "specattn", "ahead"])
def test_a_method_that_waits_for_its_draft_reads_everything_without_one(method: str) -> None:
    reader = Reader(METHODS[method], plan_with())
    assert reader.read(None, BASE, LENGTH) is None
    reader.finish(SequenceOutput())
    assert reader.tokens_read == (LAYERS * KV_HEADS * 50 * 16, LAYERS * KV_HEADS * 50 * 16)


def test_an_announcement_of_other_rows_is_refused() -> None:
    reader = Reader(METHODS["sts"], plan_with())
    wrong = BlockSelection.from_lists([[1]] * (reader.announced_rows + 1), 50)
    with pytest.raises(ValueError, match="rows announced"):
        reader.read(wrong, BASE, LENGTH)


@pytest.mark.parametrize("reports", [False, True])
def test_tokens_read_include_summaries(reports: bool) -> None:
    plan = plan_with(group_size=256)
    reader = Reader(METHODS["ahead"], plan, report_blocks=reports)
    announced = announce.announce(announce.BY_TARGET_HEAD, evidence_of(0).mean(0), plan, "top_k", BASE)
    read = reader.read(announced, BASE, LENGTH)
    assert read is not None
    assert read.group_means
    assert read.emit_weights
    assert read.report_blocks == reports
    blocks = torch.rand(LAYERS, KV_HEADS, 50, generator=torch.Generator().manual_seed(0)) < 0.3
    reader.finish(SequenceOutput(blocks_read=int(blocks.sum()), blocks=blocks if reports else None))
    assert reader.tokens_read[0] == 16 * int(blocks.sum()) + LAYERS * KV_HEADS * 3 * 1.5
    assert reader.chosen is (blocks if reports else None)
