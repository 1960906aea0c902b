"""Rivals that follow one draft head or one draft layer, by the maps that calibration leaves in a plan.

The queries of a round share a selection by the mean of the draft's weights, as those of `ahead` do.
"""

import torch
from torch import Tensor

from specahead.lab.evaluation.choice import choose, choose_nucleus
from specahead.lab.evaluation.just_in_time import LayerView
from specahead.lab.evaluation.most_alike import maps_of


def sts(view: LayerView) -> Tensor:
    """Choose as STS, section 4.2: the heaviest blocks of the draft head that is most like each target head.

    Each head has the same budget.
    """
    heads = maps_of(view.plan).heads_at(view.plan.budget)[view.layer]
    weights = torch.stack([view.evidence[:, layer, head, : view.blocks] for layer, head in heads], 1)
    return choose(weights, view.plan, view.rounds)


def specattn(view: LayerView) -> Tensor:
    """Choose as SpecAttn (arXiv 2510.27641), section 3.4: the nucleus of the draft layer that is most like this layer.

    A layer's weights are the mean of its heads, and all heads of the target's layer read the same. The budget caps the
    nucleus, so that the method is compared at the same share of the KV.
    """
    layer = maps_of(view.plan).layers[view.layer]
    weights = view.evidence[:, layer, :, : view.blocks].mean(1, keepdim=True)
    chosen = choose(weights, view.plan, view.rounds) & choose_nucleus(weights)
    return chosen.expand(-1, view.plan.target_kv_heads, -1)
