"""What evaluation compares with the served methods: rivals that choose just in time, and other kinds of sharing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.lab.evaluation import just_in_time
from specahead.lab.evaluation.just_in_time import JustInTime, KeyBounds, LayerView, SequenceKeys
from specahead.lab.evaluation.methods import compared_method
from specahead.lab.evaluation.readers import EachQuery, make_reader
from specahead.lab.evaluation.sharing import announce_shared, share
from specahead.sparsity.announce import BY_DRAFT_HEAD, BY_TARGET_HEAD, Announcing, announce
from specahead.sparsity.choice import choose, mandatory
from specahead.sparsity.methods import METHODS
from specahead.sparsity.plan import Plan, PlanError
from tests.unit.test_methods import BASE, DRAFT_HEADS, KV_HEADS, LAYERS, LENGTH, as_sets, best, evidence_of, plan_with

# Sharing.


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


@pytest.mark.parametrize("announcing", [BY_DRAFT_HEAD, BY_TARGET_HEAD])
def test_queries_share_an_announcement(announcing: Announcing) -> None:
    evidence, plan = evidence_of(1), plan_with()

    def alone(weights: Tensor) -> np.ndarray:
        return announce(announcing, weights, plan, "top_k", BASE).matrix()

    def shared(how: str) -> list[np.ndarray]:
        sharing = replace(plan, sharing=how)  # type: ignore[arg-type]
        return [s.matrix() for s in announce_shared(announcing, evidence, sharing, "top_k", BASE)]

    each = [alone(weights) for weights in evidence]
    wanted = {
        "per_query": each,
        "union": [np.logical_or.reduce(each)],
        "first": each[:1],
        "pooled": [alone(evidence.mean(0))],
    }
    for how, matrices in wanted.items():
        got = shared(how)
        assert len(got) == len(matrices)
        assert all(np.array_equal(one, other) for one, other in zip(got, matrices, strict=True)), how
    assert wanted["union"][0].sum() > wanted["first"][0].sum()


def test_each_query_reads_what_it_announced_and_what_must_be() -> None:
    plan = plan_with(dense_layers=(1,), sharing="per_query")
    announced = announce_shared(BY_DRAFT_HEAD, evidence_of(2, queries=4), plan, "top_k", BASE)
    selector = EachQuery(METHODS["sts"], plan)
    selector.begin(announced, BASE, LENGTH)
    view = layer_view(plan, 0)
    for layer in range(LAYERS):
        masks = selector.choose(layer, view.queries, view.keys, view.scale)
        if layer == 1:
            assert masks is None
            continue
        assert masks is not None
        for query, selection in enumerate(announced):
            rows = BY_DRAFT_HEAD.expand(plan)[plan.sparse_layers.index(layer)]
            wanted = torch.from_numpy(selection.matrix())[rows] | mandatory(plan, BASE, 50)
            assert torch.equal(masks[query], wanted)


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
        grouped[:, :, :, None] * keys.amin(2)[None, :, None], grouped[:, :, :, None] * keys.amax(2)[None, :, None]
    ).sum(-1)
    torch.testing.assert_close(bounds[:, :, :49], by_hand.amax(2)[:, :, :49])
    assert as_sets(just_in_time.quest(view)) == [best(row, 8, 1, 46) for row in bounds.amax(0)]


def test_twilight_keeps_to_quests_candidates_and_holds_its_mass() -> None:
    view = layer_view(plan_with(mass=0.9), 3, "top_p")
    chosen = just_in_time.twilight(view)
    bounds = just_in_time.upper_bounds(view).amax(0)
    always = mandatory(view.plan, BASE, 50)
    for head, row in enumerate(chosen):
        candidates = best(bounds[head], 12, 0, 50) | set(torch.nonzero(always).flatten().tolist())
        assert as_sets(row[None])[0] <= candidates
        keys = view.keys.read(0, LENGTH)
        assert (just_in_time._four_bits(keys) - keys).abs().max() <= (keys.amax(-1) - keys.amin(-1)).max() / 30 + 1e-6
    assert 0 < chosen.sum() < 2 * (12 + 5)


def test_tidal_reuses_what_an_anchor_chose() -> None:
    plan = plan_with()
    selector = JustInTime(plan, "top_k", just_in_time.tidal)
    selector.begin([], BASE, LENGTH)
    views = [layer_view(plan, seed) for seed in range(LAYERS)]
    masks = [selector.choose(i, v.queries, v.keys, v.scale) for i, v in enumerate(views)]
    assert masks[0] is None, "before the first anchor"
    assert masks[1] is None, "the anchor"
    anchor = reference_weights(views[1]).mean((0, 1))
    for later in masks[2:]:
        assert later is not None
        assert as_sets(later) == [best(anchor, 8, 1, 46) | {0, 46, 47, 48, 49}] * KV_HEADS


# The registry.


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("tidal", {"anchor_layers": ()}, "anchor_layers"),
        ("quest", {"rule": "top_p"}, "top_k"),
        ("ahead", {"rule": "top_p"}, "top_k"),
        ("ahead", {"sharing": "union"}, "one selection"),
        ("pillar", {"sharing": "per_query"}, "one selection"),
        ("streaming", {"sharing": "per_query"}, "one selection"),
    ],
)
def test_a_plan_that_a_compared_method_cannot_use_is_refused(
    method: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        make_reader(compared_method(method), plan_with(**changes))
