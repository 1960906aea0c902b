"""`make evaluate`: all tables of docs/quality/tables.md and both plots, from the bundled pair and a folder of texts.

The bundled plan was calibrated on three of the books (its provenance names them); they are left out here.
"""

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specahead import models
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.lab.evaluation import cases, drafts, plots, report
from specahead.lab.evaluation.cases import Case
from specahead.lab.evaluation.drafts import DraftRow
from specahead.lab.evaluation.report import QualityRow
from specahead.lab.evaluation.rounds import Variant
from specahead.lab.evaluation.run import Pair, evaluate, parse_budget, variants_of
from specahead.lab.results import markdown_table, text_table, write_json
from specahead.sparsity.plan import Plan, load_plan

BUDGETS = ["0.03", "0.06", "0.12", "0.25"]
GAMMA, LONG = 3, 4096
COMPARED = "streaming quest ahead oracle"
PAGE = "quality/tables.md"  # within the folder of the documents


@dataclass
class Study:
    """What all tables share."""

    pair: Pair
    plan: Plan
    texts: dict[str, str]
    tokenizer: Any
    rows: dict[str, list[QualityRow]]
    """Of the tables that were made so far, by name."""

    def passages(self, context: int, books: int) -> list[Case]:
        """Return a passage of each of the first books, of which the last 512 tokens are scored."""
        texts = dict(list(self.texts.items())[:books])
        return cases.perplexity_cases(texts, self.tokenizer, context, context - 512)

    def recall(self, kinds: list[str], context: int, count: int) -> list[Case]:
        return cases.recall_cases(kinds, self.texts, self.tokenizer, context, count)

    def variants(self, methods: str, budgets: list[str]) -> list[Variant]:
        return variants_of(methods.split(), budgets, self.plan, GAMMA)

    def changed(self, *variants: tuple[str, str, str, Plan]) -> list[Variant]:
        """Return the dense variant, and variants of plans by label, method and budget."""
        others = [Variant(m, budget, parse_budget(budget, plan), GAMMA, label) for label, m, budget, plan in variants]
        return [Variant("dense", "", self.plan, GAMMA), *others]


