"""From what calibration has counted to a plan."""

import json
from dataclasses import asdict

from torch import Tensor

from specahead.lab.evaluation.calibration.blends import fit_blends, to_blend
from specahead.lab.evaluation.calibration.sums import CalibrationSettings, CalibrationSums
from specahead.lab.evaluation.most_alike import PROVENANCE, to_maps
from specahead.sparsity.plan import Plan

VARIANCE_LIMIT = 0.5  # of calibrated plans (`Plan.variance_limit`)


def to_plan(
    sums: CalibrationSums, draft_layers: int, draft_heads: int, kv_heads: int, settings: CalibrationSettings
) -> Plan:
    """Return the plan that the sums speak for, with its scores as provenance."""
    weights = fit_blends(sums.gram / sums.samples, sums.cross / sums.samples)
    importance = sums.value_spread.sqrt()
    return Plan(
        target_layers=len(sums.target_square) // kv_heads,
        target_kv_heads=kv_heads,
        draft_layers=draft_layers,
        draft_heads=draft_heads,
        blends=tuple(to_blend(row, draft_heads) for row in weights),
        head_importance=_by_layer(importance / importance.mean(), kv_heads),
        budget=settings.budget,
        least_tokens=settings.least_tokens,
        block_size=settings.block_size,
        variance_limit=VARIANCE_LIMIT,
        sink_blocks=settings.sink_blocks,
        window_blocks=settings.window_blocks,
        dense_layers=settings.dense_layers,
        provenance={
            "settings": json.loads(json.dumps(asdict(settings))),
            "samples": sums.samples,
            "acceptance": round(sums.accepted / sums.samples, 4),
            "texts": sums.texts,
            "blend_explained": _explained(sums, weights),
            PROVENANCE: asdict(to_maps(sums.overlap, sums.similarity, draft_heads, kv_heads)),
        },
    )


def _by_layer(values: Tensor, kv_heads: int) -> tuple[tuple[float, ...], ...]:
    """Return [layers * kv_heads], rounded, as a row for each layer."""
    return tuple(tuple(round(float(x), 4) for x in row) for row in values.view(-1, kv_heads))


def _explained(sums: CalibrationSums, weights: Tensor) -> float:
    """Share of the square of the target's block weights that the blends predict."""
    error = sums.target_square - 2 * (weights * sums.cross.T).sum(1) + ((weights @ sums.gram) * weights).sum(1)
    return round(1 - float(error.sum() / sums.target_square.sum()), 4)
