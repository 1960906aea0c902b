"""The `specahead` command: its subcommands, and how it ends."""

import argparse
import sys
from collections.abc import Sequence

import grpc

from cli import bench, bench_gpu
from cli.calibrate import add_calibrate
from cli.evaluate import add_evaluate
from cli.generate import add_generate

BENCHMARKS = {
    "stack": (bench.add_stack, "what a round costs without the models: codec, gRPC, ledger, batching"),
    "codec": (bench.add_codec, "announcement sizes and times over recorded selections"),
    "reads": (bench.add_reads, "recorded reads of the target behind the real services, and their churn"),
    "residency": (bench.add_residency, "what a buffer of GPU pages would miss, by recorded selections"),
    "kernels": (bench_gpu.add_kernels, "attention and selection kernels on a GPU"),
    "step": (bench_gpu.add_step, "whole steps of target and draft on a GPU"),
    "offload": (bench_gpu.add_offload, "whole steps over KV of which a part lies on the GPU, by recorded reads"),
    "serve": (bench_gpu.add_serve, "tokens a second of the services, random weights, imposed acceptance"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one subcommand; an error of the server or of what was given ends in one line and exit status 1."""
    parser = argparse.ArgumentParser(prog="specahead", description="Use and measure a specahead server.")
    commands = parser.add_subparsers(dest="command", required=True)
    add_generate(commands.add_parser("generate", help="continue a prompt on a running server"))
    add_calibrate(commands.add_parser("calibrate", help="make a plan for a pair of models"))
    add_evaluate(commands.add_parser("evaluate", help="measure what the sparsity methods cost in quality"))
    benchmarks = commands.add_parser("bench", help="measure speed").add_subparsers(dest="bench", required=True)
    for name, (add, text) in BENCHMARKS.items():
        add(benchmarks.add_parser(name, help=text))
    flags = parser.parse_args(arguments)
    try:
        flags.run(flags)
    except grpc.RpcError as error:
        sys.exit(f"error: {error.code().name}: {error.details()}")  # type: ignore[attr-defined]
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
