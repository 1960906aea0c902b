"""The `specahead` command: its subcommands, and how it ends.

Each subcommand is a module with `add_arguments(parser)` and `run(flags)`. It is imported once its command is chosen, so
that the others' imports, torch among them, cost nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

import grpc

from config.version import running_version

COMMANDS = {
    "generate": ("cli.generate", "continue a prompt on a running server"),
    "health": ("cli.health", "ask a port for its health, as probes of containers do"),
    "key": ("cli.key", "make an API key for a client"),
    "calibrate": ("evaluation.calibration.command", "make a plan for a pair of models"),
    "evaluate": ("evaluation.command", "measure what the sparsity methods cost in quality"),
    "bench stack": ("benchmarks.stack", "what a round costs without the models: codec, gRPC, ledger, batching"),
    "bench codec": ("benchmarks.codec", "announcement sizes and times over recorded selections"),
    "bench reads": ("benchmarks.read_trace", "recorded reads of the target behind the real services, and their churn"),
    "bench residency": ("benchmarks.residency", "what a buffer of GPU pages would miss, by recorded selections"),
    "bench kernels": ("benchmarks.kernels", "attention and selection kernels on a GPU"),
    "bench step": ("benchmarks.step", "whole steps of target and draft on a GPU"),
    "bench offload": ("benchmarks.offload", "whole steps over KV of which a part lies on the GPU, by recorded reads"),
    "bench serve": ("benchmarks.serve", "tokens a second of the services, random weights, imposed acceptance"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one subcommand; an error of the server or of what was given ends in one line and exit status 1."""
    flags = _parse(sys.argv[1:] if arguments is None else list(arguments))
    try:
        flags.run(flags)
    except grpc.RpcError as error:
        sys.exit(_in_words(error))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _in_words(error: grpc.RpcError) -> str:
    """Say what ended a call, and for those that a person can mend how."""
    code, details = error.code(), error.details()  # type: ignore[attr-defined]
    remedies = {
        grpc.StatusCode.UNAVAILABLE: "; check that a server runs there, the port, and whether it speaks TLS (--tls)",
        grpc.StatusCode.UNAUTHENTICATED: " (--api-key or SPECAHEAD_API_KEY)",
    }
    return f"error: {code.name}: {details}{remedies.get(code, '')}"


def _parse(arguments: list[str]) -> argparse.Namespace:
    """The flags of the chosen command, with its function as `run`. argparse exits on --help and on what is wrong."""
    parser = argparse.ArgumentParser(prog="specahead", description="Use and measure a specahead server.")
    parser.add_argument("--version", action="version", version=f"specahead {running_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    benchmarks = commands.add_parser("bench", help="measure speed").add_subparsers(dest="bench", required=True)
    for command, (module, text) in COMMANDS.items():
        *group, name = command.split()
        chosen = (benchmarks if group else commands).add_parser(name, help=text)
        if arguments[: len(group) + 1] == command.split():
            code = import_module(module)
            code.add_arguments(chosen)
            chosen.set_defaults(run=code.run)
    return parser.parse_args(arguments)
