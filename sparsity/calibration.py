"""Making a plan for a pair of models from text: where both look, block by block, at sampled rounds.

Both models read each text in strides; at the end of a stride the last γ + 1 queries give their weights by block,
and their mean is one sample. A sample is counted into sums as soon as it is there, so no L x L matrix is stored.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from engine.inputs import SequenceInput
from engine.kv.pages import PAGE_SIZE, SequenceKV
from engine.loading import (
    default_device,
    load_runner,
    load_tokenizer,
    model_hash,
    output_projections,
    resolve_dtype,
)
from engine.runner import ModelRunner, Runner
from kernels.selection import nucleus_mask
from sparsity.blends import fit_blends, to_blend
from sparsity.choice import choose_over_all
from sparsity.head_map import best_draft_heads, top_k_overlap
from sparsity.layer_map import layer_similarity, monotone_map
from sparsity.plan import Blend, Plan


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
class Sums:
    """What is counted over samples. D, T: draft and target heads, flattened over layers.

    overlap: by map budget [T, D] and possible: what full overlap would count. similarity [draft, target layers].
    gram [D, D], cross [D, T], target_square [T]: of block weights between sinks and window. head_blocks [T]: blocks
    that a head gets of a budget shared by all. prunable [masses, target layers]: share of blocks outside the nucleus.
    value_spread [T]: of each head's contribution to the residual stream, summed over texts.
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
    samples: int = 0
    texts: int = 0

    @staticmethod
    def zeros(draft: Runner, target: Runner, draft_heads: int, settings: CalibrationSettings) -> "Sums":
        d, t = draft.kv.num_layers * draft_heads, target.kv.num_layers * target.kv.kv_heads

        def double(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        return Sums(
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


def calibrate(
    draft: Runner,
    target: Runner,
    texts: list[list[int]],
    settings: CalibrationSettings,
    projections: list[Tensor],
    draft_heads: int,
    sums: Sums | None = None,
    on_text: Callable[[Sums], None] = lambda sums: None,
) -> Sums:
    """Count over texts (token ids), going on from `sums` if some are counted already.

    projections: the target's output projection of each layer, [hidden, heads * dim]. draft_heads: query heads of the
    draft. on_text is called after each text. Raises ValueError if no text is long enough for a sample.
    """
    sums = sums or Sums.zeros(draft, target, draft_heads, settings)
    strides = sum(_usable(tokens, settings) // settings.stride for tokens in texts[sums.texts :])
    with tqdm(total=strides, desc="calibrating", unit="stride") as progress:
        for tokens in texts[sums.texts :]:
            for draft_weights, target_weights in _samples(draft, target, tokens, settings, projections, sums):
                progress.update()
                if draft_weights is not None and target_weights is not None:
                    count_sample(sums, draft_weights, target_weights, settings)
            sums.texts += 1
            on_text(sums)
    if not sums.samples:
        raise ValueError(f"the texts are too short: a sample needs more than {settings.skipped} tokens")
    return sums


def _usable(tokens: list[int], settings: CalibrationSettings) -> int:
    return min(len(tokens), settings.context) // settings.stride * settings.stride


def _samples(
    draft: Runner,
    target: Runner,
    tokens: list[int],
    settings: CalibrationSettings,
    projections: list[Tensor],
    sums: Sums,
) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """For each stride, mean weights of draft heads [layers, heads, blocks] and KV heads; None where not sampled."""
    runners, sequences = (draft, target), (SequenceKV(), SequenceKV())
    try:
        for start in range(0, _usable(tokens, settings), settings.stride):
            chunk = tokens[start : start + settings.stride]
            sampled = start + settings.stride > settings.skipped
            emitting = settings.queries if sampled else 0
            means: list[Tensor | None] = []
            for runner, sequence in zip(runners, sequences, strict=True):
                step = SequenceInput(sequence, chunk, block_size=settings.block_size, emitting=emitting)
                (output,) = runner.forward([step])
                means.append(None if output.block_weights is None else output.block_weights.mean(1).cpu())
            if means[1] is not None:
                means[1] = means[1].unflatten(1, (target.kv.kv_heads, -1)).sum(2)
            yield means[0], means[1]
        if _usable(tokens, settings):
            sums.value_spread += _value_spread(target, sequences[1], projections)
    finally:
        for runner, sequence in zip(runners, sequences, strict=True):
            runner.kv.release(sequence)


def _value_spread(target: Runner, sequence: SequenceKV, projections: list[Tensor]) -> Tensor:
    """Mean length of what leaving a token out can change through each KV head: |W_o (v - v̄)|, [layers * kv_heads]."""
    spread = []
    pages = torch.tensor(sequence.pages)
    for v_pages, projection in zip(target.kv.v_pages, projections, strict=True):
        values = v_pages[pages.to(v_pages.device)].transpose(0, 1).flatten(1, 2)[:, : sequence.length].float()
        values = values - values.mean(1, keepdim=True)
        by_head = projection.float().unflatten(
            1, (len(values), -1, values.shape[2])
        )  # [hidden, kv_heads, group, dim]
        moved = torch.einsum("knd,hkgd->kgnh", values, by_head)
        spread.append(moved.norm(dim=-1).mean((1, 2)))
    return torch.cat(spread).double().cpu()


def count_sample(sums: Sums, draft: Tensor, target: Tensor, settings: CalibrationSettings) -> None:
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


def to_plan(
    sums: Sums, draft_layers: int, draft_heads: int, kv_heads: int, settings: CalibrationSettings
) -> Plan:
    """The plan that the sums speak for, with its scores as provenance."""
    layers = sums.similarity.shape[1]

    def by_layer(row: Tensor, digits: int = 4) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(round(float(x), digits) for x in part) for part in row.view(layers, kv_heads))

    maps, overlaps = [], []
    for budget, overlap, possible in zip(settings.map_budgets, sums.overlap, sums.possible, strict=True):
        heads, scores = best_draft_heads(overlap)
        pairs = [(int(i) // draft_heads, int(i) % draft_heads) for i in heads]
        rows = tuple(tuple(pairs[i * kv_heads : (i + 1) * kv_heads]) for i in range(layers))
        maps.append((budget, rows))
        overlaps.append(scores / possible)
    layer_map, similarity = monotone_map(sums.similarity / sums.samples)
    weights = fit_blends(sums.gram / sums.samples, sums.cross / sums.samples)
    blends: tuple[Blend, ...] = tuple(to_blend(row, draft_heads) for row in weights)
    importance = sums.value_spread.sqrt()
    return Plan(
        target_layers=layers,
        target_kv_heads=kv_heads,
        draft_layers=draft_layers,
        draft_heads=draft_heads,
        head_maps=tuple(maps),
        layer_map=tuple(layer_map),
        blends=blends,
        head_importance=by_layer(importance / importance.mean()),
        head_budgets=by_layer(sums.head_blocks / sums.head_blocks.mean()),
        budget=settings.budget,
        block_size=settings.block_size,
        group_size=settings.group_size,
        sink_blocks=settings.sink_blocks,
        window_blocks=settings.window_blocks,
        dense_layers=settings.dense_layers,
        anchor_layers=_anchors(layers),
        provenance={
            "settings": json.loads(json.dumps(asdict(settings))),
            "samples": sums.samples,
            "texts": sums.texts,
            "mean_overlap": {
                str(b): round(float(o.mean()), 4) for b, o in zip(settings.map_budgets, overlaps, strict=True)
            },
            "overlap_by_layer": {
                str(b): [round(float(x), 4) for x in o.view(layers, -1).mean(1)]
                for b, o in zip(settings.map_budgets, overlaps, strict=True)
            },
            "layer_map_score": round(similarity, 4),
            "blend_explained": _explained(sums, weights),
            "prunable_by_layer": {
                str(mass): [round(float(x), 4) for x in row / sums.samples]
                for mass, row in zip(settings.masses, sums.prunable, strict=True)
            },
        },
    )


def overlap_shares(sums: Sums, settings: CalibrationSettings, budget: float) -> Tensor:
    """Top-k overlap of every target head with every draft head at the calibrated budget nearest to `budget`."""
    nearest = min(range(len(settings.map_budgets)), key=lambda i: abs(settings.map_budgets[i] - budget))
    return sums.overlap[nearest] / sums.possible[nearest]


def _anchors(layers: int) -> tuple[int, ...]:
    """TidalDecode's token selection layers: an early one and one in the middle."""
    return tuple(sorted({min(2, layers // 5), layers // 2}))


def _explained(sums: Sums, weights: Tensor) -> float:
    """Share of the square of the target's block weights that the blends predict."""
    error = (
        sums.target_square - 2 * (weights * sums.cross.T).sum(1) + ((weights @ sums.gram) * weights).sum(1)
    )
    return round(1 - float(error.sum() / sums.target_square.sum()), 4)


def calibrate_files(
    draft: str,
    target: str,
    files: list[str],
    passages: int,
    settings: CalibrationSettings,
    progress_file: Path,
) -> tuple[Plan, Sums]:
    """Calibrate a pair of models (ids or folders) on `passages` evenly spread passages of each text file.

    progress_file: counts so far, written after each passage and deleted at the end; a run of the same models, texts
    and settings goes on from it.
    """
    device = default_device()
    dtype = resolve_dtype("auto", device)
    room = settings.context + PAGE_SIZE
    draft_runner, target_runner = (load_runner(name, dtype, device, room) for name in (draft, target))
    texts, text_hash = read_passages(files, load_tokenizer(target), passages, settings.context)
    provenance = {
        "target": Path(target).name,
        "target_hash": model_hash(target),
        "draft": Path(draft).name,
        "draft_hash": model_hash(draft),
        "files": [Path(file).name for file in files],
        "passages": passages,
        "text_hash": text_hash,
    }
    task = json.dumps([provenance, asdict(settings)])
    draft_heads: int = draft_runner.model.config.num_attention_heads  # type: ignore[union-attr,assignment]
    sums = calibrate(
        draft_runner,
        target_runner,
        texts,
        settings,
        projections_of(target_runner),
        draft_heads,
        load_progress(progress_file, task),
        lambda counted: save_progress(progress_file, task, counted),
    )
    plan = to_plan(sums, draft_runner.kv.num_layers, draft_heads, target_runner.kv.kv_heads, settings)
    plan.provenance.update(provenance)
    progress_file.unlink(missing_ok=True)
    return plan, sums


def projections_of(target: ModelRunner) -> list[Tensor]:
    return output_projections(target.model)


def read_passages(
    files: list[str], tokenizer: Any, passages: int, context: int
) -> tuple[list[list[int]], str]:
    """Token ids of evenly spread passages of each file, `context` each, and a hash of the files' text."""
    texts, digest = [], hashlib.sha256()
    for file in files:
        text = Path(file).read_text(encoding="utf-8")
        digest.update(text.encode())
        for i in range(passages):
            # Eight characters a token are more than enough to fill the context.
            start = len(text) * i // passages
            piece = text[start : start + 8 * context]
            texts.append(tokenizer.encode(piece, add_special_tokens=False)[:context])
    return texts, digest.hexdigest()[:16]


def save_progress(file: Path, task: str, sums: Sums) -> None:
    part = file.with_name(file.name + ".writing")
    torch.save({"task": task} | {item.name: getattr(sums, item.name) for item in fields(sums)}, part)
    part.replace(file)


def load_progress(file: Path, task: str) -> Sums | None:
    """Counts of an earlier run of the same task, else None. Raises ValueError if the file is of another task."""
    if not file.exists():
        return None
    content = torch.load(file, weights_only=True)
    if content.pop("task", None) != task:
        raise ValueError(
            f"{file} is of another calibration: delete it, or give the same models, texts and settings"
        )
    return Sums(**content)
