"""`python -m target_service`: a target process by itself, for deployments without Ray and for tests."""

import argparse
import asyncio
import os
import sys

from config import SettingsError, TargetSettings, resolve_service
from target_service.service import run
from wire.server import serve_until_signal


def main() -> None:
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
    if flags.record_reads is None:
        asyncio.run(serve_until_signal("target", lambda on_ready: run(settings, on_ready)))
    else:
        _run_recording(settings, flags.record_reads)


def _run_recording(settings: TargetSettings, file: str) -> None:
    """Run the service, then write what its sparse rounds read to a file."""
    from benchmarks.recording import ReadRecording  # measurements are loaded only where they are asked for

    recording = ReadRecording(file)
    try:
        asyncio.run(serve_until_signal("target", lambda on_ready: run(settings, on_ready, recording.add)))
    finally:
        recording.save()


if __name__ == "__main__":
    main()
