"""`python -m target_service`: a target process by itself, for deployments without Ray and for tests."""

import argparse
import os
import sys

from specahead.config import SettingsError, TargetSettings, resolve_service
from specahead.config.garbage import collect_seldom
from specahead.wire.server import run_service


def main() -> None:
    collect_seldom()
    parser = argparse.ArgumentParser(prog="python -m target_service", description=__doc__)
    parser.add_argument(
        "--record-reads",
        metavar="FILE",
        help="write what approximate sessions read, round by round, when the service stops",
    )
    try:
        settings, flags = resolve_service(parser, TargetSettings(port=50052), sys.argv[1:], os.environ)
    except SettingsError as error:
        sys.exit(f"error: {error}")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the log says what is done
    from target_service.service import run  # --help and what is refused above need no torch

    recording = None
    if flags.record_reads is not None:
        from specahead.lab.benchmarks.recording import (
            ReadRecording,  # measurements are loaded only where they are asked for
        )

        recording = ReadRecording(flags.record_reads)
    on_round = None if recording is None else recording.add
    try:
        run_service(settings, lambda on_ready: run(settings, on_ready, on_round))
    finally:
        if recording is not None:
            recording.save()


if __name__ == "__main__":
    main()
