"""`specahead evaluate`: measure what the sparsity methods cost in quality, and compare tokens."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from specahead import models
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.lab.evaluation import cases, drafts, identity, report, self_drafting
from specahead.lab.evaluation.kept_sums import KeptSums
from specahead.lab.evaluation.rounds import Variant, VariantSums
from specahead.lab.evaluation.run import Pair, evaluate, variants_of
from specahead.lab.results import text_table, to_json
from specahead.sparsity.plan import Plan, load_plan

# Flags that a variant's sums on a case do not depend on, or that the sums are named by.
_OF_NO_CASE = "command", "methods", "budgets", "cases", "workers", "json", "resume"


def run(flags: argparse.Namespace) -> None:
    """Measure and print what the task asks for. Raises ValueError for flags that do not fit together.

    `identity` exits with 1 if any token differs.
    """
    plan = load_plan(flags.plan)
    if flags.task == "identity":
        _evaluate_identity(flags, plan)
        return
    if not flags.text and not flags.books:
        raise ValueError(f"evaluate {flags.task} reads texts: give --text or --books")
    texts = cases.read_texts(flags.text or cases.held_out_files(flags.books, plan))
    {"drafts": _evaluate_drafts, "self": _evaluate_self}.get(flags.task, _compare_methods)(flags, plan, texts)


def _compare_methods(flags: argparse.Namespace, plan: Plan, texts: dict[str, str]) -> None:
    tokenizer = load_tokenizer(flags.target)
    if flags.task == "perplexity":
        prefilled = flags.context - 512 if flags.prefilled is None else flags.prefilled
        chosen = cases.perplexity_cases(texts, tokenizer, flags.context, prefilled, flags.passages)
    elif flags.task == "recall":
        chosen = cases.recall_cases(list(cases.RECALL), texts, tokenizer, flags.context, flags.cases)
    else:
        chosen = cases.copy_cases(texts, tokenizer, flags.context, flags.cases)
    variants = variants_of(flags.methods.split(","), flags.budgets.split(","), plan, flags.gamma)
    pair = Pair(flags.target, flags.draft, flags.kv_cache_dtype, flags.quantization)
    kept = _kept_sums(flags, plan, chosen, variants)

    def take(case: int, variant: int, sums: VariantSums) -> None:
        kept.add(case, variant, sums)
        if flags.task == "perplexity":
            name, dense = f"{chosen[case].name}, {len(chosen[case].tokens)} tokens:", kept.by_case[case][0]
            tqdm.write(report.of_variant(name, variants[variant], sums, dense), file=sys.stderr)

    sums = evaluate(pair, chosen, variants, flags.workers, flags.task, kept.by_case, take)
    rows = report.to_rows(flags.task, variants, sums)
    kept.save(rows)
    print(to_json(rows) if flags.json is True else report.to_text(rows, sums))


def _kept_sums(flags: argparse.Namespace, plan: Plan, chosen: list[cases.Case], variants: list[Variant]) -> KeptSums:
    """Return the sums that the --json file has, if --resume asks for them, and what writes it."""
    file = flags.json if isinstance(flags.json, str) else None
    if flags.resume and file is None:
        raise ValueError("--resume goes on from the sums in a --json file: name one")
    settings = {name: value for name, value in vars(flags).items() if name not in _OF_NO_CASE} | {"plan": plan.hash}
    return KeptSums(Path(file) if file else None, flags.resume, settings, chosen, variants)


def _evaluate_identity(flags: argparse.Namespace, plan: Plan) -> None:
    sources = cases.held_out_files(flags.books, plan) if flags.books else flags.text or [str(models.DEMO_TEXT)]
    hot = [float(share) for share in flags.hot.split(",")]
    prompts = identity.prompts_of(cases.read_texts(sources), load_tokenizer(flags.target), flags.context)
    requests = identity.Requests(prompts, flags.generated, flags.gamma)
    plan = replace(plan, least_tokens=0)  # approximate sessions are to fetch what they choose
    rows = list(identity.compare(flags.target, flags.draft, plan, requests, hot))
    print(to_json(rows) if flags.json else identity.to_text(rows))
    if not all(row.identical for row in rows):
        sys.exit(1)


def _evaluate_self(flags: argparse.Namespace, plan: Plan, texts: dict[str, str]) -> None:
    rows = self_drafting.run_study(flags, plan, texts)
    print(to_json(rows) if flags.json else text_table(self_drafting.COLUMNS, rows, left=1))


def _evaluate_drafts(flags: argparse.Namespace, plan: Plan, texts: dict[str, str]) -> None:
    tables = drafts.run_study(
        Pair(flags.target, flags.draft),
        plan,
        texts,
        context=flags.context,
        passages=flags.passages,
        generated=flags.generated,
        recalled=flags.cases,
        gamma=flags.gamma,
        workers=flags.workers,
    )
    if flags.json:
        print(to_json(tables))
    else:
        print("\n\n".join(f"{name}\n{text_table(drafts.COLUMNS, rows, left=0)}" for name, rows in tables.items()))
