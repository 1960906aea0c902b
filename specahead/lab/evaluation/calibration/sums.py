"""What calibration counts over samples, and how it is kept between runs."""

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from specahead.engine.steps.model_runner import ModelRunner
from specahead.lab.evaluation.most_alike import BUDGETS, layer_similarity, top_k_overlap
from specahead.sparsity.plan import LEAST_TOKENS, Plan


@dataclass(frozen=True)
class CalibrationSettings:
    """How a plan is made of texts."""

    context: int = 4096
    """Tokens read of each passage."""
    stride: int = 64
    """Tokens between samples."""
    skipped: int = 1024
    """Leading tokens without samples: there is little to choose from."""
    queries: int = 5
    """Of a round: γ + 1."""
    budget: float = Plan.budget
    """As in Plan; so are the next ones."""
    least_tokens: int = LEAST_TOKENS
    block_size: int = Plan.block_size
    sink_blocks: int = Plan.sink_blocks
    window_blocks: int = Plan.window_blocks
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

    gram [D, D], cross [D, T], target_square [T]: of block weights between sinks and window.
    value_spread [T]: of each head's contribution to the residual stream, summed over texts. overlap [budgets, T, D],
    similarity [draft layers, target layers]: how alike they are (`most_alike`). accepted: of each sample, the chance
    that the target accepts a token that the draft draws.
    """

    gram: Tensor
    cross: Tensor
    target_square: Tensor
    value_spread: Tensor
    overlap: Tensor
    similarity: Tensor
    accepted: float = 0.0
    samples: int = 0
    texts: int = 0

    @staticmethod
    def zeros(draft: ModelRunner, target: ModelRunner) -> "CalibrationSums":
        d, t = draft.kv.num_layers * draft.decoder.heads, target.kv.num_layers * target.kv.kv_heads

        def double(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        return CalibrationSums(
            gram=double(d, d),
            cross=double(d, t),
            target_square=double(t),
            value_spread=double(t),
            overlap=double(len(BUDGETS), t, d),
            similarity=double(draft.kv.num_layers, target.kv.num_layers),
        )


def count_sample(sums: CalibrationSums, draft: Tensor, target: Tensor, settings: CalibrationSettings) -> None:
    """draft [layers, heads, blocks], target [layers, kv_heads, blocks]: weights of one round."""
    middle = slice(settings.sink_blocks, draft.shape[-1] - settings.window_blocks)
    x, y = draft.flatten(0, 1)[:, middle].double(), target.flatten(0, 1)[:, middle].double()
    sums.gram += x @ x.T
    sums.cross += x @ y.T
    sums.target_square += (y * y).sum(1)
    blocks, always = draft.shape[-1], settings.sink_blocks + settings.window_blocks
    sums.overlap += top_k_overlap(x, y, [max(1, round(budget * blocks) - always) for budget in BUDGETS])
    sums.similarity += layer_similarity(draft.mean(1), target.mean(1))
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
