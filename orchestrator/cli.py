"""The `specahead` command."""

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

import models
from orchestrator.client import Generation, generate

if TYPE_CHECKING:
    from sparsity.plan import Plan


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="specahead", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_generate(commands.add_parser("generate", help="continue a prompt on a running server"))
    _add_calibrate(commands.add_parser("calibrate", help="make a plan for a pair of models"))
    _add_evaluate(commands.add_parser("evaluate", help="measure what the sparsity methods cost in quality"))
    bench = commands.add_parser("bench", help="measure speed").add_subparsers(dest="bench", required=True)
    _add_bench_stack(
        bench.add_parser("stack", help="what a round costs without the models: codec, gRPC, ledger, batching")
    )
    _add_bench_codec(bench.add_parser("codec", help="announcement sizes and times over recorded selections"))
    _add_bench_reads(
        bench.add_parser(
            "reads", help="recorded reads of the target behind the real services, and their churn"
        )
    )
    _add_bench_residency(
        bench.add_parser("residency", help="what a hot buffer of KV pages would miss, by recorded selections")
    )
    _add_bench_kernels(bench.add_parser("kernels", help="attention and selection kernels on a GPU"))
    _add_bench_step(bench.add_parser("step", help="whole steps of target and draft on a GPU"))
    _add_bench_offload(
        bench.add_parser(
            "offload", help="whole steps over KV of which a part lies on the GPU, by recorded reads"
        )
    )
    _add_bench_serve(
        bench.add_parser("serve", help="tokens a second of the services, random weights, imposed acceptance")
    )
    flags = parser.parse_args(arguments)
    try:
        flags.run(flags)
    except grpc.RpcError as error:
        sys.exit(f"error: {error.code().name}: {error.details()}")  # type: ignore[attr-defined]
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE")
    prompt.add_argument("stdin", nargs="?", choices=["-"], help="read the prompt from standard input")
    parser.add_argument("--address", metavar="HOST:PORT", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[], metavar="S", help="may be repeated")
    parser.add_argument("--exactness", choices=["exact", "approximate"], default="exact")
    parser.add_argument("--sparsity", default="", metavar="METHOD", help="how approximate reads the KV")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end instead of the text"
    )
    parser.set_defaults(run=_generate)


def _generate(flags: argparse.Namespace) -> None:
    prompt = _read_prompt(flags)
    for name, value, bits in (("--max-tokens", flags.max_tokens, 32), ("--seed", flags.seed, 64)):
        if value is not None and not 0 <= value < 2**bits:
            raise ValueError(f"{name} must lie in [0, 2^{bits}), got {value}")

    def show(text: str) -> None:
        print(text, end="", flush=True)

    result = generate(
        flags.address,
        prompt,
        max_tokens=flags.max_tokens,
        temperature=flags.temperature,
        top_p=flags.top_p,
        seed=flags.seed,
        stop=flags.stop,
        exactness=flags.exactness,
        sparsity=flags.sparsity,
        on_text=None if flags.json else show,
    )
    print(json.dumps(to_json(result)) if flags.json else "")


def _read_prompt(flags: argparse.Namespace) -> str:
    if flags.prompt is not None:
        return flags.prompt
    try:
        if flags.prompt_file is not None:
            return Path(flags.prompt_file).read_text(encoding="utf-8")
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flags.prompt_file or 'standard input'} is not UTF-8 text: {error}") from None


def to_json(result: Generation) -> dict[str, object]:
    content = dataclasses.asdict(result)
    content["usage"] = {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(result.token_ids),
        "total_tokens": result.prompt_tokens + len(result.token_ids),
    }
    return content


