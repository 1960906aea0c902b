"""What calibration counts over samples, and how it is kept between runs."""

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from specahead.engine.steps.runner import Runner
from specahead.kernels.selection import nucleus_mask
from specahead.lab.evaluation.calibration.head_map import top_k_overlap
from specahead.lab.evaluation.calibration.layer_map import layer_similarity
from specahead.lab.evaluation.choice import choose_over_all
from specahead.sparsity.plan import LEAST_TOKENS


@dataclass(frozen=True)
class CalibrationSettings:
    """context: tokens read of each passage; stride: tokens between samples; queries: of a round, γ + 1.

    map_budgets: shares for which head maps are made. masses: for which the prunable share is measured.
    skipped: leading tokens without samples, while there is little to choose from. The rest as in Plan.
    """

    context: int = 4096
    stride: int = 64
    skipped: int = 1024
    queries: int = 5
    map_budgets: tuple[float, ...] = (0.03, 0.06, 0.12, 0.25)
    masses: tuple[float, ...] = (0.9, 0.95, 0.99)
    block_size: int = 16
    group_size: int = 512
    budget: float = 0.1
    least_tokens: int = LEAST_TOKENS
    sink_blocks: int = 1
    window_blocks: int = 4
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.skipped >= self.context or self.stride < self.queries:
            raise ValueError(
                f"no sample fits: context {self.context} must exceed skipped {self.skipped}, and stride "
                f"{self.stride} hold {self.queries} queries"
            )


@dataclass
class CalibrationSums:
    """What is counted over samples. D, T: draft and target heads, flattened over layers.

    overlap: by map budget [T, D] and possible: what full overlap would count. similarity [draft, target layers].
    gram [D, D], cross [D, T], target_square [T]: of block weights between sinks and window. head_blocks [T]: blocks
    that a head gets of a budget shared by all. prunable [masses, target layers]: share of blocks outside the nucleus.
    value_spread [T]: of each head's contribution to the residual stream, summed over texts. accepted: of each sample,
    the chance that the target accepts a token that the draft draws.
    """

    overlap: list[Tensor]
    possible: list[float]
    similarity: Tensor
    gram: Tensor
    cross: Tensor
    target_square: Tensor
    head_blocks: Tensor
    prunable: Tensor
    value_spread: Tensor
    accepted: float = 0.0
    samples: int = 0
    texts: int = 0

    @staticmethod
    def zeros(draft: Runner, target: Runner, draft_heads: int, settings: CalibrationSettings) -> "CalibrationSums":
        d, t = draft.kv.num_layers * draft_heads, target.kv.num_layers * target.kv.kv_heads

        def double(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        return CalibrationSums(
            overlap=[double(t, d) for _ in settings.map_budgets],
            possible=[0.0] * len(settings.map_budgets),
            similarity=double(draft.kv.num_layers, target.kv.num_layers),
            gram=double(d, d),
            cross=double(d, t),
            target_square=double(t),
            head_blocks=double(t),
            prunable=double(len(settings.masses), target.kv.num_layers),
            value_spread=double(t),
        )


def count_sample(sums: CalibrationSums, draft: Tensor, target: Tensor, settings: CalibrationSettings) -> None:
    """draft [layers, heads, blocks], target [layers, kv_heads, blocks]: weights of one round."""
    blocks = draft.shape[-1]
    mandatory = settings.sink_blocks + settings.window_blocks
    middle = slice(settings.sink_blocks, blocks - settings.window_blocks)
    x, y = draft.flatten(0, 1)[:, middle].double(), target.flatten(0, 1)[:, middle].double()
    for i, budget in enumerate(settings.map_budgets):
        k = max(1, round(budget * blocks) - mandatory)
        sums.overlap[i] += top_k_overlap(x, y, k)
        sums.possible[i] += min(k, x.shape[1])
    sums.similarity += layer_similarity(draft.mean(1), target.mean(1))
    sums.gram += x @ x.T
    sums.cross += x @ y.T
    sums.target_square += (y * y).sum(1)
    room = round((settings.budget * blocks - mandatory) * len(y))
    sums.head_blocks += mandatory + choose_over_all(y, room).sum(1)
    rows = target.flatten(0, 1)
    valid = torch.full((len(rows),), blocks)
    for i, mass in enumerate(settings.masses):
        outside = 1 - nucleus_mask(rows, valid, mass).double().mean(1)
        sums.prunable[i] += outside.view(target.shape[:2]).mean(1)
    sums.samples += 1


def save_progress(file: Path, task: str, sums: CalibrationSums) -> None:
    part = file.with_name(file.name + ".writing")
    torch.save({"task": task} | {item.name: getattr(sums, item.name) for item in fields(sums)}, part)
    part.replace(file)


def load_progress(file: Path, task: str) -> CalibrationSums | None:
    """Counts of an earlier run of the same task, else None. Raises ValueError if the file is of another task."""
    if not file.exists():
        return None
    content = torch.load(file, weights_only=True)
    if content.pop("task", None) != task:
        raise ValueError(f"{file} is of another calibration: delete it, or give the same models, texts and settings")
    return CalibrationSums(**content)
