"""`python -m specahead.lab.benchmarks.serving.service target|draft`: a service under measurement.

Its flags are the service's own and those below. Everything else is the deployed service's: the program passes parts
(target_service.service.Parts, draft_service.service.Parts) that impose verdicts or record when steps ran.
"""

import argparse
import os
import sys

from specahead.config import DraftSettings, SettingsError, TargetSettings, resolve_service
from specahead.config.garbage import collect_seldom
from specahead.wire.server import run_service


def main() -> None:
    collect_seldom()
    side, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    program = f"python -m specahead.lab.benchmarks.serving.service {side}"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    add_flags(parser, side)
    if side not in ("target", "draft"):
        sys.exit(f"error: the first argument is target or draft, got {side!r}")
    try:
        (_run_target if side == "target" else _run_draft)(parser, arguments)
    except SettingsError as error:
        sys.exit(f"error: {error}")


def add_flags(parser: argparse.ArgumentParser, side: str) -> None:
    """Declare what a service under measurement takes beside its own flags."""
    parser.add_argument("--timeline", metavar="FILE", help="write when each step ran and each message came")
    parser.add_argument("--attached-while", metavar="FILE", help="the draft drafts for targets while this file exists")
    if side == "draft":
        return
    parser.add_argument("--acceptance", type=float, metavar="P", help="keep a drafted token with this probability")


def _run_target(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    settings, flags = resolve_service(parser, TargetSettings(port=50052), arguments, os.environ)
    from specahead.lab.benchmarks.serving.parts import target_parts  # loads torch, which --help does not need
    from target_service.service import run

    run_service(settings, lambda on_ready: run(settings, on_ready, target_parts(settings, flags)))


def _run_draft(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    settings, flags = resolve_service(parser, DraftSettings(port=50053), arguments, os.environ)
    from draft_service.service import run
    from specahead.lab.benchmarks.serving.parts import draft_parts

    run_service(settings, lambda on_ready: run(settings, on_ready, draft_parts(flags)))


if __name__ == "__main__":
    main()
