"""Which draft heads and layers are most like the target's: the maps of STS and SpecAttn, which evaluation compares.

Calibration leaves them in a plan's provenance. Served rounds follow blends of draft heads, not these maps.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.sparsity.plan import Plan, PlanError

BUDGETS = (0.03, 0.06, 0.12, 0.25)  # shares of the KV, for each of which STS maps heads
PROVENANCE = "most_alike"  # the key under which a plan's provenance has the maps
SMALLEST = 1e-6  # added to weights, so that the divergence stays finite where a draft layer sees nothing


@dataclass(frozen=True)
class DraftMaps:
    """Which part of the draft each part of the target follows."""

    heads: dict[str, list[list[list[int]]]]
    """By budget: [layer][kv_head], each a draft layer and a head of it (STS)."""
    layers: list[int]
    """The draft layer of each target layer (SpecAttn)."""

    def heads_at(self, budget: float) -> list[list[list[int]]]:
        """Return the heads by the map whose budget is nearest, as a ratio."""
        return self.heads[min(self.heads, key=lambda known: abs(math.log(float(known) / budget)))]


def maps_of(plan: Plan) -> DraftMaps:
    """Return the maps that calibration left in a plan. Raises PlanError if there are none."""
    if PROVENANCE not in plan.provenance:
        raise PlanError("the plan does not map draft heads, as sts and specattn need: make it again by calibrate")
    return DraftMaps(**plan.provenance[PROVENANCE])


def to_maps(overlap: Tensor, similarity: Tensor, draft_heads: int, kv_heads: int) -> DraftMaps:
    """Return the maps of the largest overlap and similarity, summed over samples.

    overlap: [budgets, target heads, draft heads], heads flattened over layers. similarity: [draft layers, target
    layers].
    """
    best = overlap.argmax(-1)  # [budgets, target heads]
    pairs = torch.stack([best // draft_heads, best % draft_heads], -1).unflatten(1, (-1, kv_heads)).tolist()
    return DraftMaps(dict(zip(map(str, BUDGETS), pairs, strict=True)), monotone_map(similarity))


def top_k_overlap(draft: Tensor, target: Tensor, counts: list[int]) -> Tensor:
    """Return how many of its heaviest blocks each target head shares with each draft head (STS, Algorithm 1).

    draft: [draft heads, blocks]; target: [target heads, blocks]. counts: the numbers of blocks that are the heaviest.
    Returns [counts, target heads, draft heads] float64.
    """
    most = min(max(counts), draft.shape[1])
    orders = [weights.topk(most, -1).indices for weights in (target, draft)]
    shared = []
    for count in counts:
        of_target, of_draft = (
            draft.new_zeros(len(order), draft.shape[1], dtype=torch.float64).scatter_(1, order[:, :count], 1.0)
            for order in orders
        )
        shared.append(of_target @ of_draft.T)
    return torch.stack(shared)


def layer_similarity(draft: Tensor, target: Tensor) -> Tensor:
    """Return minus the KL divergence of each draft layer's distribution from each target layer's (SpecAttn, Eq. 4).

    draft: [draft layers, blocks]; target: [target layers, blocks]; not negative, rows of any sum. Returns [draft
    layers, target layers] float64.
    """
    raised = (draft.double() + SMALLEST, target.double() + SMALLEST)
    log_draft, log_target = ((each / each.sum(-1, keepdim=True)).log() for each in raised)
    return log_draft @ log_target.exp().T - (log_target.exp() * log_target).sum(-1)


def monotone_map(similarity: Tensor) -> list[int]:
    """Return the draft layer f(j) of each target layer j that maximises Σ_j S[f(j), j], where f never falls (SpecAttn,
    Algorithm 3).

    similarity: S, [draft layers, target layers]. Of equal maps it is the one of the lowest layers.
    """
    best, came_from = similarity[:, 0], list[list[int]]()  # of maps of the first layers, by the draft layer of the last
    for of_layer in similarity.T[1:]:
        before = [int(best[: i + 1].argmax()) for i in range(len(best))]
        came_from.append(before)
        best = best[before] + of_layer
    path = [int(best.argmax())]
    for before in reversed(came_from):
        path.append(before[path[-1]])
    return path[::-1]
