"""`specahead calibrate` makes a plan with its provenance, with which a pair can be launched."""

import subprocess
import sys
from pathlib import Path

from specahead import models
from specahead.models import DEMO_TEXT
from specahead.sparsity.plan import load_plan
from tests.stack import ROOT


def test_calibrate_the_bundled_pair(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    command = ["calibrate", "--target", str(models.TARGET), "--draft", str(models.DRAFT), "--text", str(DEMO_TEXT)]
    options = ["--out", str(out)]
    options += ["--context", "640", "--skipped", "256", "--passages", "1", "--budget", "0.2", "--dense-layers", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "specahead.cli", *command, *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    plan = load_plan(out)
    assert plan.hash in done.stdout
    assert (plan.target_layers, plan.target_kv_heads, plan.draft_layers, plan.draft_heads) == (10, 4, 4, 4)
    assert (plan.budget, plan.dense_layers) == (0.2, (0,))
    assert plan.provenance["files"] == [DEMO_TEXT.name]
    assert plan.provenance["texts"] == 1
    assert 0.3 < plan.provenance["blend_explained"] <= 1
    assert plan.acceptance is not None and 0.4 < plan.acceptance < 0.8, "0.58 on other texts (docs/quality.md)"
    assert all(weight > 0 for blend in plan.blends for _, _, weight in blend)
    assert not list(tmp_path.glob("*.progress"))
    measured = plan.provenance["quality"]
    assert [row["budget"] for row in measured] == [0.03, 0.06, 0.12, 0.2]
    assert measured[-1]["increase"] < 0.05 < measured[0]["increase"], "short texts at 3 % lose their middle"
    far = [row["total_variation"] for row in measured]
    assert far == sorted(far, reverse=True) and 0 < far[-1] < far[0] < 0.5
    assert plan.provenance["divergence"] == far[-1] and plan.max_divergence == max(0.1, 4 * far[-1])
    assert "plan" in (tmp_path / "plan.html").read_text(encoding="utf-8").split("</p>")[0]


def test_the_bundled_plan_is_for_the_bundled_pair() -> None:
    from specahead.lab.evaluation.models import model_hash

    plan = load_plan(models.PLAN)
    assert plan.provenance["target_hash"] == model_hash(str(models.TARGET))
    assert plan.provenance["draft_hash"] == model_hash(str(models.DRAFT))
