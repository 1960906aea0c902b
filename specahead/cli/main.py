"""The `specahead` command: its subcommands, and how it ends.

A subcommand has flags, which a function declares that imports next to nothing, and a module with `run(flags)`, which is
imported once the command is chosen. So --help waits for no library.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple

from specahead.cli import flags as client
from specahead.config import add_launch_flags
from specahead.config.arguments import Parser
from specahead.config.clock import clock
from specahead.config.garbage import collect_seldom
from specahead.config.version import running_version
from specahead.lab.benchmarks.flags import BENCHMARKS
from specahead.lab.evaluation.flags import EVALUATIONS, add_calibrate_flags, add_evaluate_flags, add_sharing_flags
from specahead.lab.evaluation.tasks.flags import add_acceptance_flags, add_tasks_flags
from specahead.lab.plotting import check_plots


class Command(NamedTuple):
    """declare: adds its flags to a parser. module: whose `run` takes them."""

    declare: Callable[[argparse.ArgumentParser], None]
    module: str
    help: str


COMMANDS = {
    "serve": Command(add_launch_flags, "orchestrator.launch", "launch draft, target and the endpoints for clients"),
    "chat": Command(client.add_chat_flags, "specahead.cli.chat", "talk to the model of a running server"),
    "generate": Command(client.add_generate_flags, "specahead.cli.generate", "continue a prompt on a running server"),
    "status": Command(client.add_status_flags, "specahead.cli.status", "how a running server and its services are"),
    "health": Command(client.add_health_flags, "specahead.cli.health", "ask a port for its health, as probes do"),
    "key": Command(client.add_key_flags, "specahead.cli.key", "make an API key for a client"),
    "calibrate": Command(
        add_calibrate_flags, "specahead.lab.evaluation.calibration.command", "make a plan for a pair of models"
    ),
    "evaluate tasks": Command(
        add_tasks_flags, "specahead.lab.evaluation.tasks.command", "ask a running server long-context tasks, and score"
    ),
    "evaluate acceptance": Command(
        add_acceptance_flags, "specahead.lab.evaluation.tasks.acceptance", "what a running server accepts, by task"
    ),
    "evaluate sharing": Command(
        add_sharing_flags, "specahead.lab.evaluation.shared_choice", "what a choice of blocks that tokens share changes"
    ),
    **{
        f"evaluate {task}": Command(partial(add_evaluate_flags, task), "specahead.lab.evaluation.command", about)
        for task, about in EVALUATIONS.items()
    },
    **{
        f"bench {name}": Command(declare, f"specahead.lab.benchmarks.{name}", about)
        for name, (declare, about) in BENCHMARKS.items()
    },
}

GROUPS = {"bench": "measure speed", "evaluate": "measure quality"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one subcommand. Errors of the server or of the arguments end in one line and exit status 1."""
    flags = make_parser().parse_args(arguments)
    collect_seldom()
    try:
        if getattr(flags, "plot", None):
            check_plots()
        with clock("loading"):
            module = import_module(COMMANDS[flags.command].module)
        # A benchmark's cells may take minutes each.
        with clock(f"specahead {flags.command}") if flags.command.startswith("bench") else contextlib.nullcontext():
            module.run(flags)
    except BrokenPipeError:  # the reader of our output is gone: the rest is discarded
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. It sets `command` to a key of COMMANDS."""
    parser = Parser(prog="specahead", description="Serve, use and measure speculative decoding.")
    parser.add_argument("--version", action="version", version=f"specahead {running_version()}")
    groups = {"": parser.add_subparsers(metavar="COMMAND", required=True)}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            about = groups[""].add_parser(group, help=GROUPS[group])
            groups[group] = about.add_subparsers(metavar="WHAT", required=True)
        chosen = groups[group].add_parser(last, help=command.help, description=command.help)
        command.declare(chosen)
        chosen.set_defaults(command=name)
        # An error follows one line, not all flags.
        positional = chosen._get_positional_actions()
        words = "".join(f" [{a.metavar or a.dest}]" if a.nargs == "?" else f" {a.dest.upper()}" for a in positional)
        chosen.usage = f"{chosen.prog} [--help] [FLAG ...]{words}"
    return parser
