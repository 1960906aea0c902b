"""Calibration: what it counts against a plain pass with whole attention matrices, and going on where it stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specahead import models
from specahead.engine.loading.model import load_module
from specahead.engine.steps.model_runner import ModelRunner
from specahead.lab.evaluation.calibration.counting import calibrate
from specahead.lab.evaluation.calibration.plans import to_plan
from specahead.lab.evaluation.calibration.sums import CalibrationSettings, CalibrationSums, load_progress, save_progress
from specahead.lab.evaluation.models import load_runner
from specahead.models import DEMO_TEXT
from tests.unit.tiny_models import save_mixture

SETTINGS = CalibrationSettings(context=320, stride=64, skipped=192, queries=3, budget=0.5, window_blocks=2)


@pytest.fixture(scope="module")
def pair() -> tuple[ModelRunner, ModelRunner]:
    """draft, target"""
    return (
        load_runner(str(models.DRAFT), torch.float32, "cpu", 400),
        load_runner(str(models.TARGET), torch.float32, "cpu", 400),
    )


@pytest.fixture(scope="module")
def passages(tokenizer: Any) -> list[list[int]]:
    tokens = tokenizer.encode(DEMO_TEXT.read_text(encoding="utf-8"))
    return [tokens[:320], tokens[1000:1320]]


def count(
    pair: tuple[ModelRunner, ModelRunner], texts: list[list[int]], sums: CalibrationSums | None = None, **options: Any
) -> CalibrationSums:
    return calibrate(*pair, texts, SETTINGS, sums, **options)


def whole_matrices(model: str, tokens: list[int], last: int) -> Tensor:
    """Mean weights by block of the three queries before `last`: [layers, heads, blocks], by transformers itself."""
    loaded = load_module(model, torch.float32, "cpu", "eager")
    attentions = loaded(torch.tensor([tokens[:last]]), output_attentions=True).attentions
    rows = torch.stack([a[0, :, -3:, :] for a in attentions])  # [layers, heads, 3, tokens]
    return rows.unflatten(-1, (-1, 16)).sum(-1).mean(2)


@pytest.mark.parametrize("target_is", ["dense", "a mixture of experts"])
def test_the_sums_are_those_of_whole_attention_matrices(
    pair: tuple[ModelRunner, ModelRunner], passages: list[list[int]], target_is: str, tmp_path: Path
) -> None:
    model = str(models.TARGET)
    if target_is != "dense":
        save_mixture(tmp_path)
        model = str(tmp_path)
        pair = pair[0], load_runner(model, torch.float32, "cpu", 400)
    with torch.no_grad():
        sums = count(pair, passages[:1])
        assert (sums.samples, sums.texts) == (2, 1)
        gram, cross = torch.zeros(16, 16), torch.zeros(16, 40)
        for last in (256, 320):
            draft = whole_matrices(str(models.DRAFT), passages[0], last)
            target = whole_matrices(model, passages[0], last).unflatten(1, (4, 2)).sum(2)
            middle = slice(1, last // 16 - 2)
            x, y = draft.flatten(0, 1)[:, middle], target.flatten(0, 1)[:, middle]
            gram += x @ x.T
            cross += x @ y.T
    torch.testing.assert_close(sums.gram.float(), gram, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(sums.cross.float(), cross, atol=1e-5, rtol=1e-3)


def test_a_stopped_calibration_goes_on(
    pair: tuple[ModelRunner, ModelRunner], passages: list[list[int]], tmp_path: Path
) -> None:
    file = tmp_path / "plan.progress"
    whole = count(pair, passages, on_text=lambda sums: None)

    def stop(sums: CalibrationSums) -> None:
        save_progress(file, "this", sums)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        count(pair, passages, on_text=stop)
    started = load_progress(file, "this")
    assert started.texts == 1
    resumed = count(pair, passages, started)
    assert (resumed.samples, resumed.texts) == (whole.samples, whole.texts) == (4, 2)
    for name in ("gram", "cross", "target_square", "value_spread", "overlap", "similarity"):
        torch.testing.assert_close(getattr(resumed, name), getattr(whole, name))
    assert to_plan(resumed, 4, 4, 4, SETTINGS) == to_plan(whole, 4, 4, 4, SETTINGS)
    with pytest.raises(ValueError, match="another calibration"):
        load_progress(file, "that")
    assert load_progress(tmp_path / "none", "this") is None
