"""`specahead key`: make an API key for someone."""

import argparse
import sys

from orchestrator.requests.keys import make_key


def run(flags: argparse.Namespace) -> None:
    """Print the line for the keys' file to standard output, and the key, which is kept nowhere, to standard error."""
    key, line = make_key(flags.name, flags.requests, flags.tokens_per_minute)
    print(line)
    print(key, file=sys.stderr)
