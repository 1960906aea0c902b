"""From what calibration has counted to a plan."""

import json
from dataclasses import asdict
from typing import Any

from torch import Tensor

from specahead.lab.evaluation.calibration.blends import fit_blends, to_blend
from specahead.lab.evaluation.calibration.head_map import best_draft_heads
from specahead.lab.evaluation.calibration.layer_map import monotone_map
from specahead.lab.evaluation.calibration.sums import CalibrationSettings, CalibrationSums
from specahead.sparsity.plan import Heads, Plan


def to_plan(
    sums: CalibrationSums, draft_layers: int, draft_heads: int, kv_heads: int, settings: CalibrationSettings
) -> Plan:
    """Return the plan that the sums speak for, with its scores as provenance."""
    layers = sums.similarity.shape[1]
    maps, overlaps = _head_maps(sums, draft_heads, kv_heads, settings)
    layer_map, similarity = monotone_map(sums.similarity / sums.samples)
    weights = fit_blends(sums.gram / sums.samples, sums.cross / sums.samples)
    importance = sums.value_spread.sqrt()
    return Plan(
        target_layers=layers,
        target_kv_heads=kv_heads,
        draft_layers=draft_layers,
        draft_heads=draft_heads,
        head_maps=tuple(maps),
        layer_map=tuple(layer_map),
        blends=tuple(to_blend(row, draft_heads) for row in weights),
        head_importance=_by_layer(importance / importance.mean(), kv_heads),
        head_budgets=_by_layer(sums.head_blocks / sums.head_blocks.mean(), kv_heads),
        budget=settings.budget,
        least_tokens=settings.least_tokens,
        block_size=settings.block_size,
        group_size=settings.group_size,
        sink_blocks=settings.sink_blocks,
        window_blocks=settings.window_blocks,
        dense_layers=settings.dense_layers,
        anchor_layers=_anchors(layers),
        provenance={
            "settings": json.loads(json.dumps(asdict(settings))),
            "samples": sums.samples,
            "acceptance": round(sums.accepted / sums.samples, 4),
            "texts": sums.texts,
            **_scores(sums, settings, overlaps, similarity, weights),
        },
    )


def _by_layer(values: Tensor, kv_heads: int) -> tuple[tuple[float, ...], ...]:
    """[layers * kv_heads], rounded, as a row a layer"""
    return tuple(tuple(round(float(x), 4) for x in row) for row in values.view(-1, kv_heads))


def _head_maps(
    sums: CalibrationSums, draft_heads: int, kv_heads: int, settings: CalibrationSettings
) -> tuple[list[tuple[float, tuple[Heads, ...]]], list[Tensor]]:
    """Return for each map budget the best draft head of each target head, and the shares of overlap [target heads]."""
    maps, overlaps = [], []
    for budget, overlap, possible in zip(settings.map_budgets, sums.overlap, sums.possible, strict=True):
        heads, scores = best_draft_heads(overlap)
        pairs = [(int(i) // draft_heads, int(i) % draft_heads) for i in heads]
        maps.append((budget, tuple(tuple(pairs[i : i + kv_heads]) for i in range(0, len(pairs), kv_heads))))
        overlaps.append(scores / possible)
    return maps, overlaps


def _scores(
    sums: CalibrationSums, settings: CalibrationSettings, overlaps: list[Tensor], similarity: float, weights: Tensor
) -> dict[str, Any]:
    """Say how well the maps and blends fit. overlaps: by map budget, [target heads]. weights: of the blends, [T, D]."""
    layers = sums.similarity.shape[1]
    by_budget = list(zip(map(str, settings.map_budgets), overlaps, strict=True))

    def rounded(values: Tensor) -> list[float]:
        return [round(float(x), 4) for x in values]

    return {
        "mean_overlap": {budget: round(float(overlap.mean()), 4) for budget, overlap in by_budget},
        "overlap_by_layer": {budget: rounded(overlap.view(layers, -1).mean(1)) for budget, overlap in by_budget},
        "layer_map_score": round(similarity, 4),
        "blend_explained": _explained(sums, weights),
        "prunable_by_layer": {
            str(mass): rounded(row / sums.samples) for mass, row in zip(settings.masses, sums.prunable, strict=True)
        },
    }


def overlap_shares(sums: CalibrationSums, settings: CalibrationSettings, budget: float) -> Tensor:
    """Return the top-k overlap of target heads with draft heads at the map budget nearest to `budget`: [T, D]."""
    nearest = min(range(len(settings.map_budgets)), key=lambda i: abs(settings.map_budgets[i] - budget))
    return sums.overlap[nearest] / sums.possible[nearest]


def _anchors(layers: int) -> tuple[int, ...]:
    """TidalDecode's token selection layers: an early one and one in the middle."""
    return tuple(sorted({min(2, layers // 5), layers // 2}))


def _explained(sums: CalibrationSums, weights: Tensor) -> float:
    """Share of the square of the target's block weights that the blends predict."""
    error = sums.target_square - 2 * (weights * sums.cross.T).sum(1) + ((weights @ sums.gram) * weights).sum(1)
    return round(1 - float(error.sum() / sums.target_square.sum()), 4)