def _add_pair(parser: argparse.ArgumentParser, required: bool) -> None:
    """Both models; the bundled pair where they may be left out."""
    for name, default in (("--target", models.TARGET), ("--draft", models.DRAFT)):
        text = "Hugging Face id or folder" + ("" if required else " (default: the bundled model)")
        parser.add_argument(name, required=required, default=str(default), help=text)


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    _add_pair(parser, required=True)
    parser.add_argument("--text", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--out", required=True, metavar="PLAN.JSON")
    parser.add_argument("--context", type=int, default=4096, help="tokens read of each passage")
    parser.add_argument("--passages", type=int, default=3, help="passages read of each file, evenly spread")
    parser.add_argument("--stride", type=int, default=64, help="tokens between samples")
    parser.add_argument("--skipped", type=int, default=1024, help="leading tokens without samples")
    parser.add_argument(
        "--gamma", type=int, default=4, help="tokens drafted a round; a sample is gamma + 1 queries"
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--group-size", type=int, default=512, help="tokens whose means stand in for unread blocks"
    )
    parser.add_argument(
        "--budget", type=float, default=0.1, help="share of the KV that approximate reads by default"
    )
    parser.add_argument("--sink-blocks", type=int, default=1)
    parser.add_argument("--window-blocks", type=int, default=4)
    parser.add_argument(
        "--dense-layers", type=int, nargs="*", default=[], help="target layers that read everything"
    )
    parser.add_argument(
        "--plots", metavar="DIR", help="draw the head and layer maps and the prunable share by layer"
    )
    parser.set_defaults(run=_calibrate)


def _calibrate(flags: argparse.Namespace) -> None:
    # Models are imported only by the commands that run them.
    from evaluation.plots import plot_maps, plot_prunable
    from sparsity.calibration import CalibrationSettings, calibrate_files, overlap_shares
    from sparsity.plan import save_plan

    settings = CalibrationSettings(
        context=flags.context,
        stride=flags.stride,
        skipped=flags.skipped,
        queries=flags.gamma + 1,
        block_size=flags.block_size,
        group_size=flags.group_size,
        budget=flags.budget,
        sink_blocks=flags.sink_blocks,
        window_blocks=flags.window_blocks,
        dense_layers=tuple(flags.dense_layers),
    )
    progress = Path(f"{flags.out}.progress")
    plan, sums = calibrate_files(flags.draft, flags.target, flags.text, flags.passages, settings, progress)
    save_plan(plan, flags.out)
    print(f"{flags.out}: plan {plan.hash}, mean top-k overlap by budget {plan.provenance['mean_overlap']}")
    if flags.plots:
        folder = Path(flags.plots)
        overlap = overlap_shares(sums, settings, plan.budget).numpy()
        paths = plot_maps(plan, overlap, (sums.similarity / sums.samples).numpy(), folder)
        for path in [*paths, plot_prunable(plan, folder / "prunable.png")]:
            print(path)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    _add_pair(parser, required=False)
    parser.add_argument("task", choices=["perplexity", "recall", "copy", "drafts", "identity"])
    parser.add_argument("--plan", default=str(models.PLAN), help="default: the bundled pair's")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="files, or ids of Hugging Face data sets (identity: the demo's text if none is given)",
    )
    source.add_argument(
        "--books", metavar="DIR", help=".txt files, those left out that the plan was calibrated on"
    )
    parser.add_argument("--methods", default="streaming,quest,sts,ahead,oracle", metavar="A,B")
    parser.add_argument(
        "--budgets", default="0.06,0.12", metavar="X,pY", help="shares of the KV (0.06) and masses (p0.95)"
    )
    parser.add_argument(
        "--context", type=int, help="tokens of each case (default: 4096, drafts 3000, identity 1000)"
    )
    parser.add_argument(
        "--prefilled", type=int, help="perplexity: tokens read densely (default: all but the last 512)"
    )
    parser.add_argument(
        "--passages", type=int, help="perplexity, drafts: passages of each text (default: 1, drafts 4)"
    )
    parser.add_argument("--cases", type=int, default=12, help="recall, copy, drafts: cases (of each kind)")
    parser.add_argument(
        "--kinds", default="pass-key,named-keys,pairs", metavar="A,B", help="recall, drafts: what is hidden"
    )
    parser.add_argument(
        "--gamma", type=int, help="drafted tokens a round; γ + 1 are verified (default: 3, drafts 4)"
    )
    parser.add_argument("--read-shares", default="0.25,0.1", metavar="X,Y", help="drafts: of sparse steps")
    parser.add_argument(
        "--refresh", default="1,2,4", metavar="N,M", help="drafts: rounds from a dense first step to the next"
    )
    parser.add_argument(
        "--hot",
        metavar="X,Y",
        help="identity: frames, of the pages of all sessions (default: 0.5,0.25)",
    )
    parser.add_argument(
        "--generated", type=int, default=64, help="drafts, identity: tokens after each passage"
    )
    parser.add_argument("--page", metavar="FILE", help="drafts: fill the tables into docs/quality.md")
    parser.add_argument(
        "--sharing", choices=["pooled", "union", "first", "per_query"], help="by a round's queries"
    )
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--group-size", type=int, help="0: nothing stands in for what is not read")
    parser.add_argument("--dense-layers", type=int, nargs="*")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one a core")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--markdown", metavar="FILE")
    parser.add_argument("--plots", metavar="DIR")
    parser.set_defaults(run=_evaluate, typed=partial(_typed, parser))


