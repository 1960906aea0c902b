"""`python -m target_service`: a target process by itself, for deployments without Ray and for tests."""

import os
import sys

from specahead.config import SettingsError, TargetSettings, resolve_service
from specahead.config.arguments import Parser
from specahead.config.process import prepare_process
from specahead.wire.server import run_service


def main() -> None:
    prepare_process()
    parser = Parser(prog="python -m target_service", description=__doc__)
    try:
        settings, _ = resolve_service(parser, TargetSettings(port=50052), sys.argv[1:], os.environ)
    except SettingsError as error:
        sys.exit(f"error: {error}")
    from target_service.service import run  # not needed by --help or refused flags, and loads torch

    run_service(settings, lambda on_ready: run(settings, on_ready))


if __name__ == "__main__":
    main()
