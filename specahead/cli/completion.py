"""`specahead completion`: a script by which a shell completes our commands and flags."""

import argparse

import shtab

_FILES = {"FILE": shtab.FILE, "PLAN.JSON": shtab.FILE, "TEXT_FILE": shtab.FILE, "DIR": shtab.DIRECTORY}


def run(flags: argparse.Namespace) -> None:
    """Print the shell's completion script."""
    from specahead.cli.main import make_parser  # which imports this module

    parser = make_parser()
    _complete_files(parser)
    print(shtab.complete(parser, flags.shell))


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Have flags that take a file or a folder completed by existing ones."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command)
        elif action.metavar in _FILES:
            action.complete = _FILES[action.metavar]  # type: ignore[attr-defined, index]