def _evaluate(flags: argparse.Namespace) -> None:
    from engine.loading import load_tokenizer
    from evaluation import cases, plots, report
    from evaluation.run import Pair, evaluate, variants_of
    from sparsity.plan import load_plan

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


def _evaluate_identity(flags: argparse.Namespace, plan: "Plan") -> None:
    """Exits with 1 if any token differs."""
    from engine.loading import load_tokenizer
    from evaluation import cases
    from orchestrator import identity
    from orchestrator.demo import TEXT

    sources = cases.held_out_files(flags.books, plan) if flags.books else flags.text or [str(TEXT)]
    hot = [float(share) for share in (flags.hot or "0.5,0.25").split(",")]
    tokenizer = load_tokenizer(flags.target)
    prompts = identity.prompts_of(cases.read_texts(sources), tokenizer, flags.context or 1000)
    gamma = 4 if flags.gamma is None else flags.gamma
    requests = identity.Requests(prompts, flags.generated, gamma)
    rows = list(identity.compare(flags.target, flags.draft, plan, requests, hot))
    print(identity.to_json(rows) if flags.json else identity.to_text(rows))
    if not all(row.identical for row in rows):
        sys.exit(1)


def _evaluate_drafts(flags: argparse.Namespace, plan: "Plan", texts: dict[str, str]) -> None:
    from evaluation import drafts, quality
    from evaluation.run import Pair

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


def _add_bench_stack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=512, help="tokens generated by each session")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    parser.set_defaults(run=_bench_stack)


def _bench_stack(flags: argparse.Namespace) -> None:
    from benchmarks.stack import run_stack_benchmark

    run_stack_benchmark(flags.sessions, flags.tokens, flags.gamma, flags.json)


def _add_bench_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="8b", metavar="NAME", help="8b, 1b, or a model's folder or id")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[10240, 32768, 102400])
    parser.add_argument("--queries", type=int, default=5, help="of each sequence")
    parser.add_argument("--share", type=float, default=0.1, help="of the pages that sparse attention reads")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    parser.set_defaults(run=_bench_kernels)


def _bench_kernels(flags: argparse.Namespace) -> None:
    from benchmarks.gpu_timing import require_gpu
    from benchmarks.kernels import run_kernel_benchmark
    from benchmarks.shapes import read_shape_of

    require_gpu()
    sizes = (flags.batch, flags.context, flags.queries, flags.share, flags.repeats)
    run_kernel_benchmark(flags.shape, read_shape_of(flags.shape), *sizes, flags.json)


