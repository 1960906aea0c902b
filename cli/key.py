"""`specahead key`: make an API key for someone."""

import argparse
import sys

from orchestrator.keys import make_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that `run` takes."""
    parser.add_argument("name", help="whose key it is, one word")
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="requests at once; 0: any number")
    parser.add_argument("--tokens-per-minute", type=int, default=0, metavar="N", help="0: any number")


def run(flags: argparse.Namespace) -> None:
    """Print the line for the keys' file to standard output, and the key, which is kept nowhere, to standard error."""
    key, line = make_key(flags.name, flags.requests, flags.tokens_per_minute)
    print(line)
    print(key, file=sys.stderr)
