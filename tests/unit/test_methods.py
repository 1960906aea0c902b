"""Each sparsity method against a plain reference on small cases."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.batch import SequenceKeys
from sparsity.just_in_time import JustInTime, KeyBounds, LayerView
from torch import Tensor

from engine.kv.pages import PAGE_SIZE
from sparsity import announce, in_advance, just_in_time
from sparsity.announce import LEAST_WINDOW, shared_room, summary_tokens
from sparsity.choice import choose, choose_over_all, mandatory, share
from sparsity.in_advance import RoundView
from sparsity.methods import METHODS, check_method, method_named, methods_of
from sparsity.plan import Plan, PlanError, uniform_plan
from sparsity.reader import Reader
from sparsity.selection import BlockSelection

LAYERS, KV_HEADS, DRAFT_LAYERS, DRAFT_HEADS = 4, 2, 2, 3
BASE, LENGTH = 790, 794  # 50 blocks of 16, the last one partial


def plan_with(**changes: Any) -> Plan:
    plan = uniform_plan(LAYERS, KV_HEADS, DRAFT_LAYERS, DRAFT_HEADS, anchor_layers=(1,), budget=0.25)
    return replace(plan, **changes)


def evidence_of(seed: int, queries: int = 3) -> Tensor:
    scores = torch.randn(
        queries, DRAFT_LAYERS, DRAFT_HEADS, 50, generator=torch.Generator().manual_seed(seed)
    )
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


def test_sharing_by_queries() -> None:
    scores = evidence_of(1)[:, 0]
    plan = plan_with()

    def chosen(how: str) -> Tensor:
        return share(scores, replace(plan, sharing=how), "top_k", BASE)  # type: ignore[arg-type]

    each = chosen("per_query")
    assert each.shape == (3, DRAFT_HEADS, 50)
    assert torch.equal(chosen("union"), each.any(0))
    assert torch.equal(chosen("first"), each[0])
    assert torch.equal(chosen("pooled"), choose(scores.mean(0), plan, "top_k", BASE))
    assert chosen("union").sum() > chosen("first").sum()


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
    (announced,) = announce.announce(announce.BY_DRAFT_HEAD, evidence, plan, "top_k", BASE)
    reader = Reader(METHODS["sts"], plan)
    reader.read([announced], BASE, LENGTH)
    reader.finish(None)
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
    (announced,) = announce.announce(announce.BY_DRAFT_LAYER, evidence, plan, "top_p", BASE)
    assert announced.num_heads == 2
    reader = Reader(METHODS["specattn"], plan)
    reader.read([announced], BASE, LENGTH)
    reader.finish(None)
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
    (announced,) = announce.announce(announce.BY_TARGET_HEAD, evidence_of(seed), plan, "top_k", BASE)
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
    tokens = 16 * (shared_room(plan, BASE, 50) + heads * mandatory_blocks) + heads * summary_tokens(
        plan, BASE
    )
    assert 0 <= tokens - 0.25 * heads * 50 * 16 < 16


def view_of(plan: Plan, announced: Tensor, memory: Tensor | None) -> RoundView:
    return RoundView(plan, "top_k", BASE, 50, announced, memory)


def test_ahead_reads_the_announcement_then_what_weighed_most() -> None:
    plan = plan_with(budget=0.2, group_size=0)
    shape = (LAYERS, KV_HEADS, 50)
    room = shared_room(plan, BASE, 50)
    generator = torch.Generator().manual_seed(3)
    memory = torch.rand(shape, generator=generator)
    announced = torch.rand(shape, generator=generator) < 0.06
    announced[..., :1] = announced[..., 49:] = False
    chosen = in_advance.ahead(view_of(plan, announced, memory))
    always = mandatory(plan, BASE, 50, LEAST_WINDOW)
    assert int(chosen.sum()) == room > int(announced.sum())
    assert not (chosen & always).any(), "what is read anyway takes no room"
    assert (chosen | ~announced).all()
    rest = ~announced & ~always
    assert memory[chosen & rest].min() > memory[~chosen & rest].max()


def test_ahead_without_memory_reads_the_announcement() -> None:
    announced = torch.rand(LAYERS, KV_HEADS, 50) < 0.1
    assert torch.equal(in_advance.ahead(view_of(plan_with(), announced, None)), announced)


def test_streaming_fills_the_budget_with_the_window() -> None:
    plan = plan_with()
    view = RoundView(plan, "top_k", BASE, 50, None, None)
    assert as_sets(in_advance.streaming(view))[0] == {0, *range(38, 50)}


def test_pillar_reads_everything_once_then_what_weighed_most() -> None:
    plan = plan_with()
    reader = Reader(METHODS["pillar"], plan)
    reader.read([], BASE, LENGTH)
    weights = torch.rand(LAYERS, KV_HEADS, 50, generator=torch.Generator().manual_seed(5))
    reader.finish(weights)
    assert reader.chosen is not None
    assert reader.chosen.all()
    reader.read([], BASE, LENGTH)
    reader.finish(weights)
    expected = [best(row, 8, 1, 46) | {0, 46, 47, 48, 49} for row in weights.flatten(0, 1)]
    assert as_sets(reader.chosen) == expected


def test_memory_fades() -> None:
    plan = plan_with(memory_decay=0.5)
    reader = Reader(METHODS["pillar"], plan)
    first, second = torch.rand(LAYERS, KV_HEADS, 50), torch.rand(LAYERS, KV_HEADS, 51)
    for weights, length in ((first, LENGTH), (second, LENGTH + 16)):
        reader.read([], length - 4, length)
        reader.finish(weights)
    assert reader.memory is not None
    longer = torch.nn.functional.pad(first, (0, 1))
    torch.testing.assert_close(reader.memory, torch.maximum(second, 0.5 * longer))


# Just in time.


def layer_view(plan: Plan, seed: int, rule: Any = "top_k", rows: int = 4) -> LayerView:
    """A layer of 50 blocks with two KV heads of dimension 8 and four query heads; pages in order."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randn(50, KV_HEADS, PAGE_SIZE, 8, generator=generator)
    queries = torch.randn(rows, 2 * KV_HEADS, 8, generator=generator)
    keys = SequenceKeys(pages, torch.arange(50), LENGTH)
    return LayerView(2, queries, keys, 0.7, plan, rule, BASE, KeyBounds(), {})


