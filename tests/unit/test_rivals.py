"""The rivals that evaluation compares with `ahead`: each against a plain reference, on sequences of random lengths."""

from dataclasses import asdict, replace
from itertools import combinations_with_replacement

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.lab.evaluation import draft_guided, just_in_time
from specahead.lab.evaluation.choice import Rounds, budget_blocks, choose_nucleus, mandatory
from specahead.lab.evaluation.just_in_time import JustInTime, KeyBounds, LayerView, SequenceKeys
from specahead.lab.evaluation.methods import RIVALS
from specahead.lab.evaluation.most_alike import (
    BUDGETS,
    PROVENANCE,
    DraftMaps,
    layer_similarity,
    maps_of,
    monotone_map,
    to_maps,
    top_k_overlap,
)
from specahead.lab.evaluation.run import variants_of
from specahead.sparsity.plan import Plan, PlanError
from tests.unit.test_methods import DRAFT_HEADS, DRAFT_LAYERS, KV_HEADS, LAYERS, as_sets, best, plan_with

MAPS = DraftMaps({"0.05": [[[1, 2], [0, 0]]] * LAYERS, "0.4": [[[0, 1], [1, 1]]] * LAYERS}, [0, 0, 1, 1])
EXAMPLES = settings(max_examples=30, deadline=None, derandomize=True)


