"""`make evaluate`: all tables of docs/quality/tables.md and both plots, from the bundled pair and a folder of texts.

The bundled plan was calibrated on three of the books (its provenance names them); they are left out here.
"""

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

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
    tokenizer: object
    rows: dict[str, list[QualityRow]]

    def run(self, title: str, chosen: list[Case], variants: list[Variant]) -> list[QualityRow]:
        rows = report.to_rows(title, variants, evaluate(self.pair, chosen, variants, description=title))
        self.rows[title] = rows
        return rows

    def passages(self, context: int, prefilled: int, books: int) -> list[Case]:
        texts = dict(list(self.texts.items())[:books])
        return cases.perplexity_cases(texts, self.tokenizer, context, prefilled)

    def variants(self, methods: str, budgets: list[str]) -> list[Variant]:
        return variants_of(methods.split(), budgets, self.plan, GAMMA)

    def dense(self) -> Variant:
        return Variant("dense", "", self.plan, GAMMA)


def main_variants(study: Study) -> list[Variant]:
    return study.variants(COMPARED, BUDGETS)


def long_text(study: Study) -> list[QualityRow]:
    return study.run("long text", study.passages(LONG, LONG - 512, 5), main_variants(study))


def pass_key(study: Study) -> list[QualityRow]:
    chosen = cases.recall_cases(["pass-key"], study.texts, study.tokenizer, LONG, 12)
    return study.run("pass key", chosen, main_variants(study))


def recall(study: Study, context: int) -> list[QualityRow]:
    chosen = cases.recall_cases(
        ["named-keys", "pairs"], study.texts, study.tokenizer, context, 2 if context > LONG else 4
    )
    return study.run(f"recall at {context}", chosen, study.variants(COMPARED, ["0.03", "0.06"]))


def copying(study: Study) -> list[QualityRow]:
    chosen = cases.copy_cases(study.texts, study.tokenizer, LONG, 8)
    return study.run("copy", chosen, study.variants(COMPARED, ["0.03", "0.06"]))


def eight_thousand(study: Study) -> list[QualityRow]:
    return study.run(
        "8,192 tokens", study.passages(2 * LONG, 2 * LONG - 512, 2), study.variants("quest ahead oracle", ["0.06"])
    )


def block_sizes(study: Study) -> list[QualityRow]:
    variants = [study.dense()]
    for size in (1, 16, 32, 64):
        # Sinks and window stay as many tokens.
        plan = replace(
            parse_budget("0.12", study.plan),
            block_size=size,
            sink_blocks=max(1, 16 // size),
            window_blocks=max(1, 64 // size),
        )
        variants += [Variant(m, "0.12", plan, 3, f"{m}, blocks of {size}") for m in ("ahead", "oracle")]
    return study.run("block sizes", study.passages(LONG, LONG - 512, 2), variants)


def dense_layers(study: Study) -> list[QualityRow]:
    variants = [study.dense()]
    for count in (0, 1, 2):
        plan = replace(parse_budget("0.06", study.plan), dense_layers=tuple(range(count)))
        variants += [Variant(m, "0.06", plan, 3, f"{m}, {count} dense") for m in ("quest", "ahead")]
    return study.run("dense first layers", study.passages(LONG, LONG - 512, 3), variants)


def parts_of_ahead(study: Study) -> list[QualityRow]:
    """`ahead` without one of its parts, or with another value of one setting."""
    plan = study.plan
    ones = tuple(tuple(1.0 for _ in row) for row in plan.head_importance)
    changed: dict[str, tuple[str, Plan]] = {
        "ahead": ("ahead", plan),
        "no group means": ("ahead", replace(plan, group_size=0)),
        **{f"groups of {size}": ("ahead", replace(plan, group_size=size)) for size in (64, 128, 256)},
        "all heads alike": ("ahead", replace(plan, head_importance=ones)),
        **{f"{share:.0%} announced": ("ahead", replace(plan, announced_share=share)) for share in (0.5, 0.7, 1.0)},
        "oracle": ("oracle", plan),
    }
    variants = [study.dense()]
    for label, (method, changed_plan) in changed.items():
        for budget in ("0.06", "0.12"):
            variants.append(Variant(method, budget, parse_budget(budget, changed_plan), 3, label))
    return study.run("parts of ahead", study.passages(LONG, LONG - 512, 3), variants)


STUDIES: list[tuple[str, Callable[[Study], list[QualityRow]]]] = [
    ("long text", long_text),
    ("pass key", pass_key),
    ("recall at 2048", lambda study: recall(study, 2048)),
    ("recall at 4096", lambda study: recall(study, LONG)),
    ("recall at 8192", lambda study: recall(study, 2 * LONG)),
    ("copy", copying),
    ("8,192 tokens", eight_thousand),
    ("block sizes", block_sizes),
    ("dense first layers", dense_layers),
    ("parts of ahead", parts_of_ahead),
]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m specahead.lab.evaluation.quality", description=__doc__)
    parser.add_argument("--books", required=True, metavar="DIR", help="folder of .txt files")
    parser.add_argument("--out", default="docs", metavar="DIR", help="folder in which quality/ is written")
    parser.add_argument(
        "--only", nargs="*", choices=[name for name, _ in STUDIES], help="print these tables, write nothing"
    )
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
    for name, run in STUDIES:
        if not flags.only or name in flags.only:
            print(f"\n## {name}\n{report.to_text(run(study))}", flush=True)
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
    write_json(folder / "rows.json", {name: list(map(asdict, rows)) for name, rows in study.rows.items()})
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