def _add_bench_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target-shape", default="8b", metavar="NAME", help="8b, 1b, or a model's folder or id"
    )
    parser.add_argument("--draft-shape", default="1b", metavar="NAME")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", metavar="FILE")
    parser.set_defaults(run=_bench_step)


def _bench_step(flags: argparse.Namespace) -> None:
    from benchmarks.gpu_timing import require_gpu
    from benchmarks.shapes import read_shape_of
    from benchmarks.step import run_step_benchmark

    require_gpu()
    pair = [(name, read_shape_of(name)) for name in (flags.target_shape, flags.draft_shape)]
    run_step_benchmark(*pair[0], *pair[1], flags.repeats, flags.json)


def _add_bench_offload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", default="8b", metavar="NAME", help="8b, 1b, tiny, or a model's folder or id"
    )
    parser.add_argument("--batches", type=int, nargs="+", metavar="N", help="default: 1 8")
    parser.add_argument("--contexts", type=int, nargs="+", default=[10240, 32768, 102400], metavar="N")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.1], metavar="X", help="of the pages that a step selects"
    )
    parser.add_argument(
        "--hot", type=float, nargs="+", metavar="X", help="frames, of all pages (default: 0.125 0.25 0.5)"
    )
    parser.add_argument(
        "--kv-memory",
        type=float,
        metavar="GIB",
        help="of the GPU, instead of --batches and --hot: as many sessions as fit it, and more in tiers",
    )
    parser.add_argument(
        "--sessions-factor", type=int, metavar="N", help="times as many sessions in tiers (default: 4)"
    )
    parser.add_argument("--queries", type=int, default=5, help="of each sequence")
    parser.add_argument(
        "--passes", type=int, default=4, help="over the recorded rounds, with nothing hot at first"
    )
    parser.add_argument(
        "--home-layers",
        type=int,
        default=1,
        help="layers with pinned memory of their own; the others share it",
    )
    parser.add_argument(
        "--host-memory", type=float, metavar="GIB", help="that may be pinned (default: what is free)"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="step times against the size of the hot buffer")
    parser.set_defaults(run=_bench_offload)


def _bench_offload(flags: argparse.Namespace) -> None:
    from benchmarks.gpu_timing import require_gpu
    from benchmarks.offload import Settings, run_offload_benchmark
    from benchmarks.shapes import read_shape_of

    if flags.shape != "tiny":  # which is rehearsed without a GPU
        require_gpu()
    if flags.kv_memory is not None and (flags.batches or flags.hot):
        raise ValueError(
            "--kv-memory says how many sessions and frames there are: leave --batches and --hot out"
        )
    if flags.kv_memory is None and flags.sessions_factor is not None:
        raise ValueError("--sessions-factor is of the sessions that fit --kv-memory: give it")
    given = {
        "batches": flags.batches and tuple(flags.batches),
        "hot": flags.hot and tuple(flags.hot),
        "host_memory": None if flags.host_memory is None else int(flags.host_memory * 2**30),
        "kv_memory": None if flags.kv_memory is None else int(flags.kv_memory * 2**30),
        "sessions_factor": flags.sessions_factor,
    }
    settings = Settings(
        contexts=tuple(flags.contexts),
        shares=tuple(flags.shares),
        queries=flags.queries,
        passes=flags.passes,
        home_layers=flags.home_layers,
        **{name: value for name, value in given.items() if value is not None},
    )
    run_offload_benchmark(flags.shape, read_shape_of(flags.shape), settings, flags.json, flags.plot)


