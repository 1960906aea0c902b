"""`python -m draft_service`: a draft process by itself, for deployments without Ray and for tests."""

import os
import sys

from specahead.config import DraftSettings, SettingsError, resolve_service
from specahead.config.arguments import Parser
from specahead.config.process import prepare_process
from specahead.wire.server import run_service


def main() -> None:
    prepare_process()
    parser = Parser(prog="python -m draft_service", description=__doc__)
    try:
        settings, _ = resolve_service(parser, DraftSettings(port=50053), sys.argv[1:], os.environ)
    except SettingsError as error:
        sys.exit(f"error: {error}")
    if not settings.targets:
        parser.error("a draft serves targets: give --target HOST:PORT, once for each")
    if not settings.has_draft:
        parser.error(f"a draft service needs a draft model, and with {settings.model!r} there is none")
    from draft_service.service import run  # --help and what is refused above need no torch

    run_service(settings, lambda on_ready: run(settings, on_ready))


if __name__ == "__main__":
    main()