def reference_weights(view: LayerView) -> Tensor:
    """[rows, kv_heads, blocks] by loops in float64"""
    keys = view.keys.read(0, LENGTH).double()
    out = torch.zeros(len(view.queries), KV_HEADS, 50, dtype=torch.float64)
    for row, query in enumerate(view.queries.double()):
        seen = LENGTH - len(view.queries) + row + 1
        for head in range(2 * KV_HEADS):
            probs = (keys[head // 2, :seen] @ query[head] * view.scale).softmax(0)
            for token, p in enumerate(probs):
                out[row, head // 2, token // 16] += p
    return out


def test_the_oracle_knows_the_weights_of_the_round() -> None:
    view = layer_view(plan_with(), 0)
    weights = reference_weights(view)
    torch.testing.assert_close(just_in_time.target_weights(view).double(), weights, atol=1e-5, rtol=1e-4)
    assert as_sets(just_in_time.oracle(view)) == [best(row, 8, 1, 46) for row in weights.mean(0)]


def test_quest_bounds_every_score_from_above() -> None:
    view = layer_view(plan_with(), 1)
    bounds = just_in_time.upper_bounds(view)
    keys = torch.nn.functional.pad(view.keys.read(0, LENGTH), (0, 0, 0, -LENGTH % 16)).unflatten(1, (-1, 16))
    grouped = view.queries.unflatten(1, (KV_HEADS, 2))
    scores = torch.einsum("rhgd,hbtd->rhgbt", grouped, keys)
    assert (bounds[:, :, :49] >= scores.amax((2, 4))[:, :, :49] - 1e-5).all()
    by_hand = torch.maximum(
        grouped[:, :, :, None] * keys.amin(2)[None, :, None],
        grouped[:, :, :, None] * keys.amax(2)[None, :, None],
    ).sum(-1)
    torch.testing.assert_close(bounds[:, :, :49], by_hand.amax(2)[:, :, :49])
    assert as_sets(just_in_time.quest(view)) == [best(row, 8, 1, 46) for row in bounds.amax(0)]


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_bounds_kept_between_rounds_are_those_made_anew(block_size: int) -> None:
    generator = torch.Generator().manual_seed(2)
    pages = torch.randn(60, KV_HEADS, PAGE_SIZE, 8, generator=generator)
    kept = KeyBounds()
    for base in (500, 503, 520, 601):
        keys = SequenceKeys(pages, torch.arange(60), base + 4)
        for mine, fresh in zip(
            kept.up_to(0, keys, block_size, base), KeyBounds().up_to(0, keys, block_size, base), strict=True
        ):
            torch.testing.assert_close(mine, fresh)
        pages[(base - 1) // 16 + 1 :] = torch.randn(pages[(base - 1) // 16 + 1 :].shape, generator=generator)
        pages[(base - 1) // 16, :, (base - 1) % 16 + 1 :] = (
            0.0  # what was not committed may be another token's
        )


def test_twilight_keeps_to_quests_candidates_and_holds_its_mass() -> None:
    view = layer_view(plan_with(mass=0.9), 3, "top_p")
    chosen = just_in_time.twilight(view)
    bounds = just_in_time.upper_bounds(view).amax(0)
    always = mandatory(view.plan, BASE, 50)
    for head, row in enumerate(chosen):
        candidates = best(bounds[head], 12, 0, 50) | set(torch.nonzero(always).flatten().tolist())
        assert as_sets(row[None])[0] <= candidates
        keys = view.keys.read(0, LENGTH)
        assert (just_in_time._four_bits(keys) - keys).abs().max() <= (
            keys.amax(-1) - keys.amin(-1)
        ).max() / 30 + 1e-6
    assert 0 < chosen.sum() < 2 * (12 + 5)


def test_tidal_reuses_what_an_anchor_chose() -> None:
    plan = plan_with()
    selector = JustInTime(plan, "top_k", just_in_time.tidal)
    selector.begin(BASE)
    views = [layer_view(plan, seed) for seed in range(LAYERS)]
    masks = [selector.choose(i, v.queries, v.keys, v.scale) for i, v in enumerate(views)]
    assert masks[0] is None, "before the first anchor"
    assert masks[1] is None, "the anchor"
    anchor = reference_weights(views[1]).mean((0, 1))
    for later in masks[2:]:
        assert later is not None
        assert as_sets(later) == [best(anchor, 8, 1, 46) | {0, 46, 47, 48, 49}] * KV_HEADS


@pytest.mark.parametrize("method", ["oracle", "quest", "twilight"])
def test_each_query_may_have_its_own(method: str) -> None:
    rule = METHODS[method].rule
    view = layer_view(plan_with(sharing="per_query"), 4, rule)
    function = METHODS[method].just_in_time
    assert function is not None
    each = function(view)
    assert each is not None
    assert each.shape == (4, KV_HEADS, 50)
    union = function(replace(view, plan=plan_with(sharing="union"), bounds=KeyBounds()))
    assert union is not None
    assert torch.equal(each.any(0), union)


# The registry and the reader.


def test_every_method_of_the_table_is_there() -> None:
    names = "dense oracle streaming quest tidal twilight pillar sts specattn ahead"
    assert set(METHODS) == set(names.split())
    assert set(methods_of(plan_with())) == set(METHODS)
    assert "tidal" not in methods_of(plan_with(anchor_layers=()))
    with pytest.raises(ValueError, match=r"'nonesuch'.*ahead"):
        method_named("nonesuch")


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("tidal", {"anchor_layers": ()}, "anchor_layers"),
        ("quest", {"rule": "top_p"}, "top_k"),
        ("ahead", {"rule": "top_p"}, "top_k"),
        ("ahead", {"sharing": "union"}, "one selection"),
        ("pillar", {"sharing": "per_query"}, "one selection"),
    ],
)
def test_a_plan_that_a_method_cannot_use_is_refused(
    method: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        check_method(METHODS[method], plan_with(**changes))
    assert method not in methods_of(plan_with(**changes))


@pytest.mark.parametrize("method", ["sts", "specattn", "ahead"])
def test_a_method_that_waits_for_its_draft_reads_everything_without_one(method: str) -> None:
    reader = Reader(METHODS[method], plan_with())
    assert reader.read([], BASE, LENGTH) is None
    reader.finish(None)
    assert reader.tokens_read == (LAYERS * KV_HEADS * 50 * 16, LAYERS * KV_HEADS * 50 * 16)


def test_an_announcement_of_other_rows_is_refused() -> None:
    reader = Reader(METHODS["sts"], plan_with())
    wrong = BlockSelection.from_lists([[1]] * (reader.announced_rows + 1), 50)
    with pytest.raises(ValueError, match="rows announced"):
        reader.read([wrong], BASE, LENGTH)


def test_tokens_read_include_summaries() -> None:
    plan = plan_with(group_size=256)
    reader = Reader(METHODS["ahead"], plan)
    (announced,) = announce.announce(announce.BY_TARGET_HEAD, evidence_of(0), plan, "top_k", BASE)
    read = reader.read([announced], BASE, LENGTH)
    assert read is not None
    assert read.group_means
    assert read.emit
    reader.finish(torch.zeros(LAYERS, KV_HEADS, 50))
    assert reader.chosen is not None
    assert reader.tokens_read[0] == 16 * int(reader.chosen.sum()) + LAYERS * KV_HEADS * 3 * 1.5
