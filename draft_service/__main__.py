"""`python -m draft_service`: a draft process by itself, for deployments without Ray and for tests."""

import argparse
import asyncio

from draft_service.drafter import DrafterSettings
from draft_service.service import DraftProcess, DraftServiceSettings, run
from wire.server import serve_until_signal
from wire.service_flags import add_side_flags, side_settings


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m draft_service", description=__doc__)
    add_side_flags(parser, 50053, DrafterSettings.gamma)
    parser.add_argument(
        "--target", required=True, action="append", help="HOST:PORT of a target; may be repeated"
    )
    parser.add_argument("--no-ahead", action="store_true", help="wait for each verdict before drafting on")
    parser.add_argument(
        "--waves", type=int, default=DrafterSettings.waves, help="parts that sessions are drafted in"
    )
    parser.add_argument(
        "--read-share", type=float, default=1.0, help="of the KV that a round's later steps read (GPU only)"
    )
    flags = parser.parse_args()
    try:
        drafter = drafter_settings(flags)
    except ValueError as error:
        parser.error(str(error))
    service = DraftServiceSettings(flags.target, flags.host, flags.port, drafter)
    process = DraftProcess(side_settings("draft", flags), service)
    asyncio.run(serve_until_signal("draft", lambda on_ready: run(process, on_ready)))


def drafter_settings(flags: argparse.Namespace) -> DrafterSettings:
    """Raises ValueError for flags that do not fit together."""
    return DrafterSettings(
        flags.gamma,
        ahead=not flags.no_ahead,
        waves=flags.waves,
        read_share=flags.read_share,
        prefill_chunk=flags.prefill_chunk,
        warm_sessions=min(flags.max_sessions, DrafterSettings.warm_sessions),
        max_context=flags.max_context,
    )


if __name__ == "__main__":
    main()
