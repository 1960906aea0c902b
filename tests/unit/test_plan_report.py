"""The report of a plan: its words follow from its figures, and the page holds everything itself."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specahead import models
from specahead.lab.evaluation.calibration.expected_speed import BATCHES, CONTEXTS, expected_speeds
from specahead.lab.evaluation.calibration.plan_report import Quality, expectations, verdict, write_report
from specahead.sparsity.plan import Plan, load_plan

MEASURED = {0.03: 0.0414, 0.06: 0.0159, 0.1: 0.0098, 0.25: -0.0012}


def plan_of(**provenance: Any) -> Plan:
    """Return a plan whose weights take as much memory as 120,000 tokens of KV, as those of an 8B model do."""
    plan = load_plan(models.PLAN)
    quality = [{"budget": read, "kv_read": read, "increase": increase} for read, increase in MEASURED.items()]
    known = {"quality": quality, "weight_tokens": 120_000, "longest": 65_536, "acceptance": 0.7}
    return replace(plan, provenance=plan.provenance | known | provenance)


def test_the_page_says_what_was_measured_and_loads_nothing(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    write_report(plan_of(target="<big> model"), page)
    text = page.read_text(encoding="utf-8")
    assert "This is a good plan: reading 10 % of the KV raises the perplexity by 1.0 %." in text
    assert "From a budget of 10 % on, the increase of the perplexity stays within 1 %." in text
    assert all(f"{100 * increase:+.2f} %" in text for increase in MEASURED.values())
    assert "&lt;big&gt; model" in text and not re.search(r"https?:|src=|<script", text)
    assert text.count("<td style") == 2 * 5 * len(BATCHES), "contexts up to the model's"


@pytest.mark.parametrize(
    ("increase", "words"), [(-0.004, "good plan: reading 10 % of the KV does not"), (0.02, "usable"), (0.08, "poor")]
)
def test_a_plan_is_judged_by_what_it_costs(increase: float, words: str) -> None:
    assert words in verdict(Quality(0.1, 0.1, increase))


def test_what_to_expect_follows_from_acceptance_and_sizes() -> None:
    (how, alone, many), (*_, few) = expectations(plan_of()), expectations(plan_of(samples=40, acceptance=0.2))
    assert "chance of 70 %, which is high" in how and "40 samples only" in few
    assert "one request at a time" in alone and "16 requests at once, <code>approximate</code> may pay from 8K" in many


def test_more_kv_makes_sparse_rounds_faster_and_a_bad_draft_makes_nothing_slower() -> None:
    approximate, exact = (expected_speeds(plan_of(), exactness) for exactness in ("approximate", "exact"))
    for batch in BATCHES:
        speeds = [approximate(context, batch) for context in CONTEXTS]
        assert speeds == sorted(speeds) and all(
            speed >= exact(c, batch) for c, speed in zip(CONTEXTS, speeds, strict=True)
        )
    assert approximate(CONTEXTS[-1], 16) > 2 * exact(CONTEXTS[-1], 16)
    assert expected_speeds(plan_of(acceptance=0.0), "exact")(4096, 1) == 1