def block_sizes(study: Study) -> list[Variant]:
    plans = {  # sinks and window stay as many tokens
        size: replace(study.plan, block_size=size, sink_blocks=max(1, 16 // size), window_blocks=max(1, 64 // size))
        for size in (1, 16, 32, 64)
    }
    methods = "ahead", "oracle"
    return study.changed(
        *((f"{m}, blocks of {size}", m, "0.12", plan) for size, plan in plans.items() for m in methods)
    )


def dense_layers(study: Study) -> list[Variant]:
    plans = {count: replace(study.plan, dense_layers=tuple(range(count))) for count in (0, 1, 2)}
    methods = "quest", "ahead"
    return study.changed(*((f"{m}, {count} dense", m, "0.06", plan) for count, plan in plans.items() for m in methods))


def parts_of_ahead(study: Study) -> list[Variant]:
    """Return `ahead` without one of its parts, or with another value of one setting, and the oracle."""
    plan = study.plan
    ones = tuple(tuple(1.0 for _ in row) for row in plan.head_importance)
    plans = {
        "ahead": plan,
        "no group means": replace(plan, group_size=0),
        **{f"groups of {size}": replace(plan, group_size=size) for size in (64, 128, 256)},
        "all heads alike": replace(plan, head_importance=ones),
        **{f"{share:.0%} announced": replace(plan, announced_share=share) for share in (0.5, 0.7, 1.0)},
        "oracle": plan,
    }
    labelled = ((label, "oracle" if label == "oracle" else "ahead", plan) for label, plan in plans.items())
    return study.changed(*((label, m, budget, plan) for label, m, plan in labelled for budget in ("0.06", "0.12")))


FEW = ["0.03", "0.06"]
HARD = ["named-keys", "pairs"]
# For each table, functions that make its cases and its variants.
STUDIES: dict[str, tuple[Callable[[Study], list[Case]], Callable[[Study], list[Variant]]]] = {
    "long text": (lambda s: s.passages(LONG, 5), lambda s: s.variants(COMPARED, BUDGETS)),
    "pass key": (lambda s: s.recall(["pass-key"], LONG, 12), lambda s: s.variants(COMPARED, BUDGETS)),
    "recall at 2048": (lambda s: s.recall(HARD, 2048, 4), lambda s: s.variants(COMPARED, FEW)),
    "recall at 4096": (lambda s: s.recall(HARD, LONG, 4), lambda s: s.variants(COMPARED, FEW)),
    "recall at 8192": (lambda s: s.recall(HARD, 2 * LONG, 2), lambda s: s.variants(COMPARED, FEW)),
    "copy": (lambda s: cases.copy_cases(s.texts, s.tokenizer, LONG, 8), lambda s: s.variants(COMPARED, FEW)),
    "8,192 tokens": (lambda s: s.passages(2 * LONG, 2), lambda s: s.variants("quest ahead oracle", ["0.06"])),
    "block sizes": (lambda s: s.passages(LONG, 2), block_sizes),
    "dense first layers": (lambda s: s.passages(LONG, 3), dense_layers),
    "parts of ahead": (lambda s: s.passages(LONG, 3), parts_of_ahead),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m specahead.lab.evaluation.quality", description=__doc__)
    parser.add_argument("--books", required=True, metavar="DIR", help="folder of .txt files")
    parser.add_argument("--out", default="docs", metavar="DIR", help="folder in which quality/ is written")
    parser.add_argument("--only", nargs="*", choices=[*STUDIES], help="print these tables, write nothing")
    flags = parser.parse_args()
    plan = replace(load_plan(models.PLAN), least_tokens=0)  # the tables say what a budget alone does
    try:
        files = cases.held_out_files(flags.books, plan)
    except ValueError as error:
        parser.error(str(error))
    pair = Pair(str(models.TARGET), str(models.DRAFT))
    texts = cases.read_texts(files)
    study = Study(pair, plan, texts, load_tokenizer(str(models.TARGET)), {})
    started = time.perf_counter()
    for name, (make_cases, make_variants) in STUDIES.items():
        if not flags.only or name in flags.only:
            variants = make_variants(study)
            sums = evaluate(pair, make_cases(study), variants, description=name)
            study.rows[name] = report.to_rows(name, variants, sums)
            print(f"\n## {name}\n{report.to_text(study.rows[name])}", flush=True)
    seconds = time.perf_counter() - started
    print(f"\n{seconds:.0f} s")
    if not flags.only:
        write_page(study, Path(flags.out), seconds)
        study_drafts(study, Path(flags.out) / PAGE)


def study_drafts(study: Study, page: Path) -> None:
    started = time.perf_counter()
    tables = drafts.run_study(study.pair, study.plan, study.texts)
    for name, rows in tables.items():
        print(f"\n## {name}\n{text_table(drafts.COLUMNS, rows, left=0)}", flush=True)
    write_drafts(tables, page, "make evaluate", time.perf_counter() - started)


def write_drafts(tables: dict[str, list[DraftRow]], page: Path, command: str, seconds: float) -> None:
    """Fill in the tables of how the draft reads."""
    text = page.read_text(encoding="utf-8")
    for name, rows in tables.items():
        text = _fill(text, name, markdown_table(drafts.COLUMNS, rows, left=0))
    made = f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {seconds / 60:.0f} min"
    page.write_text(_fill(text, "drafts made", f"Made by `{command}`: {made}."), encoding="utf-8")


def write_page(study: Study, out: Path, seconds: float) -> None:
    """Fill the tables into the page, between its markers, and draw the plots."""
    folder = out / "quality"
    plots.plot_quality(study.rows["long text"], folder / "long-text.png")
    at_six = [row for row in study.rows["long text"] if row.budget == "0.06"]
    plots.plot_churn(at_six, folder / "churn.png")
    write_json(folder / "rows.json", study.rows)
    page = out / PAGE
    text = page.read_text(encoding="utf-8")
    for name, rows in study.rows.items():
        text = _fill(text, name, markdown_table(report.COLUMNS, rows))
    made = f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {seconds / 60:.0f} min, plan {study.plan.hash}"
    page.write_text(_fill(text, "made", f"Made by `make evaluate`: {made}."), encoding="utf-8")


def _fill(text: str, name: str, content: str) -> str:
    """Put `content` between the markers of a name. Raises ValueError if the page has none."""
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    if first not in text or last not in text:
        raise ValueError(f"{PAGE} has no markers {first} … {last}")
    head, rest = text.split(first, 1)
    return f"{head}{first}\n{content}\n{last}{rest.split(last, 1)[1]}"


if __name__ == "__main__":
    main()