def layer_view(plan: Plan, base: int, rows: int, layer: int = 2, seed: int = 0) -> LayerView:
    """A layer at the moment of its choice, with keys of dimension 8 on shuffled pages and two query heads for each KV
    head."""
    generator = torch.Generator().manual_seed(seed)
    length = base - 1 + rows
    pages = -(-length // PAGE_SIZE)
    keys = SequenceKeys(
        torch.randn(pages + 3, KV_HEADS, PAGE_SIZE, 8, generator=generator),
        torch.randperm(pages + 3, generator=generator)[:pages],
        length,
    )
    queries = torch.randn(rows, 2 * KV_HEADS, 8, generator=generator)
    evidence = torch.rand(1, DRAFT_LAYERS, DRAFT_HEADS, plan.num_blocks(length) + 2, generator=generator)
    return LayerView(layer, queries, keys, 0.7, plan, Rounds(base - 1, rows, 1), evidence, KeyBounds(), [])


@st.composite
def views(draw: st.DrawFn) -> LayerView:
    """Layers of any length, with budgets from nothing to everything."""
    budget = draw(st.sampled_from([1e-6, 0.1, 0.35, 1.0]))
    size = draw(st.sampled_from([4, 16, 32]))
    plan = plan_with(budget=budget, block_size=size, window_blocks=2, provenance={PROVENANCE: asdict(MAPS)})
    seed = draw(st.integers(0, 1000))
    return layer_view(plan, draw(st.integers(1, 400)), draw(st.integers(1, 5)), draw(st.integers(0, 3)), seed)


def base_of(view: LayerView) -> int:
    """The committed tokens that a view's only round builds on."""
    (base,) = view.rounds.bases
    return base


def weights_by(view: LayerView, keys: Tensor, among: list[set[int]] | None = None) -> Tensor:
    """Weights on blocks, query by query in float64: [rows, kv_heads, blocks]. among: the blocks of each KV head that
    are seen; None: all."""
    size, length = view.plan.block_size, view.keys.length
    block = torch.arange(length) // size
    out = torch.zeros(len(view.queries), KV_HEADS, view.blocks, dtype=torch.float64)
    for row, query in enumerate(view.queries.double()):
        for head in range(2 * KV_HEADS):
            of = head // 2
            seen = torch.arange(length) <= length - len(view.queries) + row
            if among is not None:
                seen &= torch.isin(block, torch.tensor(sorted(among[of])))
            scores = (keys[of].double() @ query[head] * view.scale).where(seen, -torch.inf)
            out[row, of].index_add_(0, block, scores.softmax(0))
    return out


def all_keys(view: LayerView) -> Tensor:
    return view.keys.read(0, view.keys.length)


def heaviest(view: LayerView, weights: Tensor) -> set[int]:
    """The heaviest blocks of one row that fit the budget beside mandatory blocks."""
    always = int(mandatory(view.plan, base_of(view), view.blocks).sum())
    first, last = view.plan.middle(view.plan.num_blocks(base_of(view)))
    return best(weights, max(0, budget_blocks(view.plan, view.blocks) - always), first, last)


def nucleus(weights: Tensor, mass: float = 0.95) -> set[int]:
    """The heaviest blocks, one by one, until they hold the mass."""
    inside: set[int] = set()
    while float(weights[sorted(inside)].sum()) < mass * float(weights.sum()):
        inside |= best(weights, len(inside) + 1, 0, len(weights))
    return inside


@EXAMPLES
@given(views())
def test_the_oracle_reads_what_the_round_weighs_most(view: LayerView) -> None:
    weights = weights_by(view, all_keys(view))
    torch.testing.assert_close(just_in_time.target_weights(view)[0].double(), weights, atol=1e-5, rtol=1e-4)
    assert as_sets(just_in_time.oracle(view)) == [heaviest(view, row) for row in weights.mean(0)]


@EXAMPLES
@given(views())
def test_sts_reads_the_best_blocks_of_one_draft_head_each(view: LayerView) -> None:
    pairs = [(1, 2), (0, 0)] if view.plan.budget <= 0.1 else [(0, 1), (1, 1)]
    wanted = [heaviest(view, view.evidence[0, i, j, : view.blocks]) for i, j in pairs]
    assert as_sets(draft_guided.sts(view)) == wanted


@EXAMPLES
@given(views())
def test_specattn_reads_the_nucleus_of_a_draft_layer_within_the_budget(view: LayerView) -> None:
    weights = view.evidence[0, view.layer // 2, :, : view.blocks].mean(0)
    assert as_sets(draft_guided.specattn(view)) == [heaviest(view, weights) & nucleus(weights)] * KV_HEADS


@EXAMPLES
@given(views())
def test_twilight_reads_the_nucleus_of_what_quest_selects_within_the_budget(view: LayerView) -> None:
    bounds = just_in_time.upper_bounds(view)[0].amax(0)
    always = set(torch.nonzero(mandatory(view.plan, base_of(view), view.blocks)).flatten().tolist())
    candidates = [best(row, max(1, view.blocks // 4), 0, view.blocks) | always for row in bounds]
    keys = all_keys(view)
    low, high = keys.amin(-1, keepdim=True), keys.amax(-1, keepdim=True)
    rounded = low + (15 * (keys - low) / (high - low)).round() * (high - low) / 15
    estimated = weights_by(view, rounded, candidates).mean(0)
    assert as_sets(just_in_time.twilight(view)) == [heaviest(view, row) & nucleus(row) for row in estimated]


@EXAMPLES
@given(views(), st.sampled_from([(), (1,), (0, 2)]))
def test_tidal_reads_what_the_last_selection_layer_weighed_most(view: LayerView, dense: tuple[int, ...]) -> None:
    plan = replace(view.plan, dense_layers=dense)
    selector = JustInTime(plan, just_in_time.tidal)
    selector.begin(view.rounds, view.evidence)
    always = set(torch.nonzero(mandatory(plan, base_of(view), view.blocks)).flatten().tolist())
    selected: list[set[int]] = []
    for layer in range(LAYERS):
        of_layer = layer_view(plan, base_of(view), len(view.queries), layer, seed=layer)
        mask = selector.choose(layer, of_layer.queries, of_layer.keys, of_layer.scale)
        if layer in (0, 2):
            weights = weights_by(of_layer, all_keys(of_layer)).mean((0, 1))
            selected = [heaviest(view, weights) | always] * KV_HEADS
        if layer in (0, 2, *dense):
            assert mask is None
        else:
            assert mask is not None
            assert as_sets(mask) == selected


@pytest.mark.parametrize("name", list(RIVALS))
@EXAMPLES
@given(views(), st.integers(2, 5))
def test_rounds_in_one_pass_choose_what_each_chooses_alone(name: str, view: LayerView, count: int) -> None:
    """This holds for what tidal's layers choose for later ones, and for bounds that earlier rounds have settled."""
    rows, choose = view.rounds.rows, RIVALS[name].choose
    many = layer_view(view.plan, base_of(view), rows * count, view.layer, seed=7)
    rounds = Rounds(base_of(view) - 1, rows, count)
    evidence = torch.rand(count, *many.evidence.shape[1:])
    for number, length in enumerate(rounds.lengths):
        evidence[number, ..., view.plan.num_blocks(length) :] = 0
    together = replace(many, rounds=rounds, evidence=evidence, bounds=KeyBounds(), selections=[])
    given = choose(together)
    found = together.selections[-1] if given is None and together.selections else given
    for number, length in enumerate(rounds.lengths):
        alone = replace(
            many,
            queries=many.queries[rows * number : rows * (number + 1)],
            keys=replace(many.keys, length=length),
            rounds=Rounds(length - rows, rows, 1),
            evidence=evidence[number : number + 1],
        )
        wanted = choose(alone)
        assert (wanted is None) == (given is None)
        wanted = alone.selections.pop() if wanted is None and alone.selections else wanted
        if found is not None and wanted is not None:
            blocks = view.plan.num_blocks(length)
            assert as_sets(found[number, :, :blocks]) == as_sets(wanted)
            assert not found[number, :, blocks:].any()


@EXAMPLES
@given(st.data(), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_a_nucleus_has_the_fewest_blocks_that_hold_the_mass(data: st.DataObject, mass: float) -> None:
    blocks = data.draw(st.integers(0, 12))
    entries = st.lists(st.sampled_from([0.0, 0.125, 0.25, 1.0, 3.0]), min_size=blocks, max_size=blocks)
    rows = torch.tensor(data.draw(st.lists(entries, min_size=1, max_size=4)))
    assert as_sets(choose_nucleus(rows, mass)) == [nucleus(row, mass) for row in rows]


# The maps of draft heads and layers.


@EXAMPLES
@given(st.integers(0, 1000), st.integers(1, 12))
def test_maps_are_those_of_plain_counts(seed: int, blocks: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draft, target = torch.rand(6, blocks, generator=generator), torch.rand(8, blocks, generator=generator)
    counts = [1, 2, 5, 9]
    overlap = top_k_overlap(draft, target, counts)
    for count, found in zip(counts, overlap, strict=True):
        tops = [[best(row, count, 0, blocks) for row in weights] for weights in (target, draft)]
        assert found.tolist() == [[len(one & other) for other in tops[1]] for one in tops[0]]
    similarity = layer_similarity(draft, target)
    p, q = (each.double() / each.double().sum(1, keepdim=True) for each in (target, draft))
    divergence = torch.stack([torch.stack([(a * (a / b).log()).sum() for a in p]) for b in q])
    torch.testing.assert_close(similarity, -divergence, atol=1e-3, rtol=1e-3)
    maps = to_maps(overlap, similarity[:, :4], 3, 2)
    assert list(maps.heads) == [str(budget) for budget in BUDGETS]
    for heads, found in zip(maps.heads.values(), overlap, strict=True):
        assert [(3 * i + j) for layer in heads for i, j in layer] == [int(row.argmax()) for row in found]
    assert maps.layers == best_rising(similarity[:, :4])


def best_rising(similarity: Tensor) -> list[int]:
    """The best of all maps that never fall."""
    every = combinations_with_replacement(range(len(similarity)), similarity.shape[1])
    return list(max(every, key=lambda path: sum(float(similarity[i, j]) for j, i in enumerate(path))))


def test_of_equal_layers_the_lowest_is_mapped() -> None:
    assert monotone_map(torch.zeros(3, 4)) == [0, 0, 0, 0]
    assert monotone_map(torch.tensor([[0.0], [2.0], [1.0]])) == [1]


def test_a_plan_without_maps_is_refused_by_the_methods_that_need_them() -> None:
    with pytest.raises(PlanError, match="make it again by calibrate"):
        variants_of(["sts"], ["0.1"], plan_with(), 3)
    plan = plan_with(provenance={PROVENANCE: asdict(MAPS)})
    assert maps_of(plan) == MAPS
    assert [v.method for v in variants_of(["specattn", "tidal"], ["0.1"], plan, 3)] == ["dense", "specattn", "tidal"]
