"""Making a plan for a pair of models from text: where both look, block by block, at sampled positions.

Weights come from the engine's own block-weight attention while the text is read in strides; one row of
weights a stride is kept only as long as it takes to count overlaps, so no L x L matrix is ever stored.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from engine.batch import SequenceInput
from engine.loading import default_device, load_runner, load_tokenizer, model_hash, resolve_dtype
from engine.paged_kv import PAGE_SIZE, SequenceKV
from engine.runner import Runner
from sparsity.head_map import best_draft_heads, top_k_overlap
from sparsity.plan import Plan


@dataclass(frozen=True)
class CalibrationSettings:
    """context: tokens read of each text; stride: tokens between sampled positions; the rest as in Plan."""

    context: int = 4096
    stride: int = 32
    block_size: int = 16
    budget: float = 0.1
    sink_blocks: int = 1
    window_blocks: int = 4
    dense_layers: tuple[int, ...] = (0, 1)


def calibrate(draft: Runner, target: Runner, texts: list[list[int]], settings: CalibrationSettings) -> Plan:
    """texts: token ids, at least a few blocks long each. Raises ValueError if no position could be sampled."""
    overlap: Tensor | None = None
    possible = 0
    shapes: tuple[torch.Size, torch.Size] | None = None
    for tokens in tqdm(texts, desc="calibrating", unit="text"):
        pairs = zip(
            _block_weights(draft, tokens, settings), _block_weights(target, tokens, settings), strict=True
        )
        for draft_weights, target_weights in pairs:
            shapes = (draft_weights.shape, target_weights.shape)
            blocks = draft_weights.shape[2]
            middle = slice(settings.sink_blocks, blocks - settings.window_blocks)
            mandatory = settings.sink_blocks + settings.window_blocks
            k = -int(-settings.budget * blocks // 1) - mandatory
            if k < 1 or blocks <= mandatory:
                continue
            grouped = target_weights.unflatten(1, (target.kv.kv_heads, -1)).sum(2)  # a KV head's query heads
            counted = top_k_overlap(
                draft_weights[..., middle].flatten(0, 1), grouped[..., middle].flatten(0, 1), k
            )
            overlap = counted if overlap is None else overlap + counted
            possible += k
    if overlap is None or shapes is None:
        raise ValueError(
            f"the texts are too short for a budget of {settings.budget}: no position had a choice to make"
        )
    draft_heads, (target_layers, _, _) = shapes[0][1], shapes[1]
    heads, scores = best_draft_heads(overlap)
    pairs_of_heads = [(int(i) // draft_heads, int(i) % draft_heads) for i in heads]
    kv_heads = target.kv.kv_heads
    return Plan(
        target_layers=target_layers,
        target_kv_heads=kv_heads,
        draft_layers=shapes[0][0],
        draft_heads=draft_heads,
        head_map=tuple(
            tuple(pairs_of_heads[i * kv_heads : (i + 1) * kv_heads]) for i in range(target_layers)
        ),
        block_size=settings.block_size,
        budget=settings.budget,
        sink_blocks=settings.sink_blocks,
        window_blocks=settings.window_blocks,
        dense_layers=settings.dense_layers,
        provenance={
            "context": settings.context,
            "stride": settings.stride,
            "texts": len(texts),
            "mean_overlap": round(float(scores.mean()) / possible, 4),
            "overlap_by_layer": [round(float(row.mean()) / possible, 4) for row in scores.view(-1, kv_heads)],
        },
    )


def _block_weights(runner: Runner, tokens: list[int], settings: CalibrationSettings) -> Iterable[Tensor]:
    """[layers, heads, blocks] at every stride of one text."""
    sequence = SequenceKV()
    try:
        usable = min(len(tokens), settings.context) // settings.stride * settings.stride
        for start in range(0, usable, settings.stride):
            chunk = tokens[start : start + settings.stride]
            (output,) = runner.forward([SequenceInput(sequence, chunk, block_size=settings.block_size)])
            assert output.block_weights is not None
            yield output.block_weights
    finally:
        runner.kv.release(sequence)


def calibrate_files(
    draft: str, target: str, files: list[str], passages: int, settings: CalibrationSettings
) -> Plan:
    """Calibrate a pair of models (ids or folders) on `passages` evenly spread passages of each text file."""
    device = default_device()
    dtype = resolve_dtype("auto", device)
    room = settings.context + PAGE_SIZE
    runners = [load_runner(name, dtype, device, room) for name in (draft, target)]
    tokenizer = load_tokenizer(target)
    texts: list[list[int]] = []
    digest = hashlib.sha256()
    for file in files:
        text = Path(file).read_text(encoding="utf-8")
        digest.update(text.encode())
        for i in range(passages):
            # Eight characters a token are more than enough to fill the context.
            start = len(text) * i // passages
            texts.append(tokenizer.encode(text[start : start + 8 * settings.context])[: settings.context])
    plan = calibrate(runners[0], runners[1], texts, settings)
    provenance = plan.provenance | {
        "target": Path(target).name,
        "target_hash": model_hash(target),
        "draft": Path(draft).name,
        "draft_hash": model_hash(draft),
        "files": [Path(file).name for file in files],
        "text_hash": digest.hexdigest()[:16],
    }
    return replace(plan, provenance=provenance)
