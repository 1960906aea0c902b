"""`specahead evaluate`: measure what the sparsity methods cost in quality, and compare tokens."""

import argparse
import dataclasses
import shlex
import sys
import time
from functools import partial
from pathlib import Path

import models
from engine.loading.tokenizer import load_tokenizer
from evaluation import cases, drafts, identity, plots, quality, report
from evaluation.run import Pair, add_pair, evaluate, variants_of
from sparsity.plan import Plan, load_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that `run` takes."""
    add_pair(parser, required=False)
    parser.add_argument("task", choices=["perplexity", "recall", "copy", "drafts", "identity"])
    parser.add_argument("--plan", default=str(models.PLAN), help="default: the bundled pair's")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="files, or ids of Hugging Face data sets (identity: the demo's text if none is given)",
    )
    source.add_argument("--books", metavar="DIR", help=".txt files, those left out that the plan was calibrated on")
    parser.add_argument("--methods", default="streaming,quest,sts,ahead,oracle", metavar="A,B")
    parser.add_argument(
        "--budgets", default="0.06,0.12", metavar="X,pY", help="shares of the KV (0.06) and masses (p0.95)"
    )
    parser.add_argument("--context", type=int, help="tokens of each case (default: 4096, drafts 3000, identity 1000)")
    parser.add_argument("--prefilled", type=int, help="perplexity: tokens read densely (default: all but the last 512)")
    parser.add_argument("--passages", type=int, help="perplexity, drafts: passages of each text (default: 1, drafts 4)")
    parser.add_argument("--cases", type=int, default=12, help="recall, copy, drafts: cases (of each kind)")
    parser.add_argument(
        "--kinds", default="pass-key,named-keys,pairs", metavar="A,B", help="recall, drafts: what is hidden"
    )
    parser.add_argument("--gamma", type=int, help="drafted tokens a round; γ + 1 are verified (default: 3, drafts 4)")
    parser.add_argument("--read-shares", default="0.25,0.1", metavar="X,Y", help="drafts: of sparse steps")
    parser.add_argument(
        "--refresh", default="1,2,4", metavar="N,M", help="drafts: rounds from a dense first step to the next"
    )
    parser.add_argument(
        "--hot", metavar="X,Y", help="identity: GPU pages, of the pages of all sessions (default: 0.5,0.25)"
    )
    parser.add_argument("--generated", type=int, default=64, help="drafts, identity: tokens after each passage")
    parser.add_argument("--page", metavar="FILE", help="drafts: fill the tables into docs/quality.md")
    parser.add_argument("--sharing", choices=["pooled", "union", "first", "per_query"], help="by a round's queries")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--group-size", type=int, help="0: nothing stands in for what is not read")
    parser.add_argument("--dense-layers", type=int, nargs="*")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one a core")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--markdown", metavar="FILE")
    parser.add_argument("--plots", metavar="DIR")
    parser.set_defaults(typed=partial(_typed, parser))


def run(flags: argparse.Namespace) -> None:
    """Measure and print what the task asks for. Raises ValueError for flags that do not fit together.

    `identity` exits with 1 if any token differs.
    """
    given = {name: getattr(flags, name) for name in ("sharing", "block_size", "group_size", "dense_layers")}
    changes = {name: value for name, value in given.items() if value is not None}
    if flags.dense_layers is not None:
        changes["dense_layers"] = tuple(flags.dense_layers)
    plan = dataclasses.replace(load_plan(flags.plan), **changes)
    if flags.task == "identity":
        _evaluate_identity(flags, plan)
        return
    if not flags.text and not flags.books:
        raise ValueError(f"evaluate {flags.task} reads texts: give --text or --books")
    texts = cases.read_texts(flags.text or cases.held_out_files(flags.books, plan))
    if flags.task == "drafts":
        _evaluate_drafts(flags, plan, texts)
        return
    for name, default in (("context", 4096), ("passages", 1), ("gamma", 3)):
        if getattr(flags, name) is None:
            setattr(flags, name, default)
    tokenizer = load_tokenizer(flags.target)
    if flags.task == "perplexity":
        prefilled = flags.context - 512 if flags.prefilled is None else flags.prefilled
        chosen = cases.perplexity_cases(texts, tokenizer, flags.context, prefilled, flags.passages)
    elif flags.task == "recall":
        chosen = cases.recall_cases(flags.kinds.split(","), texts, tokenizer, flags.context, flags.cases)
    else:
        chosen = cases.copy_cases(texts, tokenizer, flags.context, flags.cases)
    variants = variants_of(flags.methods.split(","), flags.budgets.split(","), plan, flags.gamma)
    sums = evaluate(Pair(flags.target, flags.draft), chosen, variants, flags.workers, flags.task)
    rows = report.to_rows(flags.task, variants, sums)
    print(report.to_json(rows) if flags.json else report.to_text(rows))
    if flags.markdown:
        Path(flags.markdown).write_text(report.to_markdown(rows) + "\n", encoding="utf-8")
    if flags.plots:
        for path in (
            plots.plot_quality(rows, Path(flags.plots) / f"{flags.task}-quality.png"),
            plots.plot_churn(rows, Path(flags.plots) / f"{flags.task}-churn.png"),
        ):
            print(path, file=sys.stderr)


def _evaluate_identity(flags: argparse.Namespace, plan: Plan) -> None:
    sources = cases.held_out_files(flags.books, plan) if flags.books else flags.text or [str(models.DEMO_TEXT)]
    hot = [float(share) for share in (flags.hot or "0.5,0.25").split(",")]
    tokenizer = load_tokenizer(flags.target)
    prompts = identity.prompts_of(cases.read_texts(sources), tokenizer, flags.context or 1000)
    gamma = 4 if flags.gamma is None else flags.gamma
    requests = identity.Requests(prompts, flags.generated, gamma)
    rows = list(identity.compare(flags.target, flags.draft, plan, requests, hot))
    print(identity.to_json(rows) if flags.json else identity.to_text(rows))
    if not all(row.identical for row in rows):
        sys.exit(1)


def _evaluate_drafts(flags: argparse.Namespace, plan: Plan, texts: dict[str, str]) -> None:
    numbers = {
        "context": flags.context,
        "passages": flags.passages,
        "generated": flags.generated,
        "recalled": flags.cases,
        "gamma": flags.gamma,
    }
    study = drafts.DraftStudy(**{name: value for name, value in numbers.items() if value is not None})
    shares = [float(share) for share in flags.read_shares.split(",")]
    readings = drafts.readings_of(shares, [int(every) for every in flags.refresh.split(",")])
    started = time.perf_counter()
    pair = Pair(flags.target, flags.draft)
    tables = study.run(pair, plan, texts, readings, flags.kinds.split(","), flags.workers)
    if flags.json:
        print(drafts.to_json(tables))
    else:
        print("\n\n".join(f"{name}\n{drafts.to_text(rows)}" for name, rows in tables.items()))
    if flags.markdown:
        text = "\n\n".join(drafts.to_markdown(rows) for rows in tables.values())
        Path(flags.markdown).write_text(text + "\n", encoding="utf-8")
    if flags.page:
        seconds = time.perf_counter() - started
        command = f"specahead evaluate drafts {flags.typed(flags)}"
        quality.write_drafts(tables, Path(flags.page), command, seconds)


def _typed(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> str:
    """The options that have other values than their defaults; files of this machine by their metavar."""
    words = []
    for action in parser._actions:
        value = getattr(flags, action.dest, action.default)
        if not action.option_strings or action.dest in ("page", "workers") or value == action.default:
            continue
        values = value if isinstance(value, list) else [value]
        shown = [str(action.metavar)] if action.metavar in ("FILE", "DIR") else map(str, values)
        words += [action.option_strings[-1], *shown]
    return shlex.join(words)
