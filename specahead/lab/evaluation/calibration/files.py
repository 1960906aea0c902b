"""Calibrating a pair of models on text files."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.loading.config import load_shape
from specahead.engine.loading.model import default_device, resolve_dtype
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.lab.evaluation.calibration.counting import calibrate
from specahead.lab.evaluation.calibration.plans import to_plan
from specahead.lab.evaluation.calibration.quality import quality_over_budget, room_of
from specahead.lab.evaluation.calibration.sums import CalibrationSettings, load_progress, save_progress
from specahead.lab.evaluation.models import load_runner, model_hash
from specahead.sparsity.plan import Plan


def calibrate_files(
    draft: str, target: str, files: list[str], passages: int, settings: CalibrationSettings, progress_file: Path
) -> Plan:
    """Calibrate a pair of models (ids or folders) on `passages` evenly spread passages of each text file.

    progress_file: counts so far, written after each passage and deleted at the end; a run of the same models, texts
    and settings goes on from it.
    """
    device = default_device()
    dtype = resolve_dtype("auto", device, target)
    longest = settings.context + PAGE_SIZE
    rooms = [(draft, longest), (target, room_of(longest))]
    both = tqdm(rooms, desc="loading both models", unit="model", disable=None)
    draft_runner, target_runner = (load_runner(model, dtype, device, kv, max_context=longest) for model, kv in both)
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
    sums = calibrate(
        draft_runner,
        target_runner,
        texts,
        settings,
        load_progress(progress_file, task),
        lambda counted: save_progress(progress_file, task, counted),
    )
    plan = to_plan(sums, draft_runner.kv.num_layers, draft_runner.decoder.heads, target_runner.kv.kv_heads, settings)
    plan.provenance.update(provenance)
    quality = quality_over_budget(draft_runner, target_runner, plan, texts, settings.queries - 1)
    plan.provenance["quality"] = quality
    plan.provenance["divergence"] = next(row["total_variation"] for row in quality if row["budget"] == plan.budget)
    plan.provenance["weight_tokens"] = round(target_runner.weight_tokens)
    plan.provenance["longest"] = load_shape(target).max_position_embeddings
    progress_file.unlink(missing_ok=True)
    return plan


def read_passages(files: list[str], tokenizer: Any, passages: int, context: int) -> tuple[list[list[int]], str]:
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