def _add_bench_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target-shape", default="8b", choices=["8b", "1b", "tiny"])
    parser.add_argument("--draft-shape", default="1b", choices=["8b", "1b", "tiny"])
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--context", type=int, default=32768, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=200, help="generated by each session")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.8, help="imposed, a token")
    parser.add_argument("--budget", type=float, default=0.1, help="share of the KV that approximate reads")
    parser.add_argument("--read-share", type=float, default=0.1, help="of later draft steps")
    parser.add_argument("--waves", type=int, default=0, help="parts that sessions are drafted in; 0: 2")
    parser.add_argument("--no-ahead", action="store_true", help="wait for each verdict before drafting on")
    parser.add_argument(
        "--host-kv-memory",
        type=float,
        metavar="GIB",
        help="as the home of the target's KV (default: no tiers)",
    )
    parser.add_argument(
        "--kv-memory",
        type=float,
        metavar="GIB",
        help="of the target's GPU for KV (default: what is left of it)",
    )
    parser.add_argument("--sparse-only", action="store_true", help="leave the dense rows out")
    parser.add_argument(
        "--gpus",
        type=int,
        nargs=2,
        metavar=("TARGET", "DRAFT"),
        help="device of each service; else as torch finds",
    )
    parser.add_argument("--json", metavar="FILE")
    parser.set_defaults(run=_bench_serve)


def _bench_serve(flags: argparse.Namespace) -> None:
    from benchmarks.serve import run_serve_benchmark

    numbers = {"read-share": flags.read_share, "waves": flags.waves}
    drafting = [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
    memory = {"host-kv-memory": flags.host_kv_memory, "kv-memory": flags.kv_memory}
    if any(value is not None and value <= 0 for value in memory.values()):
        raise ValueError("--host-kv-memory and --kv-memory must be positive; leave out what is not wanted")
    given = {name: value for name, value in memory.items() if value is not None}
    target_kv = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    run_serve_benchmark(
        flags.target_shape,
        flags.draft_shape,
        flags.sessions,
        flags.context,
        flags.tokens,
        flags.gamma,
        flags.acceptance,
        flags.budget,
        (*drafting, *(("--no-ahead",) if flags.no_ahead else ())),
        (*target_kv,),
        tuple(flags.gpus) if flags.gpus else None,
        flags.json,
        not flags.sparse_only,
    )


def _add_bench_residency(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hot", type=float, nargs="+", default=[0.125, 0.25, 0.5], metavar="X", help="slots, of all pages"
    )
    parser.add_argument(
        "--pools", nargs="+", choices=["head", "layer"], default=["head", "layer"], help="who shares slots"
    )
    parser.add_argument("--layers", type=int, default=32, help="evenly spread ones; all 32 take some minutes")
    parser.add_argument(
        "--traces",
        choices=["draft", "reads"],
        default="draft",
        help="draft: what a draft would announce (bench codec); reads: what the target read (bench reads)",
    )
    parser.add_argument("--json", metavar="FILE")
    parser.set_defaults(run=_bench_residency)


def _bench_residency(flags: argparse.Namespace) -> None:
    from benchmarks.residency import run_residency_benchmark

    run_residency_benchmark(flags.hot, flags.pools, flags.layers, flags.json, flags.traces)


def _add_bench_reads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record",
        metavar="BOOKS",
        help="record from a folder of .txt files first, by services started for it; half an hour on two cores",
    )
    parser.add_argument("--passages", type=int, default=32, help="recorded for each share")
    parser.add_argument("--json", metavar="FILE")
    parser.set_defaults(run=_bench_reads)


def _bench_reads(flags: argparse.Namespace) -> None:
    from benchmarks.read_trace import run_reads_benchmark

    run_reads_benchmark(flags.record, flags.passages, flags.json)


def _add_bench_codec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=20, help="of each encoding and decoding that is timed")
    parser.add_argument(
        "--record", nargs="+", metavar="TEXT", help="record the selections from these files first"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.set_defaults(run=_bench_codec)


def _bench_codec(flags: argparse.Namespace) -> None:
    from benchmarks.codec import run_codec_benchmark

    run_codec_benchmark(flags.repeats, flags.json, flags.record)


if __name__ == "__main__":
    main()
