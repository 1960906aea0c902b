"""The `specahead` command."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc

from orchestrator.client import Generation, generate


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="specahead", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_generate(commands.add_parser("generate", help="continue a prompt on a running server"))
    _add_calibrate(commands.add_parser("calibrate", help="make a plan for a pair of models"))
    bench = commands.add_parser("bench", help="measure speed").add_subparsers(dest="bench", required=True)
    _add_bench_stack(
        bench.add_parser("stack", help="what a round costs without the models: codec, gRPC, ledger, batching")
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


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="Hugging Face id or folder")
    parser.add_argument("--draft", required=True, help="Hugging Face id or folder")
    parser.add_argument("--text", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--out", required=True, metavar="PLAN.JSON")
    parser.add_argument("--context", type=int, default=4096, help="tokens read of each passage")
    parser.add_argument("--passages", type=int, default=1, help="passages read of each file, evenly spread")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--budget", type=float, default=0.1, help="share of the KV blocks that approximate reads"
    )
    parser.add_argument("--sink-blocks", type=int, default=1)
    parser.add_argument("--window-blocks", type=int, default=4)
    parser.add_argument(
        "--dense-layers", type=int, nargs="*", default=[0, 1], help="target layers that read everything"
    )
    parser.set_defaults(run=_calibrate)


def _calibrate(flags: argparse.Namespace) -> None:
    # Models are imported only by the commands that run them.
    from sparsity.calibration import CalibrationSettings, calibrate_files
    from sparsity.plan import save_plan

    settings = CalibrationSettings(
        context=flags.context,
        block_size=flags.block_size,
        budget=flags.budget,
        sink_blocks=flags.sink_blocks,
        window_blocks=flags.window_blocks,
        dense_layers=tuple(flags.dense_layers),
    )
    plan = calibrate_files(flags.draft, flags.target, flags.text, flags.passages, settings)
    save_plan(plan, flags.out)
    print(f"{flags.out}: plan {plan.hash}, mean top-k overlap {plan.provenance['mean_overlap']}")


def _add_bench_stack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=512, help="tokens generated by each session")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    parser.set_defaults(run=_bench_stack)


def _bench_stack(flags: argparse.Namespace) -> None:
    from benchmarks.stack import run_stack_benchmark

    run_stack_benchmark(flags.sessions, flags.tokens, flags.gamma, flags.json)


if __name__ == "__main__":
    main()
