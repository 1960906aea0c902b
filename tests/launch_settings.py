"""The settings of a launch, by its flags and an environment."""

import argparse
from collections.abc import Mapping, Sequence

from specahead.config import Config, add_launch_flags, read_launch


def launch_settings(flags: Sequence[str], environment: Mapping[str, str]) -> Config:
    """Return what a launch with these flags is set to. Raises SettingsError; exits on --help and --dry-run."""
    parser = argparse.ArgumentParser()
    add_launch_flags(parser)
    return read_launch(parser.parse_args(flags), environment)
