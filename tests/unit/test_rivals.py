"""What evaluation compares with the served methods: rivals that choose just in time."""

import torch
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.lab.evaluation import just_in_time
from specahead.lab.evaluation.just_in_time import KeyBounds, LayerView, SequenceKeys
from specahead.sparsity.plan import Plan
from tests.unit.test_methods import BASE, KV_HEADS, LENGTH, as_sets, best, plan_with


def layer_view(plan: Plan, seed: int, rows: int = 4) -> LayerView:
    """A layer of 50 blocks with two KV heads of dimension 8 and four query heads; pages in order."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randn(50, KV_HEADS, PAGE_SIZE, 8, generator=generator)
    queries = torch.randn(rows, 2 * KV_HEADS, 8, generator=generator)
    keys = SequenceKeys(pages, torch.arange(50), LENGTH)
    return LayerView(2, queries, keys, 0.7, plan, BASE, KeyBounds())


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


# The registry.
