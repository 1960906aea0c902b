"""Each served sparsity method against a plain reference on small cases."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specahead.engine.steps.inputs import SequenceOutput
from specahead.kernels.selection import Remembered, score_blocks, select_over_rows
from specahead.lab.evaluation.choice import Rounds, choose, mandatory
from specahead.sparsity.announce import LEAST_WINDOW, announce_rounds, shared_room, summary_tokens
from specahead.sparsity.plan import Plan, uniform_plan
from specahead.sparsity.reader import Reader
from specahead.sparsity.selection import BlockSelection
from tests.plans import announce

LAYERS, KV_HEADS, DRAFT_LAYERS, DRAFT_HEADS = 4, 2, 2, 3
BASE, LENGTH = 790, 794  # 50 blocks of 16, the last one partial


def plan_with(**changes: Any) -> Plan:
    plan = uniform_plan(LAYERS, KV_HEADS, DRAFT_LAYERS, DRAFT_HEADS, budget=0.25)
    return replace(plan, **changes)


def evidence_of(seed: int) -> Tensor:
    scores = torch.randn(3, DRAFT_LAYERS, DRAFT_HEADS, 50, generator=torch.Generator().manual_seed(seed))
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
    (chosen,) = choose(scores[None], plan, Rounds(BASE - 1, LENGTH - BASE + 1, 1))
    room = 13 - 1 - 4  # a quarter of 50 rounded up, one sink, four of window
    assert as_sets(chosen) == [best(row, room, 1, 46) for row in scores]


def test_mandatory_blocks() -> None:
    always = mandatory(plan_with(), BASE, 50)
    assert torch.nonzero(always).flatten().tolist() == [0, 46, 47, 48, 49]


# What is announced.


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
    announced = announce(evidence_of(seed).mean(0), plan, BASE)
    matrix = announced.matrix()
    found = {(h, b) for h, b in zip(*matrix.nonzero(), strict=True)}
    assert {(int(h), int(b)) for h, b in found} == ahead_reference(evidence_of(seed), plan)
    rows = matrix.sum(1)
    assert rows.max() > rows.min(), "one budget: heads differ"


def test_rounds_are_announced_together_as_one_by_one() -> None:
    """The context grows from less than a word of blocks to more."""
    plan, bases = plan_with(), [BASE, BASE + 16 * 10, BASE + 16 * 40, BASE + 16 * 40]
    generator = torch.Generator().manual_seed(0)
    draft_heads = evidence_of(0).shape[1:-1]
    evidence = [torch.rand(*draft_heads, 128, generator=generator) for _ in bases]
    one_by_one = [announce(evidence[0], plan, bases[0])]
    for weights, base in zip(evidence[1:], bases[1:], strict=True):
        one_by_one.append(announce(weights, plan, base, one_by_one[-1]))
    for one, other in zip(announce_rounds(evidence, plan, bases), one_by_one, strict=True):
        assert one.num_blocks == other.num_blocks
        assert (one.words == other.words).all()


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
    read = Reader(plan).read(selection, BASE, LENGTH)
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


# The registry and the reader.


def test_without_an_announcement_everything_is_read() -> None:
    reader = Reader(plan_with())
    assert reader.read(None, BASE, LENGTH) is None
    reader.finish(SequenceOutput())
    assert reader.tokens_read == (LAYERS * KV_HEADS * 50 * 16, LAYERS * KV_HEADS * 50 * 16)


@pytest.mark.parametrize("reports", [False, True])
def test_tokens_read_include_summaries(reports: bool) -> None:
    plan = plan_with(group_size=256)
    reader = Reader(plan, report_blocks=reports)
    announced = announce(evidence_of(0).mean(0), plan, BASE)
    read = reader.read(announced, BASE, LENGTH)
    assert read.group_means
    assert read.report_blocks == reports
    blocks = torch.rand(LAYERS, KV_HEADS, 50, generator=torch.Generator().manual_seed(0)) < 0.3
    reader.finish(SequenceOutput(blocks_read=int(blocks.sum()), blocks=blocks if reports else None))
    assert reader.tokens_read[0] == 16 * int(blocks.sum()) + LAYERS * KV_HEADS * 3 * 1.5
    assert reader.chosen is (blocks if reports else None)
