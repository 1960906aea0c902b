"""`python -m target_service`: a target process by itself, for deployments without Ray and for tests."""

import argparse
import asyncio
import os
import sys
from functools import partial

from config import SettingsError, TargetSettings, resolve_service
from engine.runner import Runner
from target_service.recording import ReadRecording
from target_service.service import run
from wire.server import serve_until_signal


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m target_service", description=__doc__)
    parser.add_argument(
        "--record-reads",
        metavar="FILE",
        help="write what approximate sessions read, round by round, when the service stops (CPU only)",
    )
    try:
        settings, flags = resolve_service(parser, TargetSettings(port=50052), sys.argv[1:], os.environ)
    except SettingsError as error:
        sys.exit(f"error: {error}")
    record = partial(_open_recording, flags.record_reads) if flags.record_reads is not None else None
    asyncio.run(serve_until_signal("target", lambda on_ready: run(settings, on_ready, record)))


def _open_recording(file: str, runner: Runner) -> ReadRecording:
    """Measurements are loaded only where they are asked for."""
    from benchmarks.recording import open_recording

    return open_recording(file, runner)


if __name__ == "__main__":
    main()
